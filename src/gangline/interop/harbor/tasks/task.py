"""Harbor task folders: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`.

Grading follows Harbor: `/tests/test.sh` runs in the agent's runtime after its processes have ended, and its exit code
is ignored; the number is in `/logs/verifier/reward.json` or `reward.txt`. Without a number there is no reward.

Network: the task's own policies if the submitter grants them, else the submitter's.

Unsupported fields and files are refused by name, never ignored.

Skills: the files that the Dockerfile copies to `environment.skills_dir`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from gangline.domain.errors import InvalidRequest
from gangline.domain.network import NetworkRule
from gangline.interop.harbor.tasks.config import (
    MAIN,
    HarborAgent,
    HarborConfig,
    HarborEnvironment,
    HarborVerifier,
    config_of,
    resolved,
)
from gangline.interop.harbor.tasks.places import INIT_S, environment_of, init_timeout_s, runtime_of
from gangline.interop.harbor.tasks.steps import Parts, parts_of
from gangline.interop.harbor.tasks.verifier import Verification, is_separate, verifier_of
from gangline.machine.reading.documents import read_toml
from gangline.machine.reading.environment import Environment
from gangline.machine.reading.files import written_folder
from gangline.machine.reading.grading import GRADING_MARGIN_S, solution
from gangline.machine.reading.imported import Choices, FolderFormat, Imported, plain
from gangline.machine.reading.paths import SourcePath

_EMPTY_LOGS = {"type": "exec", "command": "find /logs/agent -mindepth 1 -delete", "timeout_seconds": 30.0}
"""Empties the previous step's agent logs before each step."""
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)

_FILES = (".harborignore",)
_FILES_OF_RUN = ("trajectory.json", "tests/docker-compose.yaml", "tests/.harborignore")


def skills_of(name: str, skills_dir: str, copied: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The body's `agent.skills`: each folder with a SKILL.md.

    copied: path in the environment -> file.
    Raises: InvalidRequest if there are no skills, or a skill's file is not text.
    """
    inside = PurePosixPath(skills_dir)
    found: dict[str, dict[str, str]] = {}
    for text, file in copied.items():
        path = PurePosixPath(text)
        if inside not in path.parents or len(parts := path.relative_to(inside).parts) < 2:
            continue
        if "encoding" in file:
            raise InvalidRequest(f"{name}: environment.skills_dir: {path} is not text, and a skill's files are.")
        found.setdefault(parts[0], {})["/".join(parts[1:])] = file["content"]
    skills = {skill: files for skill, files in found.items() if "SKILL.md" in files}
    if not skills:
        raise InvalidRequest(
            f"{name}: environment.skills_dir: no COPY of environment/Dockerfile brings a SKILL.md below {skills_dir}; "
            "skills that only an image has are not carried."
        )
    return skills


def refuse_uncarried(folder: SourcePath, name: str, parts: Parts) -> None:
    """Raises: InvalidRequest, naming the unsupported fields and files."""
    step = () if parts.step is None else ("steps", parts.step.name)
    files = [*_FILES, *dict.fromkeys("/".join((*own, path)) for own in ((), step) for path in _FILES_OF_RUN)]
    asked = [*_fields(parts.config), *(path for path in files if (folder / path).is_there())]
    if asked:
        raise InvalidRequest(f"{name}: requests unsupported features: {', '.join(asked)}.")


def notes_on_users(config: HarborConfig) -> list[str]:
    """Notes for users that the task names: the agent runs as the sandbox's own user, which is never root."""
    users = {"agent.user": config.agent.user, "verifier.user": config.verifier.user}
    return [f"{field} {user!r} is the sandbox's own user" for field, user in users.items() if user is not None]


def _fields(config: HarborConfig) -> Iterator[str]:
    verifier = config.verifier
    asked = {
        "agent.user (root)": _is_root(config.agent.user),
        "verifier.user (root)": _is_root(verifier.user),
    }
    yield from (field for field, value in asked.items() if value)
    yield from _of_environment("environment", config.environment)
    if (own := verifier.environment) is not None:
        yield from _of_environment("verifier.environment", own)
        yield from (
            f"verifier.environment.{field}"
            for field, value in (("mcp_servers", own.mcp_servers), ("skills_dir", own.skills_dir))
            if value
        )
    for number, hook in enumerate(verifier.collect):
        if hook.service == MAIN and _is_root(hook.user):
            yield f"verifier.collect.{number}.user (root)"


def _of_environment(field: str, environment: HarborEnvironment) -> Iterator[str]:
    if environment.os.lower() != "linux":
        yield f"{field}.os"
    for name in ("gpu_types", "tpu"):
        if getattr(environment, name):
            yield f"{field}.{name}"


def _is_root(user: str | int | None) -> bool:
    return user in ("root", "0", 0)


class Policy(NamedTuple):
    mode: str
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.mode}: {', '.join(self.hosts)}" if self.hosts else self.mode


