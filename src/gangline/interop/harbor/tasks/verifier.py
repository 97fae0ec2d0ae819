"""Harbor's verifier as evaluator `script`: in the agent's runtime, or in a separate environment that receives the
artifacts.

A separate environment is the verifier's image, or an image built from a Dockerfile in the tests' folder (both contain
`/tests`), or a fresh copy of the task's environment, to which the tests are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.interop.harbor.tasks.config import (
    MAIN,
    HarborArtifact,
    HarborCollect,
    HarborConfig,
    HarborEnvironment,
    HarborVerifier,
    resolved,
)
from gangline.interop.harbor.tasks.places import environment_of, runtime_of
from gangline.machine.reading.grading import script_evaluator, tests_of
from gangline.machine.reading.imported import Choices
from gangline.machine.reading.paths import SourcePath

_ARTIFACTS = "/logs/artifacts"
_MAX_ARTIFACT_BYTES = 64 << 20
"""Limit for each artifact; Harbor has no such limit."""
_RUN_TESTS = """
/tests/test.sh >/logs/verifier/test-stdout.txt 2>&1 </dev/null
tail -c 2000 /logs/verifier/test-stdout.txt
"""
_MAKE_RUNNABLE = "[ -x /tests/test.sh ] || chmod +x /tests/test.sh || exit 1\n"


class VerifierImage(NamedTuple):
    """A separate verifier's image, given by name or Dockerfile; it contains `/tests`."""

    image: str | None
    context: SourcePath
    """Folder that may contain its Dockerfile."""

    @property
    def exists(self) -> bool:
        return self.image is not None or (self.context / "Dockerfile").has_file()


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """One verification of a task."""

    name: str
    folder: SourcePath
    config: HarborConfig
    artifacts: Sequence[HarborArtifact]
    runtime: dict[str, Any]
    """The agent's runtime."""
    network: dict[str, Any]
    """The verifier's network, if it is separate."""
    choices: Choices
    tests: Sequence[SourcePath]
    """Folders of tests; later ones are copied over earlier ones."""
    images: Sequence[VerifierImage]
    """Candidate images of a separate verifier, first choice first."""


def is_separate(verifier: HarborVerifier) -> bool:
    """True also if an environment is given without a mode."""
    if verifier.environment_mode is None:
        return verifier.environment is not None
    return verifier.environment_mode == "separate"


def verifier_of(wanted: Verification) -> tuple[dict[str, Any], list[str]]:
    """The body's `evaluator`, and notes. Raises: InvalidRequest."""
    verifier = wanted.config.verifier
    of_services = _of_services(wanted)
    if not is_separate(verifier):
        evaluator = _script(wanted, _tests(wanted), _RUN_TESTS)
        return evaluator, [f"{wanted.name}: artifacts are not kept"] if wanted.artifacts else []
    own = next((image for image in wanted.images if image.exists), None)
    if own is not None:
        evaluator = _script(wanted, None, _MAKE_RUNNABLE + _RUN_TESTS)
        runtime, notes = _runtime(wanted, own.image, own.context, owns_tests=True)
    else:
        evaluator = _script(wanted, _tests(wanted), _RUN_TESTS)
        runtime, notes = _runtime(wanted, wanted.config.environment.docker_image, wanted.folder / "environment")
    evaluator["refresh_runtime"] = True
    evaluator["config"]["max_collect_bytes"] = _MAX_ARTIFACT_BYTES
    evaluator["config"]["collect_folders"] = _folders(wanted.artifacts)
    if of_services:
        evaluator["config"]["collect_services"] = of_services
        runtime["folders"] = _with_places(runtime, of_services)
    if runtime == wanted.runtime:
        return evaluator, []
    return {**evaluator, "runtime": runtime}, notes


