"""Settings of a machine: its folders, container programs, and the server to use."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, IPvAnyNetwork

from gangline.domain.errors import InvalidRequest
from gangline.settings.fields import Setting
from gangline.settings.sources import Origin, Sources

_FOR_TASKS = "GANGLINE_TASK_"
_Folder = Annotated[Path, AfterValidator(Path.expanduser)]


def _expanded(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(path.expanduser() for path in paths)


_Folders = Annotated[tuple[Path, ...], AfterValidator(_expanded)]


def _are_different(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Raises: ValueError."""
    if len(set(gpus)) < len(gpus):
        raise ValueError("a GPU is named twice")
    return gpus


class Settings(BaseModel):
    """Settings for all commands. Each has a usable default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Annotated[_Folder, Setting(option="--data", env=("GANGLINE_DATA",))] = Path(".gangline")
    """Data folder: database, journals, results, logs."""
    tools_dir: Annotated[_Folder, AfterValidator(Path.resolve), Setting(env=("GANGLINE_TOOLS",))] = Field(
        default_factory=lambda: Path("~/.local/share/gangline/tools").expanduser().resolve()
    )
    """Folder of installed agent programs (`node_modules` inside). Default: `~/.local/share/gangline/tools`."""
    cache_dir: Annotated[_Folder, Setting(env=("GANGLINE_CACHE",))] = Field(
        default_factory=lambda: Path("~/.cache/gangline").expanduser()
    )
    """Folder of converted models and unpacked images. Default: `$XDG_CACHE_HOME/gangline`, else `~/.cache/gangline`."""
    expose: Annotated[_Folders, Setting(env=("GANGLINE_EXPOSE",))] = ()
    """Host folders that sandboxes see read-only at the same path, in addition to the host's /usr and /etc. The Python
    that runs Gangline and `tools_dir` are always included. The variable separates them by `:`.
    """
    prepare_folders: Annotated[_Folders, Setting(env=("GANGLINE_PREPARE_FOLDERS",))] = ()
    """Host folders that prepare actions see read-only at the same path, but agents and graders do not, such as clones
    whose later commits contain the fix; for the runtimes `sandbox` and `apptainer`. Prepare actions that name one of
    them leave no process running. The variable separates them by `:`.
    """
    image_folders: Annotated[_Folders, Setting(env=("GANGLINE_IMAGE_FOLDERS",))] = ()
    """Host folders of images: a node reports the images directly in them, and sessions with an image in one of them go
    only to nodes that have it. For the runtimes `sandbox` and `apptainer`; use the same folders on all nodes. The
    images of `gangline image build` are included. The variable separates them by `:`.
    """
    hide: Annotated[_Folders, Setting(env=("GANGLINE_HIDE",))] = ()
    """Host folders that are hidden from every sandbox, even inside a visible one. `data_dir`, and the data folder that
    a node was started with, are always included. The variable separates them by `:`.
    """
    docker: Annotated[tuple[str, ...], Setting(env=("GANGLINE_DOCKER",), words=True)] = ("docker",)
    """Command line of Docker, such as `docker --host unix:///run/d.sock`."""
    apptainer: Annotated[tuple[str, ...], Setting(env=("GANGLINE_APPTAINER",), words=True)] = ("apptainer",)
    """Command line of Apptainer."""
    apptainer_fakeroot: bool = False
    """Lets agents of runtime `apptainer` be root in their container, to install packages; for nodes of ordinary users
    with subordinate ids.
    """
    podman: Annotated[tuple[str, ...], Setting(env=("GANGLINE_PODMAN",), words=True)] = ("podman",)
    """Command line of podman."""
    container_options: Annotated[tuple[str, ...], Setting(env=("GANGLINE_CONTAINER_OPTIONS",), words=True)] = ()
    """More options of `docker run` and `podman run`, the same for all containers."""
    image_mirrors: Annotated[dict[str, str], Setting(env=("GANGLINE_IMAGE_MIRRORS",))] = Field(
        default_factory=dict[str, str]
    )
    """Where images are pulled from instead, as JSON: {"docker.io": "mirror.corp:5000/hub"} pulls
    `mirror.corp:5000/hub/library/debian:12` for `debian:12`. A longer name, such as `docker.io/swebench`, counts first.
    """
    gpus: Annotated[tuple[str, ...], Setting(env=("GANGLINE_GPUS",), words=True), AfterValidator(_are_different)] = ()
    """GPUs of this machine for sessions that request them (`runtime.gpus`, in `docker` and `podman`), each in the form
    of `docker run --device`: `nvidia.com/gpu=0`, by the Container Device Interface, or the path of a device.
    """
    harbor_python: Annotated[_Folder | None, Setting(env=("GANGLINE_HARBOR_PYTHON",))] = None
    """Python of an environment that has Harbor, for runtime `harbor`, such as `/opt/harbor/bin/python`."""
    harbor_environment: Annotated[str, Setting(env=("GANGLINE_HARBOR_ENVIRONMENT",))] = "docker"
    """Environment of runtime `harbor`: one of Harbor's types (`docker`, `daytona`, `modal`, `e2b`, `gke` ...), or a
    class as `module:Class`.
    """
    harbor_options: Annotated[dict[str, Any], Setting(env=("GANGLINE_HARBOR_OPTIONS",))] = Field(
        default_factory=dict[str, Any]
    )
    """Arguments of that environment's class, as JSON."""
    harbor_network: Annotated[Literal["policy", "closed"], Setting(env=("GANGLINE_HARBOR_NETWORK",))] = "policy"
    """`policy`: the environment enforces a task's network policy, or refuses the task. `closed`: `harbor_options` close
    every sandbox's network, even if Harbor does not know it.
    """
    server_url: Annotated[str | None, Setting(option="--server", env=("GANGLINE_SERVER",))] = None
    """URL of the server. Default: the service of the data folder. Its token comes from GANGLINE_TOKEN, else from that
    folder.
    """
    database_url: Annotated[str | None, Setting(option="--database", env=("GANGLINE_DATABASE",))] = None
    """The server's database, postgresql://USER@HOST/NAME; the password comes from PGPASSWORD or ~/.pgpass. Default:
    SQLite in the data folder."""
    control_token: Annotated[str | None, Setting(env=("GANGLINE_TOKEN",), is_secret=True)] = None
    """Opens the control plane."""
    task_variables: Annotated[tuple[str, ...], Setting(env=("GANGLINE_TASK_VARIABLES",), words=True)] = ()
    """Environment variables of the server that tasks may name (`callback_secret`), beside those whose names begin with
    GANGLINE_TASK_.
    """
    callback_networks: Annotated[
        tuple[IPvAnyNetwork, ...], Setting(env=("GANGLINE_CALLBACK_NETWORKS",), words=True)
    ] = ()
    """Addresses and networks that callbacks of tenants' tokens reach, though they are the server's own machine
    (127.0.0.1), link-local, or otherwise closed to them.
    """
    log_format: Literal["text", "json"] = "text"
    """Log format of serving commands: text, or json with one object per line."""
    otel_endpoint: Annotated[
        str | None, Setting(env=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"))
    ] = None
    """URL of an OpenTelemetry collector; server and nodes send it traces. Needs the extra `otel`, which reads the other
    `OTEL_EXPORTER_OTLP_*` variables itself."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read environment and gangline.toml. Raises: InvalidRequest."""
        return machine_settings(Sources.found(environ))[0]


def machine_settings(sources: Sources) -> tuple[Settings, dict[str, Origin]]:
    """The settings, and where each came from. Raises: InvalidRequest."""
    values, origins = sources.values("", Settings)
    base = sources.environ.get("XDG_CACHE_HOME")
    if "cache_dir" not in values and base:
        values["cache_dir"] = Path(base).expanduser() / "gangline"
        origins["cache_dir"] = Origin("environment", "XDG_CACHE_HOME")
    settings = Settings(**values)
    own = (Path(sys.prefix), Path(sys.base_prefix), settings.tools_dir)
    return settings.model_copy(update={"expose": tuple(dict.fromkeys((*own, *settings.expose)))}), origins


def read_secret(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The value of the environment variable `name`. Requests and files contain only names of secrets.

    Raises: InvalidRequest if it is not set, or gives access to Gangline itself.
    """
    value = (os.environ if environ is None else environ).get(name)
    if not value or name == "GANGLINE_TOKEN":
        why = "opens this service and is told to nobody" if value else "is not set where it is asked for"
        raise InvalidRequest(f"the environment variable {name!r} {why}.")
    return value


def read_task_secret(name: str) -> str:
    """The value of an environment variable that a task names. Raises: InvalidRequest if tasks may not name it."""
    if not name.startswith(_FOR_TASKS) and name not in Settings.from_environ().task_variables:
        raise InvalidRequest(
            f"tasks may not use the environment variable {name!r}: choose a name that begins with {_FOR_TASKS}, or "
            "allow this one in the server's GANGLINE_TASK_VARIABLES."
        )
    return read_secret(name)
