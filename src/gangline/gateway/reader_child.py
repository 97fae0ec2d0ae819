"""The process that reads large requests: `python -m gangline.gateway.reader_child`, started by `readers`.

Questions come on the standard input and answers go to the standard output, each as its length in eight bytes and
MessagePack. It has no secrets in its environment, writes nothing, and ends when its input does.
"""

from __future__ import annotations

import importlib
import os
import resource
import struct
import sys
from functools import lru_cache
from typing import BinaryIO, Literal

import msgspec

from gangline.dialects.contract import Dialect, RawRequest
from gangline.domain.errors import GanglineError
from gangline.gateway.call_limits import CallLimits
from gangline.gateway.reading import CallRead, read_ahead
from gangline.gateway.volatile import VolatileText

__all__ = ["HEAD", "Answer", "Question", "Refusal"]

HEAD = struct.Struct(">Q")
_MAX_RSS_KIB = 512 << 10
"""Beyond it the process ends after its answer: what a large request took is not given back otherwise."""
_NICE = 5


class Question(msgspec.Struct, frozen=True):
    dialect: str
    """Its class: `module:name`."""
    request: RawRequest
    kind: Literal["call", "count"]
    path: str
    limits: dict[str, int]
    volatile: tuple[str, ...]


class Refusal(msgspec.Struct, frozen=True):
    """An error of ours; `kind` is its class."""

    kind: str
    message: str
    details: dict[str, str | int | float | None]


class Answer(msgspec.Struct, frozen=True):
    read: CallRead | None = None
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


def answered(question: Question) -> Answer:
    try:
        read = read_ahead(
            _dialect(question.dialect),
            question.request,
            question.kind,
            question.path,
            CallLimits(**question.limits),
            _volatile(question.volatile),
        )
    except GanglineError as error:
        return Answer(refusal=Refusal(type(error).__name__, error.message, error.details))
    except Exception as error:  # the parent names it in the shape of the dialect
        return Answer(crash=f"{type(error).__name__}: {error}")
    return Answer(read)


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    while head := questions.read(HEAD.size):
        (length,) = HEAD.unpack(head)
        answer = answered(msgspec.msgpack.decode(questions.read(length), type=Question))
        try:
            data = msgspec.msgpack.encode(answer)
        except (ValueError, OverflowError, TypeError) as error:
            data = msgspec.msgpack.encode(Answer(crash=f"{type(error).__name__}: {error}"))
        answers.write(HEAD.pack(len(data)) + data)
        answers.flush()
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > _MAX_RSS_KIB:
            return


if __name__ == "__main__":
    os.nice(_NICE)
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(0)
