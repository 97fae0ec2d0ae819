"""Official SDKs hold conversations with a real vLLM through the proxy; what is recorded is exact, and proves it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gangline.domain.completion import CompletionTree
from gangline.domain.conversation import Thinking, ToolCall
from gangline.domain.trajectory import Trajectory
from gangline.rows.audit import audit
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.logprob_audit import LogprobStats, Score, compare_logprobs
from support.engines.tiny_qwen3 import WORDS
from support.node.proxy import Proxied, proxied_engine
from support.sdk.agents import AGENTS, Turn

# Google's SDK derives its client session from aiohttp's, which aiohttp discourages.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

MIN_CALLS, MAX_CALLS, MAX_CONVERSATIONS = 6, 30, 60


def has_seen_everything(turns: list[Turn]) -> bool:
    """The model is sampled freely: a conversation continues until it has called a tool, thought and answered."""
    called, answered = any(turn.calls for turn in turns), any(not turn.calls for turn in turns[:-1])
    return len(turns) >= MIN_CALLS and called and answered and any(turn.thinking for turn in turns)


async def converse(running: Proxied, dialect: str, *, stream: bool, seed: int = 0) -> list[Turn]:
    kind, connect = AGENTS[dialect]
    chosen = random.Random(seed)
    async with connect(f"{running.url}/s/{running.session.session_id}", running.session.key) as client:
        outputs = (chosen.choice(WORDS) for _ in range(MAX_CALLS))
        return await kind(client, stream=stream).converse(outputs, has_seen_everything)


def built(running: Proxied, on_divergence: str = "split") -> Trajectory:
    builder = PrefixMergingBuilder(PrefixMergingConfig.model_validate({"on_divergence": on_divergence, "strict": True}))
    return builder.build(CompletionTree(running.journal.completions), session_id="s1", task_id="t1")


def stats(trajectory: Trajectory, score: Score) -> dict[str, LogprobStats]:
    compared = compare_logprobs([trajectory], score)
    assert compared.not_comparable == {}
    return compared.stats()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", sorted(AGENTS))
async def test_a_tool_conversation_is_stitched_exact_and_reproducible(
    vllm_url: str, score: Score, dialect: str, stream: bool
) -> None:
    async with proxied_engine(vllm_url, thinking="retain") as running:
        turns = await converse(running, dialect, stream=stream)
    records = running.journal.completions
    assert {record.dialect for record in records} == {dialect}
    assert [record.certificate.prompt_source for record in records] == ["engine"] + ["stitched"] * (len(turns) - 1)
    assert [record.certificate.context for record in records] == ["first"] + ["exact"] * (len(turns) - 1)
    assert all(record.certificate.fallback is None and record.trainable for record in records)
    assert has_seen_everything(turns), "the engine parsed no tool call, or no thinking, at all"
    for turn, record in zip(turns, records, strict=True):
        assert len(turn.calls) == sum(isinstance(part, ToolCall) for part in record.response.parts)
        assert bool(turn.thinking) == any(isinstance(part, Thinking) for part in record.response.parts)

    trajectory = built(running)
    assert len(trajectory.traces) == 1
    report = audit(trajectory, records)
    assert report.violations == ()
    assert report.num_trained_tokens == report.num_sampled_tokens
    found = stats(trajectory, score)
    assert set(found) == {"first", "exact_stitched"}
    assert all(one.mean < 1e-3 and one.max < 1e-2 for one in found.values())


async def test_prompt_ids_come_back_exactly_as_they_were_sent(vllm_url: str) -> None:
    async with proxied_engine(vllm_url, thinking="retain") as running:
        await converse(running, "openai_chat", stream=True)
    tree = CompletionTree(running.journal.completions)
    for record in list(tree)[1:]:
        assert record.parent_id is not None
        parent = tree.context_ids(tree[record.parent_id])
        assert np.array_equal(tree.prompt_ids(record)[: len(parent)], parent)


async def test_where_the_template_strips_thinking_a_new_chain_begins_and_is_exact_too(
    vllm_url: str, score: Score
) -> None:
    async with proxied_engine(vllm_url) as running:
        turns = await converse(running, "openai_chat", stream=False)
    records = running.journal.completions
    follows_answer = [not turn.calls for turn in turns[:-1]]
    assert any(follows_answer), "the model never answered"
    for begins_anew, record in zip(follows_answer, records[1:], strict=True):
        assert record.certificate.context == ("diverged" if begins_anew else "exact")
        assert record.certificate.cause == ("thinking_dropped" if begins_anew else None)
    trajectory = built(running)
    assert len(trajectory.traces) == 1 + sum(follows_answer)
    assert audit(trajectory, records).ok
    assert all(one.mean < 1e-3 for one in stats(trajectory, score).values())


async def test_splicing_what_was_only_observed_trains_on_contexts_that_never_were(vllm_url: str, score: Score) -> None:
    async with proxied_engine(vllm_url, tier="observe") as running:
        for seed in range(MAX_CONVERSATIONS):  # until a reply is tokenized otherwise than it was sampled
            await converse(running, "openai_chat", stream=False, seed=seed)
            if len(built(running, "splice").traces) < len(built(running).traces):
                break
    assert {record.certificate.prompt_source for record in running.journal.completions} == {"engine"}
    split, spliced = stats(built(running), score), stats(built(running, "splice"), score)
    assert "spliced" not in split
    assert all(one.mean < 1e-3 for one in split.values())
    assert spliced["spliced"].mean > 100 * max(one.mean for name, one in spliced.items() if name != "spliced")
