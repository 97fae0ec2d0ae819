"""Conversations with the embedded engine over a tiny random model, which reports the ids that it draws among."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gangline.domain.session import SessionResult
from gangline.models.engine_server.app import create_app, serving
from gangline.models.engines.generate.routes import generate_engine
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.expert_talks import result_of, talk
from support.engines.models import write_tiny_model
from support.node.proxy import Proxied, proxied_engine

__all__ = ["CUT", "TEMPERATURE", "TOP_K", "TOP_P", "WHOLE", "drawn", "drawn_session", "embedded"]

TOP_K, TOP_P, TEMPERATURE = 6, 0.8, 0.7
CUT = {
    "temperature": {"override": TEMPERATURE},
    "top_k": {"override": TOP_K},
    "top_p": {"override": TOP_P},
    "max_tokens": {"override": 12},
}
WHOLE = CUT | {"top_k": {"override": -1}, "top_p": {"override": 1}}


@asynccontextmanager
async def embedded(folder: Path, *, returns_masks: bool = True) -> AsyncGenerator[str]:
    sampler = EmbeddedSampler(
        LanguageModel(load_model(folder)),
        TinyTokenizer(),
        model_name="tiny",
        seed=1,
        threads=1,
        returns_masks=returns_masks,
    )
    try:
        async with serving(create_app(sampler)) as url:
            yield url
    finally:
        await sampler.close()


@asynccontextmanager
async def drawn(
    folder: Path, *, sampling: dict[str, Any] = CUT, returns_masks: bool = True, **options: Any
) -> AsyncGenerator[Proxied]:
    async with (
        embedded(folder, returns_masks=returns_masks) as url,
        proxied_engine(generate_engine(url), sampling_masks=True, sampling=sampling, **options) as running,
    ):
        yield running


async def drawn_session(folder: Path, *, sampling: dict[str, Any] = CUT) -> SessionResult:
    """A session of three turns, by a model that is written into `folder`."""
    write_tiny_model(folder, vocab_size=TinyTokenizer().num_ids)
    async with drawn(folder, sampling=sampling) as running:
        await talk(running, "hello", "more", "and more")
        return result_of(running.journal.completions)
