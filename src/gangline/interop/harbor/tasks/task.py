"""Harbor task folders: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

Graded as Harbor does: `/tests/test.sh` runs in the agent's runtime when its processes are gone, with any exit code; the
number is in `/logs/verifier/reward.json` or `reward.txt`. No such number is no reward at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.interop.harbor.tasks.config import HarborConfig, config_of, resolved
from gangline.interop.harbor.tasks.network import Networks, networks_of, notes_on_services
from gangline.interop.harbor.tasks.places import INIT_S, environment_of, init_timeout_s, runtime_of
from gangline.interop.harbor.tasks.refused import notes_on_users, refuse_uncarried
from gangline.interop.harbor.tasks.skills import skills_of
from gangline.interop.harbor.tasks.steps import Parts, parts_of
from gangline.interop.harbor.tasks.verifier import Verification, is_separate, verifier_of
from gangline.machine.reading.documents import read_toml
from gangline.machine.reading.environment import Environment
from gangline.machine.reading.files import written_folder
from gangline.machine.reading.grading import GRADING_MARGIN_S, solution
from gangline.machine.reading.imported import Choices, FolderFormat, Imported, plain
from gangline.machine.reading.paths import SourcePath

__all__ = ["FORMAT", "is_harbor_task", "read_harbor_task"]

_EMPTY_LOGS = {"type": "exec", "command": "find /logs/agent -mindepth 1 -delete", "timeout_seconds": 30.0}
"""An agent begins each step without the logs of the one before."""
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


def is_harbor_task(folder: Path) -> bool:
    return os.path.lexists(folder / "task.toml")


def read_harbor_task(folder: SourcePath, choices: Choices) -> Imported:
    """Raises: InvalidRequest, naming the missing or unsupported field."""
    document = read_toml(folder / "task.toml")
    whole = config_of(document, folder / "task.toml")
    name = str((whole.task or {}).get("name") or folder.name)
    every = parts_of(folder, name, whole)
    for parts in every:
        refuse_uncarried(folder, name, parts)
    networks = [networks_of(name, one.config, choices, separate=is_separate(one.config.verifier)) for one in every]
    _refuse_other_networks(name, networks)
    settings = whole.environment
    environment = environment_of(name, settings, settings.docker_image, folder / "environment", where="environment")
    runtime, notes = runtime_of(environment, settings, networks[0].agent, choices)
    if len(every) == 1 and (more := every[0].prepare()):
        runtime["prepare"] = [*runtime.get("prepare", []), *more]
    evaluators: list[dict[str, Any]] = []
    for parts, network in zip(every, networks, strict=True):
        evaluator, noted = verifier_of(_verification(name, folder, parts, runtime, network.verifier, choices))
        evaluators.append(evaluator)
        own = [*notes_on_services(parts.config, runtime), *notes_on_users(parts.config)]
        notes += [*noted, *(f"{name}: {note}" for note in own)]
    body: dict[str, Any] = {
        "instruction": _without_canary(every[0].instruction),
        "runtime": runtime,
        "metadata": {"source": "harbor", "task": name, "instance": plain(document)},
    }
    if len(every) == 1:
        body |= _only_run(every[0], evaluators[0])
        steps: list[dict[str, Any]] = []
    else:
        body["steps"] = steps = [_step(*one) for one in zip(every, evaluators, strict=True)]
        body["step_reward"] = whole.multi_step_reward_strategy or "mean"
    waits = [runtime, *steps, *(one.get("runtime", {}) for one in evaluators)]
    if (init_s := init_timeout_s(*waits)) > INIT_S:
        body["init_timeout_seconds"] = init_s
    if agent := _agent(name, whole, environment):
        body["agent"] = agent
    return Imported(name=name, body=body, notes=tuple(dict.fromkeys(notes)))


def _verification(
    name: str, folder: SourcePath, parts: Parts, runtime: dict[str, Any], network: dict[str, Any], choices: Choices
) -> Verification:
    return Verification(
        name=name,
        folder=folder,
        config=parts.config,
        artifacts=parts.config.artifacts,
        runtime=runtime,
        network=network,
        choices=choices,
        tests=parts.tests,
        images=parts.images,
    )


def _only_run(parts: Parts, evaluator: dict[str, Any]) -> dict[str, Any]:
    run: dict[str, Any] = {"evaluator": evaluator, "evaluation_timeout_seconds": _evaluation_s(parts.config)}
    if parts.config.agent.timeout_sec is not None:
        run["timeout_seconds"] = parts.config.agent.timeout_sec
    return run | _solution(parts)


def _step(parts: Parts, evaluator: dict[str, Any]) -> dict[str, Any]:
    assert parts.step is not None
    step: dict[str, Any] = {
        "name": parts.step.name,
        "instruction": _without_canary(parts.instruction),
        "prepare": [_EMPTY_LOGS, *parts.prepare()],
        "evaluator": evaluator,
        "evaluation_timeout_seconds": _evaluation_s(parts.config),
    }
    if parts.config.agent.timeout_sec is not None:
        step["timeout_seconds"] = parts.config.agent.timeout_sec
    if parts.step.min_reward is not None:
        step["min_reward"] = parts.step.min_reward
    return step | _solution(parts)


def _refuse_other_networks(name: str, networks: Sequence[Networks]) -> None:
    """Raises: InvalidRequest."""
    if any(one.agent != networks[0].agent for one in networks):
        raise InvalidRequest(
            f"{name}: its steps ask for different networks of the agent, and all work in one runtime, which has one "
            "network. Give --network full or proxy."
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


def _solution(parts: Parts) -> dict[str, Any]:
    """The field `solution`, where there is one."""
    if not (parts.solution / "solve.sh").has_file():
        return {}
    files = written_folder(parts.solution, "/solution")
    files["/solution/solve.sh"]["mode"] = 0o755
    env = {"DEBIAN_FRONTEND": "noninteractive", **resolved(parts.config.solution.env, "solution.env")}
    return {"solution": solution(files, ["/solution/solve.sh"], env)}


def _without_canary(text: str) -> str:
    """The instruction without the marks that keep it out of training corpora, which are not for the agent."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    while lines and not lines[0].strip():
        del lines[0]
    return "\n".join(lines)


def _document(folder: SourcePath) -> Any:
    return read_toml(folder / "task.toml")


FORMAT = FolderFormat(is_harbor_task, read_harbor_task, _document)
