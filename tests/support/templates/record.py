"""Makes the recordings of tests/templates anew: `PYTHONPATH=tests python -P -m support.templates.record [NAME]...`.

Agent programs run in the sandbox, as `gangline harness check` runs them, for which they must be installed. SDKs run
against a session of a node on loopback: openai, anthropic and google-genai of this environment, the AI SDK's of
GANGLINE_TOOLS, and others in the Python that GANGLINE_SDKS names; those that are not there are left out.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gangline.cli.machine.harness_check import CheckPlan, check_harnesses
from support.node.proxy import proxied
from support.requirements import TOOLS
from support.templates.listening import listen
from support.templates.recordings import FOLDER, kept
from support.templates.sdks import AGENTS

_PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "pi": ("pi", {}),
    "pi_responses": ("pi", {"api": "openai-responses"}),
    "pi_anthropic": ("pi", {"api": "anthropic-messages"}),
    "pi_google": ("pi", {"api": "google-generative-ai"}),
    "claude_code": ("claude_code", {}),
    "codex": ("codex", {}),
    "gemini_cli": ("gemini_cli", {}),
    "qwen_code": ("qwen_code", {}),
    "qwen_code_responses": ("qwen_code", {"api": "openai-responses"}),
    "qwen_code_anthropic": ("qwen_code", {"api": "anthropic"}),
    "opencode": ("opencode", {}),
    "opencode_anthropic": ("opencode", {"api": "anthropic"}),
    "mini_swe_agent": ("mini_swe_agent", {}),
    "aider": ("aider", {}),
    "openhands": ("openhands", {}),
    "terminus": ("terminus", {}),
    "native": ("native", {}),
}
"""Recording -> harness, and its settings."""
_AI_SDK = {
    "ai_sdk_responses": "openai",
    "ai_sdk_chat": "chat",
    "ai_sdk_anthropic": "anthropic",
    "ai_sdk_google": "google",
}
"""Recording -> the provider of tests/programs/js/conversation.mjs."""
_PACKAGES = {"openai": "openai", "chat": "openai-compatible", "anthropic": "anthropic", "google": "google"}

_NUM_KEPT = 4
_NUM_OF_AI_SDK = 3
"""Its script has the same conversation twice."""


def _read(path: str) -> dict[str, Any]:
    return {"name": "read_file", "arguments": {"path": path, "lines": 1}}


_MEASURE = {"name": "measure", "arguments": {"from": "a", "to": "b"}}
_MUSHING = {"pattern": "You mush", "where": "any"}
_SCRIPT: dict[str, Any] = {
    "context_length": 1_000_000,
    "rules": [
        {**_MUSHING, "turn": 0, "text": "I measure.", "tool_calls": [_MEASURE]},
        {**_MUSHING, "turn": 1, "tool_calls": [_MEASURE]},
        {"turn": 0, "text": "I look first.", "tool_calls": [_read("a.txt")]},
        {"turn": 1, "tool_calls": [_read("b.txt")]},
        {"turn": 2, "text": "It is sledge."},
        {"turn": 3, "text": "Six."},
    ],
    "default": {"text": "It is 42."},
}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _write(name: str, client: str, of_version: str, calls: list[dict[str, Any]]) -> None:
    """Calls alongside the task have no tools, where the others have any."""
    main = [call for call in calls if call["body"].get("tools")] or calls
    main = main[: _NUM_OF_AI_SDK if name in _AI_SDK else _NUM_KEPT]
    if len(main) < 2:
        print(f"{name}: only {len(calls)} calls, nothing is kept")
        return
    text = kept(client, of_version, datetime.datetime.now(datetime.UTC).date().isoformat(), main, TOOLS.resolve())
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
    print(f"{name}: {client} {of_version}, {len(main)} of {len(calls)} calls, {len(text)} bytes")


def _programs(names: list[str]) -> None:
    for name in names:
        harness, settings = _PROGRAMS[name]
        with tempfile.TemporaryDirectory() as folder:
            to, site = Path(folder) / "calls", Path(folder) / "site"
            site.mkdir()
            (site / "sitecustomize.py").write_text(_site(to))
            os.environ["PYTHONPATH"] = str(site)
            (report,) = check_harnesses(
                CheckPlan(
                    harnesses=((harness, settings),),
                    data_dir=Path(folder) / "data",
                    tokenizer="tiny",
                    tier="auto",
                    timeout_s=300,
                )
            )
            api = f" ({settings['api']})" if settings else ""
            _write(name, f"{harness}{api}", report.version or "", _lines(to))


def _site(to: Path) -> str:
    """A module that Python imports at its start: a service's node listens."""
    return (
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "if 'node' in sys.orig_argv:\n    from pathlib import Path\n"
        "    from support.templates.listening import listen\n"
        f"    listen(Path({str(to)!r}))\n"
    )


def _commands(name: str) -> Iterator[tuple[list[str], str, str]]:
    """Command without URL and key, client, version where the command does not print it."""
    if name in _AI_SDK:
        script = Path(__file__).parents[2] / "programs" / "js" / "conversation.mjs"
        package = f"@ai-sdk/{_PACKAGES[_AI_SDK[name]]}"
        described = json.loads((TOOLS / "node_modules" / package / "package.json").read_text())["version"]
        yield ["node", str(script), _AI_SDK[name]], f"ai ({package})", described
        return
    for python in (sys.executable, os.environ.get("GANGLINE_SDKS")):
        if python is not None:
            yield [python, str(Path(__file__).parent / "sdks.py"), name], name, ""


async def _sdk(name: str, to: Path) -> None:
    for command, client, of_version in _commands(name):
        to.unlink(missing_ok=True)
        async with proxied(_SCRIPT, token_texts=False) as running:
            url = f"{running.url}/s/{running.session.session_id}"
            base = f"{url}/v1beta" if name == "ai_sdk_google" else f"{url}/v1" if name in _AI_SDK else url
            more = ["tiny"] if name in _AI_SDK else []
            process = await asyncio.create_subprocess_exec(
                *command, base, running.session.key, *more, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            said, failed = await process.communicate()
        if process.returncode == 0:
            _write(name, client, of_version or said.decode().strip(), _lines(to))
            return
        print(f"{name}: {command[0]}: {failed.decode(errors='replace')[-300:]}")


def main(names: list[str]) -> None:
    chosen = names or [*_PROGRAMS, *AGENTS, *_AI_SDK]
    _programs([name for name in chosen if name in _PROGRAMS])
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "calls"
        listen(to)
        for name in chosen:
            if name not in _PROGRAMS:
                asyncio.run(_sdk(name, to))


if __name__ == "__main__":
    main(sys.argv[1:])
