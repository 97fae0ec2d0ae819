"""A real vLLM as the teacher of a distillation: its log-probs of given ids, its vocabulary, its context."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gangline.domain.errors import ContextOverflow, InvalidRequest
from gangline.domain.tokens import token_ids
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.models.language.tokenizer import load_tokenizer
from gangline.rows.logprob_audit import Score
from gangline.train.run.teacher import TeacherSettings, opened_teacher
from support.engines.byte_model import write_byte_model
from support.engines.vllm_engine import MODEL_FOLDER


async def test_ids_are_scored_as_transformers_scores_them(engine: VllmEngine, score: Score) -> None:
    text = "<|im_start|>user\nWhich word is in a.txt?<|im_end|>\n<|im_start|>assistant\nThe word is apple.<|im_end|>"
    ids = token_ids([*load_tokenizer(MODEL_FOLDER).encode(text), *range(1000, 1100)])
    found = await engine.score(ids)
    assert np.isnan(found[0])
    assert found[1:] == pytest.approx(score(ids, 1.0)[1:], abs=1e-3)


async def test_ids_beyond_the_context_are_an_overflow(engine: VllmEngine) -> None:
    ids = token_ids(range(5000))
    assert np.isfinite((await engine.score(ids[:4095]))[1:]).all()
    for length in (4096, 4097, 5000):
        with pytest.raises(ContextOverflow):
            await engine.score(ids[:length])


async def test_its_whole_vocabulary_is_compared(vllm_url: str, tmp_path: Path) -> None:
    settings = TeacherSettings(url=vllm_url)
    async with opened_teacher(settings, load_tokenizer(MODEL_FOLDER), patience_s=0):
        pass
    with pytest.raises(InvalidRequest, match="another vocabulary"):
        async with opened_teacher(settings, load_tokenizer(write_byte_model(tmp_path)), patience_s=0):
            pass
