"""Converts a task's runtime from Polar's fields to ours; pure.

Source: Polar, A.3; its published `RuntimeSpec`, `PrepareAction` and `DockerRuntime`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.interop.polar.commands import added, attempted, surrounded

MEBIBYTE = 1024**2
SESSION_FOLDER = "/polar/session"
"""In Polar each session has its own such folder, in which commands may write and remove files."""

_UPLOADS = ("upload_file", "upload_dir")
_NETWORKS = {"host": "full", "bridge": "full", None: "full"}
_MAX_ATTEMPTS = 10


def given_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without nulls, which Polar treats as omitted."""
    return {name: value for name, value in fields.items() if value is not None}


def runtime_from_polar(given: Mapping[str, Any], budget: Any, *, is_clean: bool) -> dict[str, Any]:
    """The paper's networks are Docker's; the harness must reach the model on any of them.

    is_clean: whether grading has its own runtime; `eval_prepare` applies only then. Raises: InvalidRequest.
    """
    runtime: dict[str, Any] = {"backend": "docker", **given_fields(given)}
    _set_mounts(runtime)
    _set_session_folder(runtime)
    if not is_clean:
        runtime.pop("eval_prepare", None)
    limits = {"cpus": runtime.pop("cpus", None)}
    for theirs, ours in (("memory_mb", "memory_bytes"), ("storage_mb", "disk_bytes")):
        if isinstance(mebibytes := runtime.get(theirs), int | float):
            limits[ours] = int(mebibytes * MEBIBYTE)
            del runtime[theirs]
    if named := given_fields(limits):
        added(runtime, "limits", named)
    network = runtime.get("network")
    if network is None or isinstance(network, str):
        runtime["network"] = _NETWORKS.get(network, network)
    if runtime.pop("allow_internet", True) is False:
        runtime["network"] = "proxy"
    for name in ("prepare", "eval_prepare"):
        if isinstance(steps := runtime.get(name), list):
            place = SESSION_FOLDER if SESSION_FOLDER in runtime.get("folders", ()) else None
            runtime[name] = [
                _action(f"runtime.{name}.{number}", step, budget, place)
                for number, step in enumerate(cast("list[Any]", steps))
            ]
    return runtime


def _action(where: str, given: Any, budget: Any, place: str | None) -> Any:
    """A preparation step. Its folder, environment and retries become part of the command.

    place: the default start folder: recipes remove the working folder and create it again.
    Raises: InvalidRequest.
    """
    if not isinstance(given, dict):
        return given
    if cast("dict[str, Any]", given).get("type") in _UPLOADS:
        given = _copied(where, cast("dict[str, Any]", given))
    if cast("dict[str, Any]", given).get("type") != "exec":
        return cast("Any", given)
    action: dict[str, Any] = {"timeout_seconds": budget} | given_fields(cast("dict[str, Any]", given))
    command, cwd, env = action.get("command"), action.pop("cwd", None), action.pop("env", {})
    attempts, rest_s = action.pop("max_attempts", 1), action.pop("retry_backoff_seconds", 0.0)
    if not isinstance(command, str) or not isinstance(env, dict):
        return cast("Any", given)
    if not isinstance(attempts, int) or not 1 <= attempts <= _MAX_ATTEMPTS or not isinstance(rest_s, int | float):
        raise InvalidRequest(f"{where}: max_attempts must be from 1 to {_MAX_ATTEMPTS}, with a rest in seconds.")
    if attempts > 1:
        command = attempted(command, attempts, rest_s)
    entered = surrounded("", place, {})
    if cwd is None and not command.startswith(entered):  # else the task was converted before
        cwd = place
    return action | {"command": surrounded(command, cwd, cast("dict[str, Any]", env))}


