"""Splits a file's tasks into fixed shards, so that machines can share a file without coordination."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, TypeVar

import typer

from gangline.domain.errors import InvalidRequest

T = TypeVar("T")

ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Take every N-th task, beginning with the I-th: 1/4, 2/4, 3/4 and 4/4 share a file.",
        show_default=False,
    ),
]


def of_shard(tasks: Sequence[T], shard: str | None) -> list[T]:
    """The shard's tasks in order; all tasks if `shard` is None. Raises: InvalidRequest, also for an empty shard."""
    if shard is None:
        return list(tasks)
    found = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", shard, re.ASCII)
    first, step = (int(found[1]), int(found[2])) if found else (1, 0)
    if not first <= step:
        raise InvalidRequest(f"--shard must be I/N with I from 1 to N, such as 1/4; got {shard!r}.")
    if not (part := list(tasks[first - 1 :: step])):
        raise InvalidRequest(
            f"--shard {shard} has no task: there are {len(tasks)}, so take {len(tasks)} shards at most."
        )
    return part
