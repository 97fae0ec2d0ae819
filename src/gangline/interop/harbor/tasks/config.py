"""Reads `task.toml` of a Harbor task. Keys that are not listed here are refused, not ignored.

Source: Harbor 0.26, task format 1.4.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.paths import SourcePath
from gangline.settings.plugins import explain

MAIN = "main"
"""Name of the agent's service."""
_NO_FOLDER_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]|[. ]$|^\s*$')
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Policy(_Table):
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: list[str] | None = None


class HarborHealthcheck(_Table):
    command: str
    interval_sec: float = Field(default=5, ge=0)
    timeout_sec: float = Field(default=30, ge=1)
    start_period_sec: float = Field(default=0, ge=0)
    start_interval_sec: float = Field(default=5, ge=0)
    retries: int = 3


class HarborCollect(_Table):
    """A command that runs after the agent has ended. A failure is only reported."""

    command: str
    service: str = MAIN
    timeout_sec: float = Field(default=60, gt=0)
    user: str | int | None = None


class HarborArtifact(_Table):
    source: str = Field(min_length=1)
    destination: str | None = None
    exclude: list[str] = Field(default_factory=list)
    service: str | None = None
    """None: `MAIN`."""

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, given: Any) -> Any:
        return {"source": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _stays_inside(self) -> HarborArtifact:
        if ".." in PurePosixPath(self.source).parts:
            raise ValueError(f"source {self.source!r} must not contain '..'")
        return self


class HarborAgent(_Policy):
    timeout_sec: float | None = Field(default=None, gt=0)
    user: str | int | None = None


class HarborMcpServer(_Table):
    name: str
    transport: Literal["stdio", "sse", "streamable-http", "http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = Field(default_factory=list)
    headers: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_be_given(self) -> HarborMcpServer:
        if self.transport == "sse":
            raise ValueError("this one talks sse; commands and streamable HTTP can be given")
        if secret := [name for name, value in self.headers.items() if "${" in value]:
            raise ValueError(f"headers.{secret[0]} has a variable of this machine, perhaps a secret: a task is stored")
        return self

    def given(self) -> dict[str, Any]:
        """The server in the form of a task's `agent.mcp_servers`."""
        if self.transport == "stdio":
            return {"command": [self.command, *self.args]}
        return {"url": self.url, **({"headers": self.headers} if self.headers else {})}


class HarborEnvironment(_Policy):
    build_timeout_sec: float = 600
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = None
    gpus: int | None = Field(default=None, ge=0)
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[HarborMcpServer] = Field(default_factory=list[HarborMcpServer])
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: HarborHealthcheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, given: Any) -> Any:
        """Accepts the older names `memory` and `storage`: `2G`, `512M`."""
        if not isinstance(given, dict):
            return given
        table = dict(cast("dict[str, Any]", given))
        for old in ("memory", "storage"):
            if isinstance(table.get(old), str):
                table[f"{old}_mb"] = _megabytes(table.pop(old))
        return table


class HarborVerifier(_Policy):
    timeout_sec: float = Field(default=600, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: HarborEnvironment | None = None
    collect: list[HarborCollect] = Field(default_factory=list[HarborCollect])

    @model_validator(mode="after")
    def _shares_no_environment_of_its_own(self) -> HarborVerifier:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode 'shared' and a separate environment exclude each other")
        return self


class HarborSolution(_Table):
    env: dict[str, str] = Field(default_factory=dict)


class HarborStep(_Table):
    """An agent's run and its verification, with files in `steps/NAME`."""

    name: str
    agent: HarborAgent = HarborAgent()
    verifier: HarborVerifier = HarborVerifier()
    min_reward: float | dict[str, float] | None = None
    """Below this reward, no further step is run."""
    healthcheck: HarborHealthcheck | None = None
    artifacts: list[HarborArtifact] = Field(default_factory=list[HarborArtifact])

    @model_validator(mode="after")
    def _names_a_folder(self) -> HarborStep:
        if _NO_FOLDER_NAME.search(self.name):
            raise ValueError(f"step name {self.name!r} is not a portable name of a folder")
        return self


class HarborConfig(_Table):
    """The complete file."""

    schema_version: str = "1.4"
    version: str | None = None
    """Older name of `schema_version`."""
    task: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: HarborVerifier = HarborVerifier()
    agent: HarborAgent = HarborAgent()
    environment: HarborEnvironment = HarborEnvironment()
    solution: HarborSolution = HarborSolution()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[HarborStep] | None = None
    artifacts: list[HarborArtifact] = Field(default_factory=list[HarborArtifact])


def config_of(document: dict[str, Any], path: SourcePath) -> HarborConfig:
    """Raises: InvalidRequest, naming the file and the field."""
    try:
        return HarborConfig.model_validate(document)
    except ValidationError as error:
        raise InvalidRequest(f"{path}: {explain(error)}") from error


def resolved(env: dict[str, str], where: str) -> dict[str, str]:
    """The variables with their defaults filled in.

    Raises: InvalidRequest if a value would come from this machine's environment: it may be a secret, and tasks are
    stored.
    """
    found: dict[str, str] = {}
    for name, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        if match and (match[2] is None or match[1] in os.environ):
            raise InvalidRequest(
                f"{where}.{name} is ${{{match[1]}}}: a variable of this machine, perhaps a secret, is not written into "
                "a task. Write the value into a copy of task.toml if it is none."
            )
        found[name] = value if match is None else match[2]
    return found


def _megabytes(size: str) -> int | str:
    """Other text is returned unchanged, and validation rejects it."""
    match = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([KMG])B?\s*", size, re.IGNORECASE)
    if match is None:
        return size
    return int(float(match[1]) * {"K": 1 / 1024, "M": 1, "G": 1024}[match[2].upper()])
