"""The process that reads large requests: `python -m gangline.node.calls.reading.child`, started by `pool`.

A question is a frame of MessagePack and a frame with the body. Its answer is a frame without the messages, then frames
of messages with their digests, so that the reader holds its interpreter for one frame at a time. Each frame begins with
its length in eight bytes. The process has no secrets in its environment, writes nothing, and ends when its input does.
It runs niced, since it parses untrusted input.
"""

from __future__ import annotations

import importlib
import os
import resource
import struct
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import BinaryIO, Literal

import msgspec

from gangline.domain.conversation import Message
from gangline.domain.errors import GanglineError
from gangline.node.calls.reading.body import CallRead, read_ahead
from gangline.node.capture.meaning import VolatileText
from gangline.settings.node import CallLimits
from gangline.wire.dialects.contract import Dialect, RawRequest

HEAD = struct.Struct(">Q")
_MAX_RSS_KIB = 512 << 10
"""Memory above which the process ends after its answer: memory of a large request is not returned otherwise."""
_NICE = 5
"""Event loops on the same cores have priority; low enough that a busy machine still reads in time."""

_FRAME_BYTES = 128 << 10
"""Approximate size of a frame of messages. A longer message has its own frame."""


class Question(msgspec.Struct, frozen=True):
    dialect: str
    """Its class, as `module:name`."""
    request: RawRequest
    """Without its body, which is the next frame."""
    kind: Literal["call", "count"]
    path: str
    limits: dict[str, int]
    volatile: tuple[str, ...]


class Refusal(msgspec.Struct, frozen=True):
    """A Gangline error; `kind` is its class name."""

    kind: str
    message: str
    details: dict[str, str | int | float | None]


class Messages(msgspec.Struct, frozen=True):
    """Some of the messages, in order."""

    messages: tuple[Message, ...]
    digests: tuple[bytes, ...]


class Answer(msgspec.Struct, frozen=True):
    read: CallRead | None = None
    """Without its messages and their digests."""
    num_frames: int = 0
    """Number of message frames that follow."""
    refusal: Refusal | None = None
    crash: str | None = None
    """Any other error, as text."""


@lru_cache
def _dialect(name: str) -> Dialect:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)()


@lru_cache
def _volatile(rules: tuple[str, ...]) -> VolatileText:
    return VolatileText(rules)


def answered(question: Question, body: bytes) -> list[bytes]:
    """Returns the frames of the answer."""
    try:
        read = read_ahead(
            _dialect(question.dialect),
            msgspec.structs.replace(question.request, body=body),
            question.kind,
            question.path,
            CallLimits(**question.limits),
            _volatile(question.volatile),
        )
        frames = list(_frames(read))
        bare = msgspec.structs.replace(read, call=msgspec.structs.replace(read.call, messages=()), digests=())
        return [msgspec.msgpack.encode(Answer(bare, len(frames))), *frames]
    except GanglineError as error:
        return [msgspec.msgpack.encode(Answer(refusal=Refusal(type(error).__name__, error.message, error.details)))]
    except Exception as error:  # the parent reports it in the dialect's shape
        return [msgspec.msgpack.encode(Answer(crash=f"{type(error).__name__}: {error}"))]


def _frames(read: CallRead) -> Iterator[bytes]:
    start = num_bytes = 0
    encode = msgspec.msgpack.Encoder().encode
    for end, message in enumerate(read.call.messages, start=1):
        num_bytes += len(encode(message))
        if num_bytes >= _FRAME_BYTES or end == len(read.call.messages):
            yield encode(Messages(read.call.messages[start:end], read.digests[start:end]))
            start, num_bytes = end, 0


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    while head := questions.read(HEAD.size):
        question = msgspec.msgpack.decode(questions.read(*HEAD.unpack(head)), type=Question)
        body = questions.read(*HEAD.unpack(questions.read(HEAD.size)))
        for frame in answered(question, body):
            answers.write(HEAD.pack(len(frame)))
            answers.write(frame)
        answers.flush()
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _MAX_RSS_KIB:
            return


if __name__ == "__main__":
    os.nice(_NICE)
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)
