"""Runtimes of a Harbor task: the agent's, and a separate verifier's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gangline.interop.harbor.tasks.compose import compose_of
from gangline.interop.harbor.tasks.config import HarborEnvironment, resolved
from gangline.interop.harbor.tasks.healthcheck import healthcheck_action
from gangline.machine.reading.environment import Environment, OwnFolders
from gangline.machine.reading.imported import Choices
from gangline.machine.reading.paths import SourcePath

INIT_S = 300.0
"""Default INIT budget of a task, in seconds."""
_LOGS = ("/logs/verifier", "/logs/agent", "/logs/artifacts")


def environment_of(
    name: str,
    settings: HarborEnvironment,
    image: str | None,
    context: SourcePath,
    *,
    where: str,
    owns_tests: bool = False,
) -> Environment:
    """where: name of the settings' field, for messages.
    owns_tests: whether the image contains `/tests`.
    """
    env = resolved(settings.env, f"{where}.env")
    compose = None if owns_tests else compose_of(name, context, env)
    return Environment(
        name=name,
        context=context,
        image=image if compose is None else compose.image or image,
        workdir=settings.workdir,
        env=env if compose is None else compose.env | env,
        limits=_limits(settings),
        gpus=settings.gpus or 0,
        folders=OwnFolders(_LOGS if owns_tests else ("/tests", *_LOGS, "/solution")),
        services={} if compose is None else compose.services,
        notes=() if compose is None else compose.notes,
    )


def runtime_of(
    environment: Environment, settings: HarborEnvironment, network: dict[str, Any], choices: Choices
) -> tuple[dict[str, Any], list[str]]:
    """The runtime with its network and health check, and notes. Raises: InvalidRequest."""
    runtime, notes = environment.runtime(choices)
    runtime |= network
    if settings.healthcheck is not None:
        runtime["prepare"] = [*runtime.get("prepare", []), healthcheck_action(settings.healthcheck)]
    return runtime, notes


def init_timeout_s(*runtimes: dict[str, Any]) -> float:
    """INIT's budget, extended by the time that health checks (including the services') and `setup.sh` may take."""
    return INIT_S + max((sum(_waits(runtime)) for runtime in runtimes), default=0.0)


def _waits(runtime: dict[str, Any]) -> Iterator[float]:
    yield from (action.get("timeout_seconds", 0.0) for action in runtime.get("prepare", []))
    services = runtime.get("services", {}).values()
    yield from (service["healthcheck"]["within_seconds"] for service in services if "healthcheck" in service)


def _limits(settings: HarborEnvironment) -> dict[str, Any]:
    limits = {
        "cpus": settings.cpus,
        "memory_bytes": settings.memory_mb and settings.memory_mb << 20,
        "disk_bytes": settings.storage_mb and settings.storage_mb << 20,
    }
    return {name: value for name, value in limits.items() if value is not None}