class Networks(NamedTuple):
    """Fields of a runtime."""

    agent: dict[str, Any]
    verifier: dict[str, Any]


def networks_of(name: str, config: HarborConfig, choices: Choices, *, separate: bool) -> Networks:
    """The networks of the agent and the verifier. They are the same unless the verifier has its own runtime.

    Tests that cannot install their tools usually give 0, so the network must be chosen explicitly.
    Raises: InvalidRequest if nothing was chosen, or the policies are not supported.
    """
    if choices.network not in (None, "list"):
        return Networks({"network": choices.network}, {"network": choices.network})
    baseline = _baseline(config.environment)
    verifiers = config.verifier.environment
    agent = _explicit(config.agent) or baseline
    verifier = _explicit(config.verifier) or (_baseline(verifiers) if separate and verifiers else baseline)
    wanted = sorted({str(one) for one in (agent, verifier, baseline) if one.mode != "no-network"})
    if choices.network is None and wanted:
        raise InvalidRequest(
            f"{name}: asks for the network ({' and '.join(wanted)}). Give --network list for the hosts that it names; "
            "--network full; or --network proxy, so that agent and tests reach the model only, and see by `gangline "
            "submit --oracle` whether its tests can do without."
        )
    if agent != verifier and not separate:
        raise InvalidRequest(
            f"{name}: agent.network_mode ({agent}) and verifier.network_mode ({verifier}) differ, and both work in one "
            "runtime, which has one network. Give --network full or proxy."
        )
    return Networks(_given(name, agent), _given(name, verifier))


def notes_on_services(config: HarborConfig, runtime: dict[str, Any]) -> list[str]:
    """Notes on differences between the services here and in Harbor."""
    if not runtime.get("services"):
        return []
    own = {_baseline(config.environment), _explicit(config.agent) or _baseline(config.environment)}
    notes = ["its services reach nothing outside"]
    if any(policy.mode != "public" for policy in own):
        notes.append("its services are at their names, where Harbor's Docker has them at the agent's localhost")
    return notes if runtime["network"] != "full" else notes[1:]


def _given(name: str, policy: Policy) -> dict[str, Any]:
    if policy.mode == "public":
        raise InvalidRequest(f"{name}: asks for the public network, which is not a list. Give --network full or proxy.")
    if not policy.hosts:
        return {"network": "proxy"}
    for host in policy.hosts:
        try:
            NetworkRule.parse(host)
        except ValueError as error:
            raise InvalidRequest(f"{name}: allowed_hosts: {error}") from error
    return {"network": "list", "network_allow": list(policy.hosts)}


def _explicit(phase: HarborAgent | HarborVerifier) -> Policy | None:
    return None if phase.network_mode is None else Policy(phase.network_mode, tuple(phase.allowed_hosts or ()))


def _baseline(environment: HarborEnvironment) -> Policy:
    mode = environment.network_mode or ("no-network" if environment.allow_internet is False else "public")
    return Policy(mode, tuple(environment.allowed_hosts or ()))


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
    if any(network.agent != networks[0].agent for network in networks):
        raise InvalidRequest(
            f"{name}: its steps ask for different networks of the agent, and all work in one runtime, which has one "
            "network. Give --network full or proxy."
        )


def _agent(name: str, config: HarborConfig, environment: Environment) -> dict[str, Any]:
    """Fields that the task sets for its agent, independent of the harness."""
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
    """The field `solution`, if there is one."""
    if not (parts.solution / "solve.sh").has_file():
        return {}
    files = written_folder(parts.solution, "/solution")
    files["/solution/solve.sh"]["mode"] = 0o755
    env = {"DEBIAN_FRONTEND": "noninteractive", **resolved(parts.config.solution.env, "solution.env")}
    return {"solution": solution(files, ["/solution/solve.sh"], env)}


def _without_canary(text: str) -> str:
    """The instruction without canary marks, which keep it out of training corpora and are not for the agent."""
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    while lines and not lines[0].strip():
        del lines[0]
    return "\n".join(lines)


def _document(folder: SourcePath) -> Any:
    return read_toml(folder / "task.toml")


FORMAT = FolderFormat(is_harbor_task, read_harbor_task, _document)
