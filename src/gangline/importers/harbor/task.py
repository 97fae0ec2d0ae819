"""Harbor task folders: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

Graded as Harbor does: `/tests/test.sh` runs in the agent's runtime when its processes are gone, with any exit code; the
number is in `/logs/verifier/reward.json` or `reward.txt`. No such number is no reward at all.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.importers.environment import Environment, OwnFolders
from gangline.importers.files import read_text, written_folder
from gangline.importers.grading import GRADING_MARGIN_S, script_evaluator, solution, tests_of
from gangline.importers.harbor.config import HarborConfig, config_of, read_toml, resolved
from gangline.importers.harbor.healthcheck import healthcheck_action
from gangline.importers.harbor.network import network_of
from gangline.importers.harbor.refused import notes_on_users, refuse_uncarried
from gangline.importers.harbor.skills import skills_of
from gangline.importers.imported import Choices, Imported, plain

__all__ = ["is_harbor_task", "read_harbor_task"]

FOLDERS = OwnFolders(("/tests", "/logs/verifier", "/logs/agent", "/logs/artifacts", "/solution"))
_INIT_S = 300.0
"""A task's usual budget of INIT."""
_RUN_TESTS = """
/tests/test.sh >/logs/verifier/test-stdout.txt 2>&1 </dev/null
tail -c 2000 /logs/verifier/test-stdout.txt
"""
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


def is_harbor_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file()


def read_harbor_task(folder: Path, choices: Choices) -> Imported:
    """Raises: InvalidRequest, naming the missing or unsupported field."""
    document = read_toml(folder / "task.toml")
    config = config_of(document, folder / "task.toml")
    name = str((config.task or {}).get("name") or folder.name)
    refuse_uncarried(folder, name, config)
    if not (folder / "tests" / "test.sh").is_file():
        raise InvalidRequest(f"{name}: {folder / 'tests' / 'test.sh'} does not exist.")
    network = network_of(name, config, choices)
    environment = Environment(
        name=name,
        context=folder / "environment",
        image=config.environment.docker_image,
        workdir=config.environment.workdir,
        env=resolved(config.environment.env, "environment.env"),
        limits=_limits(config),
        folders=FOLDERS,
    )
    runtime, notes = environment.runtime(choices)
    runtime |= network
    body: dict[str, Any] = {
        "instruction": _without_canary(read_text(folder / "instruction.md")),
        "runtime": runtime,
        "evaluator": _evaluator(folder, config),
        "evaluation_timeout_seconds": config.verifier.timeout_sec + GRADING_MARGIN_S,
        "metadata": {"source": "harbor", "task": name, "instance": plain(document)},
    }
    if config.agent.timeout_sec is not None:
        body["timeout_seconds"] = config.agent.timeout_sec
    if (check := config.environment.healthcheck) is not None:
        action = healthcheck_action(check)
        runtime["prepare"] = [*runtime.get("prepare", []), action]
        body["init_timeout_seconds"] = _INIT_S + action["timeout_seconds"]
    if agent := _agent(name, config, environment):
        body["agent"] = agent
    if (folder / "solution" / "solve.sh").is_file():
        body["solution"] = _solution(folder / "solution", config)
    return Imported(name=name, body=body, notes=(*notes, *_notes(name, config)))


def _agent(name: str, config: HarborConfig, environment: Environment) -> dict[str, Any]:
    """What the task gives its agent, whichever that is."""
    given: dict[str, Any] = {}
    if servers := config.environment.mcp_servers:
        given["mcp_servers"] = {server.name: server.given() for server in servers}
    if (folder := config.environment.skills_dir) is not None:
        given["skills"] = skills_of(name, folder, environment.copied())
    return given


def _evaluator(folder: Path, config: HarborConfig) -> dict[str, Any]:
    files = tests_of(folder / "tests", "/tests")
    files["/tests/test.sh"]["mode"] = 0o755
    env = resolved(config.verifier.env, "verifier.env")
    return script_evaluator(
        _RUN_TESTS, files, clear=["/tests", "/logs/verifier"], timeout_s=config.verifier.timeout_sec, env=env
    )


def _solution(folder: Path, config: HarborConfig) -> dict[str, Any]:
    files = written_folder(folder, "/solution")
    files["/solution/solve.sh"]["mode"] = 0o755
    env = {"DEBIAN_FRONTEND": "noninteractive", **resolved(config.solution.env, "solution.env")}
    return solution(files, ["/solution/solve.sh"], env)


def _limits(config: HarborConfig) -> dict[str, Any]:
    environment = config.environment
    limits = {
        "cpus": environment.cpus,
        "memory_bytes": environment.memory_mb and environment.memory_mb << 20,
        "disk_bytes": environment.storage_mb and environment.storage_mb << 20,
    }
    return {name: value for name, value in limits.items() if value is not None}


def _notes(name: str, config: HarborConfig) -> list[str]:
    kept = ["artifacts are not kept"] if config.artifacts else []
    return [f"{name}: {note}" for note in (*notes_on_users(config), *kept)]


def _without_canary(text: str) -> str:
    """The instruction without the marks that keep it out of training corpora, which are not for the agent."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    while lines and not lines[0].strip():
        del lines[0]
    return "\n".join(lines)
