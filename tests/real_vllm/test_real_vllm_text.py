"""A real vLLM without parsers of its own: its chat route read here, and its route of ids (T2), in three ways."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator

import pytest

from gangline.domain.completion import CompletionTree
from gangline.domain.conversation import Thinking, ToolCall
from gangline.models.engines.contract import Engine
from gangline.models.engines.generate.renderers import renderers_engine
from gangline.models.engines.generate.routes import generate_engine
from gangline.models.engines.generate.template import template_engine
from gangline.models.engines.text.parsed import ParsedEngine
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.models.language.parsing.parser import Parsers
from gangline.rows.audit import audit
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.logprob_audit import Score, compare_logprobs
from support.engines.tiny_qwen3 import WORDS
from support.engines.vllm_engine import MODEL_FOLDER, need_vllm, running_vllm
from support.node.proxy import Proxied, proxied_engine
from support.sdk.agents import AGENTS, Turn

# Google's SDK derives its client session from aiohttp's, which aiohttp discourages.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

MIN_CALLS, MAX_CALLS = 6, 30
FOLDER = str(MODEL_FOLDER)
BOTH = {"thinking": "qwen3", "tools": "hermes"}

ENGINES: dict[str, tuple[Callable[[str], Engine], str]] = {
    "parsed": (lambda url: ParsedEngine(VllmEngine(url), Parsers.named(BOTH)), "engine"),
    "generate": (lambda url: generate_engine(url, parsers=BOTH), "rendered"),
    "generate_template": (lambda url: template_engine(url, tokenizer=FOLDER), "rendered"),
    "generate_renderers": (lambda url: renderers_engine(url, tokenizer=FOLDER, renderer="qwen3"), "rendered"),
}


@pytest.fixture(scope="module")
def raw_url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    need_vllm()
    with running_vllm(tmp_path_factory.mktemp("vllm") / "log", parsers=False) as url:
        yield url


def has_seen_everything(turns: list[Turn]) -> bool:
    """The model is sampled freely: a conversation continues until it has called a tool, thought and answered."""
    called, answered = any(turn.calls for turn in turns), any(not turn.calls for turn in turns[:-1])
    return len(turns) >= MIN_CALLS and called and answered and any(turn.thinking for turn in turns)


async def converse(running: Proxied, dialect: str, *, stream: bool) -> list[Turn]:
    kind, connect = AGENTS[dialect]
    chosen = random.Random(0)
    async with connect(f"{running.url}/s/{running.session.session_id}", running.session.key) as client:
        outputs = (chosen.choice(WORDS) for _ in range(MAX_CALLS))
        return await kind(client, stream=stream).converse(outputs, has_seen_everything)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ENGINES)
async def test_replies_are_read_here_and_the_tokens_are_exact(
    raw_url: str, score: Score, name: str, stream: bool
) -> None:
    make, source = ENGINES[name]
    dialect = "anthropic" if stream else "openai_chat"
    async with proxied_engine(make(raw_url), thinking="retain") as running:
        turns = await converse(running, dialect, stream=stream)
    records = running.journal.completions
    assert [record.certificate.prompt_source for record in records] == [source] + ["stitched"] * (len(turns) - 1)
    assert [record.certificate.context for record in records] == ["first"] + ["exact"] * (len(turns) - 1)
    assert has_seen_everything(turns), "no tool call, or no thinking, was read at all"
    for turn, record in zip(turns, records, strict=True):
        assert len(turn.calls) == sum(isinstance(part, ToolCall) for part in record.response.parts)
        assert bool(turn.thinking) == any(isinstance(part, Thinking) for part in record.response.parts)
    builder = PrefixMergingBuilder(PrefixMergingConfig(strict=True))
    trajectory = builder.build(CompletionTree(records), session_id="s1", task_id="t1")
    assert audit(trajectory, records).violations == ()
    compared = compare_logprobs([trajectory], score)
    assert compared.not_comparable == {}
    assert all(one.mean < 1e-3 and one.max < 1e-2 for one in compared.stats().values())


async def test_the_probe_finds_out_what_the_route_of_ids_can(raw_url: str) -> None:
    engine = template_engine(raw_url, tokenizer=FOLDER)
    found = await engine.probe()
    await engine.close()
    assert (found.engine, found.model, found.max_context) == ("generate_vllm", "tiny", 4096)
    assert found.streams_ids
    assert found.logprob_kind == "processed"
    assert found.template.tokenizer_digest


async def test_without_parsers_anywhere_vllm_refuses_tools(raw_url: str) -> None:
    async with proxied_engine(raw_url) as running:
        with pytest.raises(Exception, match="tool-call-parser"):
            await converse(running, "openai_chat", stream=False)
        assert not running.journal.completions
