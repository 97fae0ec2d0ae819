"""Harbor task folders: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

Graded as Harbor does: `/tests/test.sh` runs in the agent's runtime when its processes are gone, with any exit code; the
number is in `/logs/verifier/reward.json` or `reward.txt`. No such number is no reward at all.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gangline.importers.environment import Environment
from gangline.importers.files import written_folder
from gangline.importers.grading import GRADING_MARGIN_S, solution
from gangline.importers.harbor.config import HarborConfig, config_of, read_toml, resolved
from gangline.importers.harbor.network import networks_of, notes_on_services
from gangline.importers.harbor.places import INIT_S, environment_of, init_timeout_s, runtime_of
from gangline.importers.harbor.refused import notes_on_users, refuse_uncarried
from gangline.importers.harbor.skills import skills_of
from gangline.importers.harbor.steps import parts_of
from gangline.importers.harbor.verifier import Verification, is_separate, verifier_of
from gangline.importers.imported import Choices, Imported, plain

__all__ = ["is_harbor_task", "read_harbor_task"]

_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


def is_harbor_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file()


def read_harbor_task(folder: Path, choices: Choices) -> Imported:
    """Raises: InvalidRequest, naming the missing or unsupported field."""
    document = read_toml(folder / "task.toml")
    whole = config_of(document, folder / "task.toml")
    name = str((whole.task or {}).get("name") or folder.name)
    parts = parts_of(folder, name, whole)
    config = parts.config
    refuse_uncarried(folder, name, parts)
    network = networks_of(name, config, choices, separate=is_separate(config.verifier))
    settings = config.environment
    environment = environment_of(name, settings, settings.docker_image, folder / "environment", where="environment")
    runtime, notes = runtime_of(environment, settings, network.agent, choices)
    if more := parts.prepare():
        runtime["prepare"] = [*runtime.get("prepare", []), *more]
    wanted = Verification(
        name=name,
        folder=folder,
        config=config,
        artifacts=config.artifacts,
        runtime=runtime,
        network=network.verifier,
        choices=choices,
        tests=parts.tests,
        images=parts.images,
    )
    evaluator, noted = verifier_of(wanted)
    own = [*notes_on_services(config, runtime), *notes_on_users(config)]
    notes += [*noted, *(f"{name}: {note}" for note in own)]
    body: dict[str, Any] = {
        "instruction": _without_canary(parts.instruction),
        "runtime": runtime,
        "evaluator": evaluator,
        "evaluation_timeout_seconds": _evaluation_s(config),
        "metadata": {"source": "harbor", "task": name, "instance": plain(document)},
    }
    if (init_s := init_timeout_s(runtime, evaluator.get("runtime", {}))) > INIT_S:
        body["init_timeout_seconds"] = init_s
    if config.agent.timeout_sec is not None:
        body["timeout_seconds"] = config.agent.timeout_sec
    if agent := _agent(name, config, environment):
        body["agent"] = agent
    if (parts.solution / "solve.sh").is_file():
        body["solution"] = _solution(parts.solution, config)
    return Imported(
        name=name,
        body=body,
        notes=tuple(dict.fromkeys(notes)),
    )


def _agent(name: str, config: HarborConfig, environment: Environment) -> dict[str, Any]:
    """What the task gives its agent, whichever that is."""
    given: dict[str, Any] = {}
    if servers := config.environment.mcp_servers:
        given["mcp_servers"] = {server.name: server.given() for server in servers}
    if (folder := config.environment.skills_dir) is not None:
        given["skills"] = skills_of(name, folder, environment.copied())
    return given


def _evaluation_s(config: HarborConfig) -> float:
    verifier = config.verifier
    return verifier.timeout_sec + sum(hook.timeout_sec for hook in verifier.collect) + GRADING_MARGIN_S


def _solution(folder: Path, config: HarborConfig) -> dict[str, Any]:
    files = written_folder(folder, "/solution")
    files["/solution/solve.sh"]["mode"] = 0o755
    env = {"DEBIAN_FRONTEND": "noninteractive", **resolved(config.solution.env, "solution.env")}
    return solution(files, ["/solution/solve.sh"], env)


def _without_canary(text: str) -> str:
    """The instruction without the marks that keep it out of training corpora, which are not for the agent."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    while lines and not lines[0].strip():
        del lines[0]
    return "\n".join(lines)
