"""Sessions that play an environment: a native agent and a scripted engine, and the environment's own Python."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.environment import EnvironmentCall
from gangline.domain.session import SessionResult
from gangline.node.environments.session_environments import recorded_calls
from gangline.node.sessions.attempt import Attempt
from support.node.attempt import lease_of, node_parts
from support.requirements import TOOLS, need, need_command, need_module

__all__ = ["calls_of", "directly", "need_python", "played", "python_with", "step_rewards", "using"]


def need_python(variable: str, folder: str, *modules: str) -> str:
    """A Python environment with packages that are not ours, for environments in sandboxes: its folder."""
    need_module("mcp", "pip install 'gangline[mcp]'")
    need_command("bwrap", "apt-get install bubblewrap")
    return python_with(variable, folder, *modules)


def python_with(variable: str, folder: str, *modules: str) -> str:
    """A Python environment with packages that are not ours: its folder."""
    found = Path(os.environ.get(variable) or TOOLS / folder)
    need(
        (found / "bin" / "python").exists(),
        f"neither {variable} nor {found} has {', '.join(modules)}: make environments",
    )
    missing = f"', '.join(name for name in {modules!r} if not find_spec(name))"
    code = f"from importlib.util import find_spec\nraise SystemExit({missing} or 0)"
    asked = subprocess.run([found / "bin" / "python", "-c", code], capture_output=True, text=True, check=False)
    need(asked.returncode == 0, f"{found} lacks {asked.stderr.strip()}: make environments")
    return str(found)


def directly(python: str, code: str, **given: Any) -> Any:
    """The value of `result` after `code` ran in the environment's Python, without anything of ours."""
    whole = f"import json, sys\ngiven = json.loads(sys.argv[1])\nout, sys.stdout = sys.stdout, sys.stderr\n{code}\n"
    whole += "json.dump(result, out)"
    run = subprocess.run(
        [f"{python}/bin/python", "-c", whole, json.dumps(given)],
        env={**os.environ, "PYTHONHASHSEED": "0"},  # as environments have it: some draw from sets
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def using(actions: Sequence[dict[str, Any]], answer: str = "done", tool: str = "game__step") -> list[dict[str, Any]]:
    """Rules of an engine that calls the tool with each of these arguments in turn, and then answers."""
    rules: list[dict[str, Any]] = [
        {"turn": turn, "pattern": ".", "tool_calls": [{"name": tool, "arguments": action}]}
        for turn, action in enumerate(actions)
    ]
    return [*rules, {"pattern": ".", "text": answer}]


async def played(
    folder: Path,
    environment: dict[str, Any],
    rules: list[dict[str, Any]],
    *,
    python: str = "",
    role_scripts: dict[str, Any] | None = None,
    **task: Any,
) -> SessionResult:
    """A session's result; afterwards nothing of it is left. role_scripts: of the engines of roles."""
    if python:
        environment = {"runtime": {"backend": "sandbox", "python": python, "network": "none"}, **environment}
    lease = lease_of(
        **{
            "instruction": "Play.",
            "agent": {"harness": "native", "settings": {"tools": []}},
            "environments": {"game": environment},
            "evaluator": {"strategy": "environment"},
            **task,
        }
    )
    script = {"rules": rules, "context_length": 1 << 17}
    before = set(asyncio.all_tasks())
    async with node_parts(folder, script=script, role_scripts=role_scripts) as parts:
        result = await Attempt(lease, parts).live()
        assert list(parts.runtimes_folder.iterdir()) == [], "a sandbox is left"
    assert not [one for one in set(asyncio.all_tasks()) - before if not one.done()], "a task is left"
    return result


def calls_of(result: SessionResult) -> list[EnvironmentCall]:
    return list(recorded_calls(result.artifacts))


def step_rewards(result: SessionResult) -> list[float | None]:
    return [msgspec.to_builtins(call.reward) for call in calls_of(result)]
