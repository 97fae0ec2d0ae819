"""Inspect's sandbox environment `gangline`: `inspect eval TASK --sandbox gangline`.

Inspect finds this module by entry point, in a Python with both packages. A sample has one sandbox, of any runtime. Its
processes die with the evaluation's process, however that ends; `inspect sandbox cleanup gangline` removes files left
by a killed evaluation.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gangline.domain.errors import RuntimeFault
from gangline.domain.ids import new_id, validated_id
from gangline.domain.sandbox import RuntimeStart, RuntimeUser, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.interop.inspect.in_sandbox.commands import CommandSandbox, Ended
from gangline.settings import plugins

_util: Any = import_module("inspect_ai.util")
_error: Any = import_module("inspect_ai._util.error")

_TOOLS = "/var/tmp"
"""Folder in which Inspect puts its tools' programs."""
_SANDBOXES_PER_CPU = 2


class GanglineSandbox(CommandSandbox):
    """One sandbox. Commands run as its own user or, if the runtime has one, as `grader`; neither is root."""

    def __init__(self, sandbox: Sandbox, own_names: frozenset[str] = frozenset()) -> None:
        """own_names: names and uid of the user that runs commands."""
        super().__init__()
        self._sandbox = sandbox
        self._own_names = own_names | {"agent"}

    async def _run(
        self,
        cmd: list[str],
        *,
        stdin: bytes,
        cwd: str | None,
        env: dict[str, str],
        user: str | None,
        timeout: float | None,
        max_output_bytes: int,
    ) -> Ended:
        try:
            result = await self._sandbox.exec(
                cmd,
                cwd=cwd,
                env=env,
                stdin=stdin,
                timeout_s=timeout,
                max_output_bytes=max_output_bytes,
                user=self._user(user),
            )
        except RuntimeFault as error:
            raise _util.SandboxUnavailableError(error.message) from error
        if result.timed_out:
            raise TimeoutError(f"the command was not done in {timeout:g} s")
        code = 128 + (result.signal or 0) if result.exit_code is None else result.exit_code
        return Ended(code, result.stdout, result.stderr, result.truncated)

    def _user(self, named: str | None) -> RuntimeUser:
        """Raises: SandboxUserUnsupportedError."""
        if named is None or named in self._own_names:
            return "agent"
        if named == "grader" and self._sandbox.grader_home is not None:
            return "grader"
        has = ", ".join(sorted(self._own_names)) + ("" if self._sandbox.grader_home is None else ", grader")
        raise _util.SandboxUserUnsupportedError(
            f"Sandbox gangline cannot run commands as {named!r}: its users are {has}, and nobody becomes root."
        )

    @classmethod
    async def begun(cls, spec: RuntimeSpec) -> GanglineSandbox:
        """Raises: RuntimeFailed, RuntimeUnavailable, InvalidRequest."""
        runtime_id = new_id("sandbox")
        start = RuntimeStart(
            runtime_id=runtime_id, owner=_owner(), spec=spec, folder=_root() / runtime_id, hidden=(_root(),)
        )
        sandbox = await plugins.make_runtime(spec.backend).start(start)
        try:
            found = await sandbox.exec(["sh", "-c", "id -u; id -un"])
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        return cls(sandbox, frozenset(found.stdout.decode(errors="replace").split()))

    async def stop(self) -> None:
        await self._sandbox.stop()

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, Any]:
        """Raises: PrerequisiteError for a wrong configuration; RuntimeFault when the sandbox does not start."""
        return {"default": await cls.begun(_spec(config))}

    @classmethod
    async def sample_cleanup(cls, task_name: str, config: Any, environments: dict[str, Any], interrupted: bool) -> None:
        """Also called after an interrupt: stopping takes milliseconds."""
        for environment in environments.values():
            await environment.as_type(cls).stop()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Remove one sandbox, or all of this user's in the temporary folder, including running ones."""
        there = [folder.name for folder in _root().iterdir()]
        keep = frozenset(name for name in there if id is not None and name != validated_id(id, "id"))
        removed = 0
        for name in plugins.usable("runtime"):
            removed += await plugins.make_runtime(name).reap(_owner(), _root(), keep)
        print(f"{removed} sandboxes removed")

    @classmethod
    def default_concurrency(cls) -> int | None:
        return _SANDBOXES_PER_CPU * (os.cpu_count() or 1)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """A `RuntimeSpec`, as in a task's `runtime`. Raises: pydantic.ValidationError."""
        return RuntimeSpec.model_validate({"network": "none", **config})


def _spec(config: BaseModel | str | None) -> RuntimeSpec:
    """Raises: PrerequisiteError."""
    if isinstance(config, str):
        config = GanglineSandbox.config_deserialize(_read(Path(config)))
    if config is None:
        config = RuntimeSpec(network="none")
    if not isinstance(config, RuntimeSpec):
        raise _error.PrerequisiteError(
            f"Sandbox gangline takes a file or a gangline.domain.task.RuntimeSpec, not {type(config).__name__}."
        )
    if config.network not in ("none", "full"):
        raise _error.PrerequisiteError(f"Sandbox gangline has network none or full: {config.network} needs a node.")
    if config.prepare:
        raise _error.PrerequisiteError("Sandbox gangline takes no `prepare`: write Sample.files and Sample.setup.")
    folders = dict.fromkeys([*config.folders, _TOOLS])
    return config.model_copy(update={"folders": tuple(folders)})


def _read(path: Path) -> dict[str, Any]:
    """Raises: PrerequisiteError."""
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        raise _error.PrerequisiteError(f"Sandbox gangline cannot read {path}: {error}") from error


def _owner() -> str:
    """One owner per folder of sandboxes, so that a cleanup ends only that folder's processes."""
    return f"inspect-{hashlib.sha256(os.fsencode(_root())).hexdigest()[:16]}"


def _root() -> Path:
    """Folder of this user's sandboxes. Raises: PrerequisiteError if another user created it."""
    root = Path(tempfile.gettempdir(), f"gangline-inspect-{os.getuid()}")
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise _error.PrerequisiteError(f"{root} belongs to another user: remove it, or set TMPDIR.")
    return root


_util.sandboxenv(name="gangline")(GanglineSandbox)
