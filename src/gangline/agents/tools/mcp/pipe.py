"""Transport to an MCP server in the sandbox: a command behind a channel of the runtime, which is its stdin and stdout.

All its output is untrusted: lines are bounded, and an invalid message is an error of the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from gangline.domain.errors import RuntimeFailed
from gangline.domain.sandbox import Channel, RuntimeUser, Sandbox

if TYPE_CHECKING:  # it needs the extra `mcp`
    from mcp.shared.message import SessionMessage

_END_S = 5.0
_MAX_LINE_BYTES = 8 << 20
_MAX_SAID = 500
_ON_ITS_STREAMS = 'exec "$@" <&3 >&3 3<&-'


class Pipe:
    """Created by `start`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @classmethod
    async def start(
        cls, runtime: Sandbox, command: Sequence[str], env: Mapping[str, str], user: RuntimeUser = "agent"
    ) -> Pipe:
        """Raises: RuntimeFailed; RuntimeUnavailable if the sandbox has no such user."""
        on_streams = ["sh", "-c", _ON_ITS_STREAMS, "sh", *command]
        return cls(await runtime.channel(on_streams, env=env, user=user))

    async def write(self, data: bytes) -> None:
        """Send bytes to the command before the MCP session starts."""
        with suppress(RuntimeFailed):  # the reader notices its end
            await self._channel.write(data)

    @asynccontextmanager
    async def opened(self, over: asyncio.Event) -> AsyncGenerator[tuple[Any, Any]]:
        """The streams of a session: from the server, to the server. over: set when the server has ended."""
        import anyio  # noqa: PLC0415 - of the extra `mcp`
        from mcp.shared.message import SessionMessage  # noqa: PLC0415

        to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        async with asyncio.TaskGroup() as pumps:
            reading = pumps.create_task(_read(self._channel, to_session))
            reading.add_done_callback(lambda _: over.set())
            writing = pumps.create_task(_write(self._channel, from_session))
            try:
                yield from_server, to_server
            finally:
                reading.cancel()
                writing.cancel()

    async def end(self) -> str:
        """How the server ended, with its last output on stderr."""
        try:
            async with asyncio.timeout(_END_S):
                end = await self._channel.ended()
        except (TimeoutError, RuntimeFailed):
            return "it runs, and speaks no MCP"
        errors = end.stderr[-_MAX_SAID:].decode(errors="replace").strip()
        return f"exit code {end.exit_code}" + (f" ({errors})" if errors else "")

    async def close(self) -> None:
        """Kill the server."""
        await self._channel.close()


async def _read(channel: Channel, to_session: Any) -> None:
    """Pass on the server's messages, one per line. Returns at the stream's end, or if a line is too long."""
    import anyio  # noqa: PLC0415 - as below

    kept = bytearray()
    async with to_session:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session is over
            while (piece := await channel.read()) and len(kept) <= _MAX_LINE_BYTES:
                kept += piece
                if b"\n" not in piece:
                    continue
                *lines, rest = bytes(kept).split(b"\n")
                kept = bytearray(rest)
                for line in lines:
                    await to_session.send(_parsed(line))


def _parsed(line: bytes) -> SessionMessage | ValueError:
    from mcp import types  # noqa: PLC0415 - as below
    from mcp.shared.message import SessionMessage  # noqa: PLC0415

    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _write(channel: Channel, from_session: Any) -> None:
    async with from_session:
        async for message in from_session:
            data = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            with suppress(RuntimeFailed):  # the reader notices its end
                await channel.write(data.encode() + b"\n")
