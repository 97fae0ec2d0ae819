"""Locates the parts of a Harbor task: in its own folder or, for tasks with steps, in each step's.

A step's settings override the task's, as in Harbor. Its tests are copied over the task's; its collect hooks and
artifacts are added. Its verifier timeout is its own or Harbor's default, never the task's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.interop.harbor.tasks.config import (
    HarborAgent,
    HarborConfig,
    HarborHealthcheck,
    HarborStep,
    HarborVerifier,
)
from gangline.interop.harbor.tasks.healthcheck import healthcheck_action
from gangline.interop.harbor.tasks.verifier import VerifierImage, is_separate
from gangline.machine.reading.files import read_text, written_folder
from gangline.machine.reading.paths import SourcePath

_SETUP_S = 600.0
"""Timeout in seconds of a step's `setup.sh`; Harbor has no such limit."""
_RUN_SETUP = 'exec bash "$(pwd)/setup.sh"'


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and folders of one run and its verification, for the task or for a step."""

    config: HarborConfig
    """The task's configuration, merged with the step's."""
    step: HarborStep | None = None
    """None: the task has no steps."""
    folder: SourcePath
    """The folder with the instruction."""
    tests: tuple[SourcePath, ...]
    """Later folders are copied over earlier ones."""
    images: tuple[VerifierImage, ...]
    """Candidate images of a separate verifier, first choice first."""
    solution: SourcePath
    workdir: SourcePath | None = None
    """Files for the agent's working folder. `setup.sh`, if present, is run."""
    healthcheck: HarborHealthcheck | None = None

    @property
    def instruction(self) -> str:
        return read_text(self.folder / "instruction.md")

    def prepare(self) -> list[dict[str, Any]]:
        """Prepare actions of the agent's runtime, to run after those for the environment and earlier steps.

        Raises: InvalidRequest for a link.
        """
        actions: list[dict[str, Any]] = []
        if self.workdir is not None and self.workdir.has_folder():
            files = written_folder(self.workdir, ".")
            actions += [{"type": "write", "path": path.removeprefix("./"), **file} for path, file in files.items()]
            if (self.workdir / "setup.sh").has_file():
                actions.append({"type": "exec", "command": _RUN_SETUP, "timeout_seconds": _SETUP_S})
        if self.healthcheck is not None:
            actions.append(healthcheck_action(self.healthcheck))
        return actions


def parts_of(folder: SourcePath, name: str, config: HarborConfig) -> tuple[Parts, ...]:
    """One per step; a single one for a task without steps. Raises: InvalidRequest if two steps have the same name."""
    image = _image(config.verifier, folder / "tests")
    if not config.steps:
        own = Parts(
            config=config, folder=folder, tests=(folder / "tests",), images=(image,), solution=folder / "solution"
        )
        return (own,)
    most, times = Counter(step.name for step in config.steps).most_common(1)[0]
    if times > 1:
        raise InvalidRequest(f"{name}: two steps have the name {most!r}.")
    return tuple(_of_step(folder, config, step, image) for step in config.steps)


def _of_step(folder: SourcePath, config: HarborConfig, step: HarborStep, image: VerifierImage) -> Parts:
    own = folder / "steps" / step.name
    return Parts(
        config=_with_step(config, step),
        step=step,
        folder=own,
        tests=(folder / "tests", own / "tests"),
        images=(_image(step.verifier, own / "tests"), image),
        solution=own / "solution" if (own / "solution").has_folder() else folder / "solution",
        workdir=own / "workdir",
        healthcheck=step.healthcheck,
    )


def _image(verifier: HarborVerifier, tests: SourcePath) -> VerifierImage:
    return VerifierImage(None if verifier.environment is None else verifier.environment.docker_image, tests)


def _with_step(config: HarborConfig, step: HarborStep) -> HarborConfig:
    agent = step.agent.model_copy(
        update={
            **_policy(step.agent, config.agent),
            "user": config.agent.user if step.agent.user is None else step.agent.user,
            "timeout_sec": config.agent.timeout_sec if step.agent.timeout_sec is None else step.agent.timeout_sec,
        }
    )
    return config.model_copy(
        update={
            "steps": None,
            "agent": agent,
            "verifier": _verifier(step.verifier, config.verifier),
            "artifacts": [*config.artifacts, *step.artifacts],
        }
    )


def _verifier(step: HarborVerifier, task: HarborVerifier) -> HarborVerifier:
    decides = step if step.environment_mode is not None or step.environment is not None else task
    separate = is_separate(decides)
    return step.model_copy(
        update={
            **_policy(step, task),
            "environment_mode": "separate" if separate else "shared",
            "environment": (step.environment or task.environment) if separate else None,
            "env": task.env | step.env,
            "user": task.user if step.user is None else step.user,
            "collect": [*task.collect, *step.collect],
        }
    )


def _policy(step: HarborAgent | HarborVerifier, task: HarborAgent | HarborVerifier) -> dict[str, Any]:
    one = task if step.network_mode is None else step
    return {"network_mode": one.network_mode, "allowed_hosts": one.allowed_hosts}
