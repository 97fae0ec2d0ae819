"""One vLLM for the whole lane: it takes most of a minute to start."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

import pytest

from gangline.cli.results.audit import load_score
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.rows.logprob_audit import Score
from support.engines.vllm_engine import MODEL_FOLDER, need_vllm, running_vllm
from support.node.proxy import MemoryJournal


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    need_vllm()
    with running_vllm(tmp_path_factory.mktemp("vllm") / "log") as url:
        yield url


@pytest.fixture
async def engine(vllm_url: str) -> AsyncGenerator[VllmEngine]:
    engine = VllmEngine(vllm_url)
    yield engine
    await engine.close()


@pytest.fixture(scope="session")
def score() -> Score:
    """The same weights in transformers, float32."""
    need_vllm()
    return load_score(str(MODEL_FOLDER))


@pytest.fixture
def journal() -> MemoryJournal:
    return MemoryJournal()
