"""A scripted engine of which no two samples are equal, and that writes down each.

`python -m support.engines.numbered SCRIPT TOKENIZER LOG MARK` prints its URL. The text of each sample ends with a
number. LOG has a line when a sample begins whose prompt has MARK in it, and one when it ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
from array import array
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gangline.models.engine_server.app import serving
from gangline.models.engine_server.sampler import SampledToken, SampleRequest
from gangline.serving.scripted.script import Reply, Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app, open_tokenizer

_numbers = itertools.count()


class Sample(NamedTuple):
    """One that has ended."""

    prompt: str
    """As `digest` makes it."""
    ids: list[int]
    text: str
    is_whole: bool
    """Whether the engine sampled to the end: nobody left before."""


def digest(ids: Iterable[int]) -> str:
    return hashlib.sha256(array("q", map(int, ids)).tobytes()).hexdigest()


def samples(log: Path) -> tuple[list[Sample], int]:
    """Those that have ended, and the number in flight."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ended = [Sample(**line) for line in lines if line]
    return ended, len(lines) - 2 * len(ended)


class _NumberedScript(Script):
    def reply_to(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> Reply:
        reply = super().reply_to(messages, tools)
        return reply.model_copy(update={"text": f"{reply.text} #{next(_numbers)}."})


class _NumberedSampler(ScriptedSampler):
    def __init__(self, script: Path, tokenizer: str, log: Path, mark: str) -> None:
        super().__init__(_NumberedScript.model_validate_json(script.read_text()), open_tokenizer(tokenizer))
        self._log = log.open("a", buffering=1)
        self._mark = mark

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        if self._mark not in self.tokenizer.decode(request.prompt_ids):  # a probe of the node's
            async for token in super().sample(request):
                yield token
            return
        ids: list[int] = []
        is_whole = False
        print(json.dumps({}), file=self._log)
        try:
            async for token in super().sample(request):
                ids.append(token.token_id)
                is_whole = token.finish_reason is not None
                yield token
        finally:
            line = {
                "prompt": digest(request.prompt_ids),
                "ids": ids,
                "text": self.tokenizer.decode(ids),
                "is_whole": is_whole,
            }
            print(json.dumps(line), file=self._log)


async def main(script: Path, tokenizer: str, log: Path, mark: str) -> None:
    async with serving(create_scripted_app(_NumberedSampler(script, tokenizer, log, mark))) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]))