def _runtime(
    wanted: Verification, image: str | None, context: SourcePath, *, owns_tests: bool = False
) -> tuple[dict[str, Any], list[str]]:
    own = wanted.config.verifier.environment
    settings: HarborEnvironment = own or wanted.config.environment
    where = "environment" if own is None else "verifier.environment"
    environment = environment_of(wanted.name, settings, image, context, where=where, owns_tests=owns_tests)
    # An image chosen by the submitter is for the agent.
    choices = msgspec.structs.replace(wanted.choices, image=None) if owns_tests else wanted.choices
    return runtime_of(environment, settings, wanted.network, choices)


def _tests(wanted: Verification) -> dict[str, dict[str, Any]]:
    scripts = [folder / "test.sh" for folder in wanted.tests]
    if not any(script.has_file() for script in scripts):
        raise InvalidRequest(f"{wanted.name}: {' or '.join(map(str, scripts))} does not exist.")
    files: dict[str, dict[str, Any]] = {}
    for folder in wanted.tests:
        if folder.has_folder() and folder.files():
            files |= tests_of(folder, "/tests")
    files["/tests/test.sh"]["mode"] = 0o755
    return files


def _script(wanted: Verification, files: dict[str, dict[str, Any]] | None, command: str) -> dict[str, Any]:
    """files: None if the image contains the tests."""
    verifier = wanted.config.verifier
    evaluator = script_evaluator(
        command,
        files or {},
        clear=["/logs/verifier"] if files is None else ["/tests", "/logs/verifier"],
        timeout_s=verifier.timeout_sec,
        env=resolved(verifier.env, "verifier.env"),
    )
    if verifier.collect:
        evaluator["config"]["collect_commands"] = [_command(hook) for hook in verifier.collect]
    return evaluator


def _command(hook: HarborCollect) -> dict[str, Any]:
    command: dict[str, Any] = {"command": hook.command, "timeout_seconds": hook.timeout_sec}
    if hook.service != MAIN:
        command["service"] = hook.service
        if hook.user is not None:
            command["user"] = str(hook.user)
    return command


def _folders(artifacts: Sequence[HarborArtifact]) -> dict[str, list[str]]:
    """Folders to transfer and their exclusions. Always includes the artifacts folder; the first entry for a path
    wins.
    """
    found: dict[str, list[str]] = {}
    for artifact in artifacts:
        if _service_of(artifact) == MAIN:
            found.setdefault(artifact.source.rstrip("/") or "/", artifact.exclude)
    return found if _ARTIFACTS in found else {_ARTIFACTS: [], **found}


def _of_services(wanted: Verification) -> dict[str, dict[str, list[str]]]:
    """Service -> path -> exclusions, for artifacts to transfer from services.

    Raises: InvalidRequest if an artifact or a hook names an unknown service.
    """
    there = wanted.runtime.get("services", {})
    named = [hook.service for hook in wanted.config.verifier.collect] + [
        _service_of(artifact) for artifact in wanted.artifacts
    ]
    if unknown := sorted({one for one in named if one != MAIN and one not in there}):
        raise InvalidRequest(f"{wanted.name}: collects from the service {unknown[0]!r}, which it does not have.")
    found: dict[str, dict[str, list[str]]] = {}
    for artifact in wanted.artifacts:
        if (service := _service_of(artifact)) != MAIN:
            if not artifact.source.startswith("/"):
                raise InvalidRequest(f"{wanted.name}: the artifact {artifact.source!r} of a service must be absolute.")
            found.setdefault(service, {}).setdefault(artifact.source.rstrip("/") or "/", artifact.exclude)
    return found


def _service_of(artifact: HarborArtifact) -> str:
    return artifact.service or MAIN


def _with_places(runtime: dict[str, Any], of_services: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The runtime's folders, plus the folders for artifacts of services."""
    folders, workdir = list(runtime.get("folders", [])), runtime.get("workdir", "/workspace")
    for path in (PurePosixPath(path) for paths in of_services.values() for path in paths):
        # `/` cannot be a folder of a runtime, and an entry directly in `/` is usually a folder itself.
        place = path.parent if path.parent.name else path
        if place.name and not any(place.is_relative_to(one) for one in (workdir, *folders)):
            folders.append(str(place))
    return folders
