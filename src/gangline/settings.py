"""The operator's settings: the one place where the environment is read."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from gangline.domain.errors import InvalidRequest

__all__ = ["Settings", "local_url", "reachable_url", "read_secret"]


def _paths(value: str) -> tuple[Path, ...]:
    return tuple(Path(piece) for piece in value.split(os.pathsep) if piece)


def _words(value: str | None) -> tuple[str, ...]:
    """As a shell splits them."""
    return tuple(shlex.split(value or ""))


class Settings(BaseModel):
    """Set through `GANGLINE_*` variables; every one has a default that works."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    data_dir: Path
    """`GANGLINE_DATA`: database, journals, results, logs. Default `./.gangline`."""
    tools_dir: Path
    """`GANGLINE_TOOLS`: where agent programs are installed (`node_modules` inside). Default
    `~/.local/share/gangline/tools`."""
    cache_dir: Path
    """`GANGLINE_CACHE`: converted models. Default `$XDG_CACHE_HOME/gangline` or `~/.cache/gangline`."""
    expose: tuple[Path, ...]
    """`GANGLINE_EXPOSE`: host folders, separated by `:`, that sandboxes see read-only at the same path, beside the
    host's /usr and /etc. The Python that runs Gangline and `tools_dir` are always among them."""
    hide: tuple[Path, ...] = ()
    """`GANGLINE_HIDE`: host folders, separated by `:`, that no sandbox sees, also where they lie in one that it does
    see. `data_dir`, and the data folder that a node was started with, are always among them."""
    docker: tuple[str, ...] = ("docker",)
    """`GANGLINE_DOCKER`: the command line of Docker, such as `docker --host unix:///run/d.sock`. Default `docker`."""
    apptainer: tuple[str, ...] = ("apptainer",)
    """`GANGLINE_APPTAINER`: the command line of Apptainer. Default `apptainer`."""
    apptainer_fakeroot: bool = False
    """`GANGLINE_APPTAINER_FAKEROOT`: `1` lets agents of runtime `apptainer` be root in their container, to install
    packages; for nodes of ordinary users with subordinate ids."""
    podman: tuple[str, ...] = ("podman",)
    """`GANGLINE_PODMAN`: the command line of podman. Default `podman`."""
    container_options: tuple[str, ...] = ()
    """`GANGLINE_CONTAINER_OPTIONS`: more options of `docker run` and `podman run`, such as `--gpus=all`."""
    server_url: str | None = None
    """`GANGLINE_SERVER`: the server that the command line talks to."""
    database_url: str | None = None
    """`GANGLINE_DATABASE`: the server's database, `postgresql://...`. Default: SQLite in `data_dir`."""
    control_token: str | None = None
    """`GANGLINE_TOKEN`: opens the control plane."""
    log_format: str = "text"
    """`GANGLINE_LOG_FORMAT`: `text` or `json`; of the commands that serve."""
    otel_endpoint: str | None = None
    """`OTEL_EXPORTER_OTLP_ENDPOINT` (or `..._TRACES_ENDPOINT`): a collector; server and nodes send it traces. Needs the
    extra `otel`, which reads the other `OTEL_EXPORTER_OTLP_*` variables itself."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if environ is None else environ
        cache = env.get("GANGLINE_CACHE") or str(Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "gangline")
        tools = Path(env.get("GANGLINE_TOOLS") or "~/.local/share/gangline/tools").expanduser().resolve()
        own = (Path(sys.prefix), Path(sys.base_prefix), tools)
        return cls(
            data_dir=Path(env.get("GANGLINE_DATA") or ".gangline"),
            tools_dir=tools,
            cache_dir=Path(cache).expanduser(),
            expose=(*own, *_paths(env.get("GANGLINE_EXPOSE", ""))),
            hide=_paths(env.get("GANGLINE_HIDE", "")),
            docker=_words(env.get("GANGLINE_DOCKER")) or ("docker",),
            apptainer=_words(env.get("GANGLINE_APPTAINER")) or ("apptainer",),
            apptainer_fakeroot=env.get("GANGLINE_APPTAINER_FAKEROOT") == "1",
            podman=_words(env.get("GANGLINE_PODMAN")) or ("podman",),
            container_options=_words(env.get("GANGLINE_CONTAINER_OPTIONS")),
            server_url=env.get("GANGLINE_SERVER"),
            database_url=env.get("GANGLINE_DATABASE"),
            control_token=env.get("GANGLINE_TOKEN"),
            log_format=env.get("GANGLINE_LOG_FORMAT") or "text",
            otel_endpoint=env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
            or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
            or None,
        )


def read_secret(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The value of the environment variable `name`; requests and files name secrets and never hold them.

    Raises: InvalidRequest when it is not set, or is one that opens Gangline itself.
    """
    value = (os.environ if environ is None else environ).get(name)
    if not value or name == "GANGLINE_TOKEN":
        why = "opens this service and is told to nobody" if value else "is not set where it is asked for"
        raise InvalidRequest(f"the environment variable {name!r} {why}.")
    return value


_EVERYWHERE = ("0.0.0.0", "::", "")


def reachable_url(host: str, port: int, given: str | None = None) -> str:
    """The URL under which other machines reach a service that listens on `host`: the given URL, else the host, else
    this machine's name."""
    return given.rstrip("/") if given else _url(socket.gethostname() if host in _EVERYWHERE else host, port)


def local_url(host: str, port: int) -> str:
    """How this machine reaches it."""
    return _url("127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host, port)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