def _set_session_folder(runtime: dict[str, Any]) -> None:
    """A working folder below the session's becomes part of the session folder."""
    workdir, folders = runtime.get("workdir"), runtime.get("folders", [])
    if runtime["backend"] == "process" or not isinstance(workdir, str) or not isinstance(folders, list):
        return
    if SESSION_FOLDER in map(str, PurePosixPath(workdir).parents) and SESSION_FOLDER not in folders:
        runtime["folders"] = [*cast("list[Any]", folders), SESSION_FOLDER]


def _set_mounts(runtime: dict[str, Any]) -> None:
    """Turns `volumes` of `kwargs`, and volumes for open networks, into mounts. Raises: InvalidRequest."""
    kwargs, more = runtime.pop("kwargs", {}), runtime.pop("internet_volumes", [])
    if not isinstance(kwargs, dict):
        raise InvalidRequest("runtime.kwargs: must be an object.")
    others = [name for name, value in cast("dict[str, Any]", kwargs).items() if name != "volumes" and value]
    if others:
        raise InvalidRequest(
            f"runtime.kwargs.{others[0]}: only `volumes` is supported. Leave it out; the operator of a node sets its "
            "containers' options in GANGLINE_CONTAINER_OPTIONS, and GANGLINE_APPTAINER_FAKEROOT."
        )
    volumes: dict[str, Any] = {"runtime.kwargs.volumes": cast("dict[str, Any]", kwargs).get("volumes") or []}
    if runtime.get("allow_internet", True) is not False:
        volumes["runtime.internet_volumes"] = more
    mounts: dict[str, str] = {}
    for where, named in volumes.items():
        if not isinstance(named, list):
            raise InvalidRequest(f"{where}: must be a list of `HOST:DEST:ro`.")
        for index, volume in enumerate(cast("list[Any]", named)):
            inside, folder = _mount(f"{where}.{index}", volume)
            if mounts.setdefault(inside, folder) != folder:
                raise InvalidRequest(f"{where}.{index}: another folder is mounted at {inside} already.")
    if mounts:
        added(runtime, "mounts", mounts)


def _copied(where: str, step: Mapping[str, Any]) -> dict[str, Any]:
    """Turns an upload from the node's machine into a copy step. Raises: InvalidRequest."""
    source, target = step.get("source"), step.get("target")
    if not (isinstance(source, str) and source.startswith("/") and isinstance(target, str) and target):
        raise InvalidRequest(f"{where}: must have a `target`, and as `source` an absolute path of the node's machine.")
    seen, into = shlex.quote(source), shlex.quote(target)
    unseen = (
        f"{source} is not shown to sandboxes: the node's operator adds its folder to GANGLINE_PREPARE_FOLDERS, for "
        "containers to GANGLINE_EXPOSE"
    )
    if step["type"] == "upload_file":
        copy = f'mkdir -p -- "$(dirname -- {into})" && cp -p -- {seen} {into}'
    else:  # replaces an existing one
        copy = f"rm -rf -- {into} && mkdir -p -- {into} && cp -rp -- {seen}/. {into}"
    lines = (
        f"[ -e {seen} ] || {{ echo {shlex.quote(unseen)} >&2; exit 1; }}",
        f"{copy} && chmod -R u+rwX -- {into}",
    )
    others = {name: value for name, value in step.items() if name not in ("type", "source", "target")}
    return {"type": "exec", "command": "\n".join(lines), **others}


def _mount(where: str, volume: Any) -> tuple[str, str]:
    """Path inside and folder of `HOST:DEST:ro`. Raises: InvalidRequest."""
    pieces = volume.split(":") if isinstance(volume, str) else []
    match pieces:
        case [folder, inside, options] if "ro" in options.split(",") and folder.startswith("/"):
            return inside, folder
        case [folder, *_] if folder.startswith("/"):
            raise InvalidRequest(
                f"{where}: {volume!r:.200} would be writable, and folders of the node's machine are shown read-only; "
                "write `HOST:DEST:ro`."
            )
        case _:
            raise InvalidRequest(
                f"{where}: {volume!r:.200} is not a folder of the node's machine; write `HOST:DEST:ro` with absolute "
                "paths, and prepare what the session is to write."
            )
