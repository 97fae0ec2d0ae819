"""The messages between a node and its keeper, over a Unix socket: MessagePack, each message after its length.

The keeper begins with one byte, which carries the listening socket of the agents' port and a socket for descriptors,
and a `Hello`. Then the node sends requests. Each has one answer; answers come in any order. The descriptor of a channel
comes over the other socket, with the channel's id, before the answer to its request.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel

from gangline.domain.errors import GanglineError, RuntimeFailed, errors_by_code
from gangline.domain.sandbox import Checkpoint, ExecRequest, RuntimeStart

VERSION = 10
"""A node ends a keeper of another version, whose sandboxes are lost."""

_LENGTH_BYTES = 4


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Constant properties of a kept sandbox: see `Sandbox`."""

    runtime_id: str
    workdir: str
    home: str
    grader_home: str | None
    proxy_url: str | None
    limits: dict[str, str]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox that outlived a node, and its command."""

    runtime: str
    """Name of the runtime plug-in."""
    facts: Facts
    note: bytes
    spent_s: float


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    kept: tuple[Kept, ...]
    checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints that were not released."""


# -- from the node -----------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime: str
    start: RuntimeStart


class Exec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime_id: str
    request: ExecRequest
    streams: bool = False
    """Whether output is sent as it arrives."""
    note: bytes | None = None
    """If given, the command and its sandbox outlive the node, with the note."""


class Rejoin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Wait for the command that was to outlive the node."""

    runtime_id: str


class OpenChannel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime_id: str
    channel_id: str
    """Chosen by the node."""
    request: ExecRequest


class ChannelEnd(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Wait for the end of a channel's command."""

    runtime_id: str
    channel_id: str


class CloseChannel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Unknown ids are ignored."""

    runtime_id: str
    channel_id: str


class Annotate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Replace the note; with None the sandbox no longer outlives the node."""

    runtime_id: str
    note: bytes | None


class Upload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime_id: str
    path: str
    data: bytes
    mode: int


class Download(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime_id: str
    path: str
    max_bytes: int


class Clear(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime_id: str
    path: str


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime_id: str
    grace_s: float = 0.0


class TakeCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime_id: str
    name: str


class Reset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime_id: str
    checkpoint: Checkpoint | None


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Unknown checkpoints are ignored."""

    checkpoint: Checkpoint


class AskUsage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    runtime_id: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Unknown ids are ignored."""

    runtime_id: str


Request = (
    Start
    | Exec
    | Rejoin
    | OpenChannel
    | ChannelEnd
    | CloseChannel
    | Annotate
    | Upload
    | Download
    | Clear
    | Kill
    | TakeCheckpoint
    | Reset
    | Release
    | Stop
    | AskUsage
)


class Asked(msgspec.Struct, frozen=True, tag=True):
    number: int
    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancels a request, which is still answered once it is undone."""

    number: int


class Tell(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reports the used budget of the command that outlives the node."""

    runtime_id: str
    spent_s: float


class Held(msgspec.Struct, frozen=True, tag=True):
    """All sandboxes that the node still holds, including those it has requested; sent periodically."""

    runtime_ids: list[str]


class Stopping(msgspec.Struct, frozen=True, tag=True):
    """From here on nothing may outlive the node."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Stop everything and exit. The closed connection is the answer."""


FromNode = Asked | Cancel | Tell | Held | Stopping | End

# -- to the node -------------------------------------------------------------------------------------------------


class Answered(msgspec.Struct, frozen=True, tag=True):
    number: int
    value: msgspec.Raw


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The error that a request raised."""

    number: int
    code: str
    message: str
    details: dict[str, str | int | float | None]


class Output(msgspec.Struct, frozen=True, tag=True):
    number: int
    stream: Literal["stdout", "stderr"]
    data: bytes


ToNode = Answered | Refused | Output


def refusal(number: int, error: GanglineError) -> Refused:
    return Refused(number, error.code, error.message, error.details)


def error_of(refused: Refused) -> GanglineError:
    return errors_by_code().get(refused.code, RuntimeFailed)(refused.message, **refused.details)


# -- bytes -------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError


def _rich(kind: type[Any], value: Any) -> Any:
    return kind.model_validate(value) if issubclass(kind, BaseModel) else kind(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_M = TypeVar("_M")


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def write_message(writer: asyncio.StreamWriter, message: Any) -> None:
    payload = encode(message)
    writer.write(len(payload).to_bytes(_LENGTH_BYTES, "big") + payload)


FROM_NODE: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode, dec_hook=_rich)  # pyright: ignore
TO_NODE: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)  # pyright: ignore
HELLO = msgspec.msgpack.Decoder(Hello)


async def read_message(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[_M]) -> _M | None:
    """The next message; None when the other side is gone. Raises: msgspec.MsgspecError."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        payload = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return decoder.decode(payload)
