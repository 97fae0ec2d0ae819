"""The tools of a native agent: a command, a file read, a file written, in the session's runtime.

The model's own mistakes are reported to it as the call's result. Other errors (the runtime is gone) are raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gangline.domain.contracts import ExecResult, RuntimeHandle
from gangline.domain.errors import InvalidRequest, LimitExceeded, NotFound
from gangline.harnesses.native.model import Message
from gangline.harnesses.shared.environment import fits_argument

__all__ = ["OFFERED", "Tools"]

_T = TypeVar("_T")

# Both streams in the order they come, as in a terminal; bash where there is one.
_SHELL = 'exec 2>&1; command -v bash >/dev/null && exec bash -c "$1"; exec sh -c "$1"'


class _RunCommand(msgspec.Struct):
    command: str


class _ReadFile(msgspec.Struct):
    path: str


class _WriteFile(msgspec.Struct):
    path: str
    content: str


def _offered(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """parameters: name -> description; all are texts, all are required."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


OFFERED = [
    _offered(
        "run_command",
        "Run a shell command in the working folder and get its output. Each command starts in a new shell.",
        command="The command.",
    ),
    _offered("read_file", "Read a text file.", path="Relative to the working folder, or absolute."),
    _offered(
        "write_file",
        "Write a text file; folders above it are made, what it held before is gone.",
        path="Relative to the working folder, or absolute.",
        content="All that the file is to hold.",
    ),
]
"""As the Chat API takes them."""


class _Failed(Exception):
    """A call cannot be done; the message is for the model."""


class Tools:
    """Acts on `runtime` until it is gone."""

    def __init__(
        self, runtime: RuntimeHandle, *, env: Mapping[str, str], command_timeout_s: float, max_output_bytes: int
    ) -> None:
        self._runtime = runtime
        self._env = env
        self._command_timeout_s = command_timeout_s
        self._max_output_bytes = max_output_bytes

    async def answer(self, call: Message) -> Message:
        """The result of one tool call, for the model. Raises: RuntimeFailed."""
        try:
            content = await self._done(call)
        except (_Failed, NotFound, LimitExceeded, InvalidRequest) as error:
            content = f"error: {error}"
        return {"role": "tool", "tool_call_id": call.get("id", ""), "content": content}

    async def _done(self, call: Message) -> str:
        function: Message = call.get("function", {})
        name, arguments = function.get("name", ""), function.get("arguments", "")
        match name:
            case "run_command":
                return await self._run(_read(arguments, _RunCommand).command)
            case "read_file":
                return await self._read_file(_read(arguments, _ReadFile).path)
            case "write_file":
                return await self._write_file(_read(arguments, _WriteFile))
            case _:
                known = ", ".join(tool["function"]["name"] for tool in OFFERED)
                raise _Failed(f"there is no tool {name!r}; there are {known}")

    async def _run(self, command: str) -> str:
        if not fits_argument(command):
            raise _Failed("the command holds a NUL or is too long for a command line: write it to a file and run that")
        result = await self._runtime.exec(
            ["sh", "-c", _SHELL, "sh", command],
            env=self._env,
            timeout_s=self._command_timeout_s,
            max_output_bytes=self._max_output_bytes,
        )
        output = result.stdout.decode(errors="replace")
        if result.truncated:
            output += f"\n[cut off after {self._max_output_bytes} bytes]"
        return f"{output}\n[{self._end(result)}]".lstrip("\n")

    def _end(self, result: ExecResult) -> str:
        if result.timed_out:
            return f"killed after {self._command_timeout_s:g} s"
        if result.memory_kill:
            return result.memory_kill
        return f"exit code {result.exit_code}" if result.signal is None else f"killed by signal {result.signal}"

    async def _read_file(self, path: str) -> str:
        data = await self._runtime.download(path, max_bytes=self._max_output_bytes)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise _Failed(f"{path} is no text in UTF-8") from None

    async def _write_file(self, file: _WriteFile) -> str:
        data = file.content.encode()
        await self._runtime.upload(file.path, data)
        return f"{len(data)} bytes written"


def _read(arguments: object, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(arguments if isinstance(arguments, str) else b"", type=kind)
    except msgspec.MsgspecError as error:
        raise _Failed(f"these arguments cannot be read: {error}") from None
