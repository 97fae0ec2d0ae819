"""Services of an agent's container, such as a database: other containers that it reaches by name."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gangline.domain.task_values import Argv, Command, Environment, Image, Line

MAX_SERVICES = 16

ServiceCondition = Literal["started", "ready"]


def _is_another(name: str) -> str:
    if name in ("main", "localhost"):
        raise ValueError(f"{name!r} is the agent's own container")
    return name


ServiceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"), AfterValidator(_is_another)]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ServiceHealthcheck(_Spec):
    """A command in the service's container that exits with 0 once the service works."""

    command: Line | Argv
    """A string is run with `sh -c`."""
    timeout_seconds: float = Field(default=30, gt=0, le=120)
    """Limit for one try; tries are one second apart."""
    within_seconds: float = Field(default=60, gt=0, le=3600)
    """Deadline after the service's start; if it does not work by then, the sandbox does not start."""


class ServiceSpec(_Spec):
    """One service. It has the same limits as the agent's container, counted separately."""

    image: Annotated[Image, Field(max_length=512)]
    """Name of an image."""
    entrypoint: Argv | None = None
    """Replaces the image's entry point, and its command with it."""
    command: tuple[Command, ...] | None = None
    """Arguments of the entry point; None: the image's own."""
    env: Environment = Field(default_factory=dict)
    user: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_:.-]{0,64}$")
    """User, with or without `:group`; None: the image's own, which may be root."""
    workdir: str | None = Field(default=None, pattern=r"^/[^\x00]*$")
    healthcheck: ServiceHealthcheck | None = None
    """None: the start does not wait for it."""
    completes: bool = False
    """Whether it ends by itself, with exit code 0, before the sandbox has started, for instance to fill a database."""
    depends_on: dict[ServiceName, ServiceCondition] = Field(default_factory=dict)
    """Services that start before this one, with the condition for each: `started`, or `ready`, which means healthy or
    completed."""

    @property
    def comes_to_be_ready(self) -> bool:
        return self.completes or self.healthcheck is not None

    @model_validator(mode="after")
    def _can_be_given(self) -> ServiceSpec:
        if self.completes and self.healthcheck is not None:
            raise ValueError("a service that completes has no healthcheck")
        return self


def checked_services(services: dict[str, ServiceSpec]) -> dict[str, ServiceSpec]:
    """Raises: ValueError when a service waits for a missing service, for itself, or for one never ready."""
    for name, service in services.items():
        for other, condition in service.depends_on.items():
            if other not in services:
                raise ValueError(f"{name}.depends_on: there is no service {other!r}")
            if condition == "ready" and not services[other].comes_to_be_ready:
                raise ValueError(f"{name}.depends_on: {other!r} is never ready: it has no healthcheck")
    try:
        TopologicalSorter({name: service.depends_on for name, service in services.items()}).prepare()
    except CycleError as error:
        raise ValueError(f"services wait for each other: {' -> '.join(error.args[1])}") from error
    return services
