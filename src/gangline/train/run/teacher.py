"""The teacher of distillation (`loss.distillation`): an engine that scores the tokens that the policy sampled.

Laws
- Its ids must mean the same as the policy's: both decode the policy's whole vocabulary, or the run does not begin.
- Its log-probs are of temperature 1, so tokens sampled at another temperature are refused (`Lessons`).
- A row that is longer than its context is left out, and so is a token without a log-prob. A step in which it scores no
  row is an error.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np
from pydantic import Field

from gangline.domain.errors import ContextOverflow, EngineUnavailable, InvalidGroup, InvalidRequest
from gangline.domain.tokens import Logprobs
from gangline.domain.trajectory import Trace
from gangline.machine.event_loop import call_all
from gangline.models.engines.auto import speaks_sglang
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.sglang.engine import SglangEngine
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.models.language.contract import ChatTokenizer
from gangline.settings.machine import read_secret
from gangline.train.collecting.groups import Group, trainable_traces
from gangline.train.options import TrainingOptions

_log = logging.getLogger("gangline.trainer")

_IDS_AT_ONCE = 1024
_AGAIN_S = 2.0


class TeacherSettings(TrainingOptions):
    url: str = Field(pattern=r"^https?://")
    """URL of a vLLM, an SGLang or a `gangline engine` that serves the teacher. Nothing changes its weights."""
    model: str | None = None
    """The teacher's served name; None: the first."""
    api_key_env: str | None = None
    """Environment variable with the engine's key."""
    rows_at_once: int = Field(default=16, ge=1)
    """Rows that it scores at a time."""


class Teacher:
    """Open it with `opened_teacher`."""

    def __init__(self, engine: VllmEngine | SglangEngine, *, rows_at_once: int, patience_s: float) -> None:
        """patience_s: how long the engine may be unreachable."""
        self._engine = engine
        self._free = asyncio.Semaphore(rows_at_once)
        self._patience_s = patience_s

    async def require_same_ids(self, tokenizer: ChatTokenizer) -> None:
        """tokenizer: of the policy. Raises: InvalidRequest if ids mean something else to the teacher; EngineError."""

        async def compare(ids: Sequence[int]) -> None:
            async with self._free:
                theirs = await self._engine.detokenize(ids)
            # Engines may tidy up spaces in front of punctuation.
            if theirs.replace(" ", "") != tokenizer.decode(ids).replace(" ", ""):
                raise InvalidRequest(
                    f"the teacher at {self._engine.url} has another vocabulary than the model: ids {ids[0]} to "
                    f"{ids[-1]} read differently. Distillation scores the model's own ids: choose a teacher of the "
                    "same family, with the same tokenizer."
                )

        every = range(tokenizer.num_ids)
        await call_all([compare(every[start : start + _IDS_AT_ONCE]) for start in range(0, len(every), _IDS_AT_ONCE)])

    async def logprobs(self, groups: Sequence[Group]) -> Mapping[str, Logprobs]:
        """Trace id -> log-probs [T] of its response; NaN where there is none.

        Raises: InvalidGroup if it scored no row; EngineError.
        """
        traces = [trace for group in groups for session in group.sessions for trace in trainable_traces(session)]
        found = await call_all([self._scored(trace) for trace in traces])
        if traces and not any(np.isfinite(one).any() for one in found):
            raise InvalidGroup(
                f"the teacher at {self._engine.url} scored none of a step's {len(traces)} rows: they are longer than "
                "its context (`teacher.row_left_out` in trainer.log). Serve it with a longer one."
            )
        return {trace.trace_id: one for trace, one in zip(traces, found, strict=True)}

    async def _scored(self, trace: Trace) -> Logprobs:
        ids = np.concatenate([trace.prompt_ids, trace.response_ids])
        ends_at = time.monotonic() + self._patience_s
        while True:
            try:
                async with self._free:
                    return (await self._engine.score(ids))[len(trace.prompt_ids) :]
            except ContextOverflow as error:
                _log.warning("teacher.row_left_out trace_id=%s tokens=%d error=%s", trace.trace_id, len(ids), error)
                return np.full(len(trace.response_ids), math.nan, np.float32)
            except EngineUnavailable as error:
                if time.monotonic() > ends_at:
                    raise
                _log.warning("teacher.waits error=%s; trying again", error)
                await asyncio.sleep(_AGAIN_S)


@asynccontextmanager
async def opened_teacher(
    settings: TeacherSettings, tokenizer: ChatTokenizer, *, patience_s: float
) -> AsyncGenerator[Teacher]:
    """Raises: InvalidRequest if its ids mean something else than the tokenizer's; EngineError."""
    key = None if settings.api_key_env is None else read_secret(settings.api_key_env)
    asked = EngineHttp(settings.url, api_key=key)
    try:
        kind = SglangEngine if await speaks_sglang(asked) else VllmEngine
    finally:
        await asked.close()
    engine = kind(settings.url, model=settings.model, api_key=key)
    try:
        teacher = Teacher(engine, rows_at_once=settings.rows_at_once, patience_s=patience_s)
        await teacher.require_same_ids(tokenizer)
        yield teacher
    finally:
        await engine.close()
