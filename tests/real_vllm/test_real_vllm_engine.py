"""What a real vLLM says of itself, and what it does that a record must tell: grammars, defaults of its own, choices."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from gangline.domain.completion import CompletionTree
from gangline.domain.conversation import ToolCall
from gangline.models.engines.cache import engine_page
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.rows.audit import audit
from gangline.rows.builders.per_request import PerRequestBuilder
from gangline.rows.logprob_audit import LogprobDifferences, Score, compare_logprobs
from support.engines.tiny_qwen3 import TOOLS
from support.engines.vllm_engine import MODEL_FOLDER
from support.node.proxy import Proxied, proxied_engine

ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Which word is in a.txt?"}], "max_tokens": 120}
CALM: Any = ASK | {"temperature": 0.5}
"""At 1, one draw in ten leaves the little model's words, and its thought never ends. vLLM's grammars begin after it."""
NAMED = {"type": "function", "function": {"name": "read_file"}}
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "enum": ["apple", "river"]}},
    "required": ["word"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "word", "schema": SCHEMA}}


def compared(running: Proxied, score: Score) -> LogprobDifferences:
    records = running.journal.completions
    trajectory = PerRequestBuilder().build(CompletionTree(records), session_id="s1", task_id="t1")
    assert audit(trajectory, records).ok
    return compare_logprobs([trajectory], score)


async def test_a_probe_finds_all_that_stitching_needs(engine: VllmEngine) -> None:
    found = await engine.probe()
    assert (found.engine, found.version, found.model, found.max_context) == ("vllm", "0.32.0", "tiny", 4096)
    assert found.reports_ids
    assert found.takes_prompt_ids
    assert found.streams_ids
    assert found.renders
    assert found.logprob_kind == "processed"
    assert found.num_ids == json.loads((MODEL_FOLDER / "config.json").read_text())["vocab_size"]
    assert (found.template.renders_tools, found.template.renders_tool_results) == (True, True), "Qwen3's template does"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_tool_call_that_a_grammar_forced_is_recorded_as_such_and_not_compared(
    vllm_url: str, score: Score, choice: Any
) -> None:
    async with proxied_engine(vllm_url) as running, running.client() as client:
        reply = await client.chat.completions.create(**CALM, tools=TOOLS, tool_choice=choice)
    (call,) = reply.choices[0].message.tool_calls or ()
    assert set(json.loads(call.function.arguments)) == {"path"}
    (record,) = running.journal.completions
    assert [type(part) for part in record.response.parts].count(ToolCall) == 1
    assert record.certificate.constraint == "tool_choice"
    found = compared(running, score)
    assert found.by_class == {}
    assert found.not_comparable == {"sampled under a grammar (tool_choice)": len(record.sampled_ids)}


async def test_the_log_probs_of_a_grammar_are_not_the_models_own(vllm_url: str) -> None:
    """Why they are not compared: where the grammar leaves one token, its log-prob is 0 whatever the model thinks."""
    async with proxied_engine(vllm_url) as running, running.client() as client:
        reply = await client.chat.completions.create(**CALM, response_format=FORMAT)
    assert (reply.choices[0].message.content or "").startswith("{")
    (record,) = running.journal.completions
    assert record.certificate.constraint == "response_format"
    assert (record.logprobs == 0.0).any()


async def test_defaults_of_the_model_are_not_sampled_with(vllm_url: str, score: Score) -> None:
    """The model's `generation_config` says temperature 0.6 and top-k 20; the request says nothing, which means 1 and
    all."""
    async with proxied_engine(vllm_url) as running, running.client() as client:
        for _ in range(3):
            await client.chat.completions.create(**ASK, tools=TOOLS)
    found = compared(running, score)
    assert found.not_comparable == {}
    assert all(one.mean < 1e-3 for one in found.stats().values())


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"temperature": 1.3, "seed": 7}, {"temperature": 0}])
async def test_tempered_log_probs_are_computed_again(vllm_url: str, score: Score, sampling: dict[str, Any]) -> None:
    async with proxied_engine(vllm_url) as running, running.client() as client:
        for _ in range(2):
            await client.chat.completions.create(**ASK, tools=TOOLS, **sampling)
    found = compared(running, score)
    assert found.not_comparable == {}
    assert all(one.mean < 1e-3 for one in found.stats().values())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_each_of_several_choices_is_a_record_of_its_own(vllm_url: str, score: Score, stream: bool) -> None:
    async with proxied_engine(vllm_url) as running, running.client() as client:
        answer = await client.chat.completions.create(**ASK, n=3, stream=stream)
        if stream:
            async for _ in answer:
                pass
    records = running.journal.completions
    assert sorted(record.choice_index for record in records) == [0, 1, 2]
    assert all(record.trainable for record in records)
    assert all(one.mean < 1e-3 for one in compared(running, score).stats().values())


async def test_a_reply_cut_at_a_stop_string_keeps_all_its_ids(vllm_url: str, score: Score) -> None:
    async with proxied_engine(vllm_url) as running, running.client() as client:
        await client.chat.completions.create(**ASK, stop=["think"])
    (record,) = running.journal.completions
    assert record.certificate.stop_reason == "think"
    assert len(record.sampled_ids) > 0
    assert all(one.mean < 1e-3 for one in compared(running, score).stats().values())


async def test_its_metrics_tell_the_size_of_its_prefix_cache_and_what_was_found_there(vllm_url: str) -> None:
    ids = list(range(10, 10 + 256))
    before, _ = await engine_page(vllm_url, None)
    assert before is not None
    for _ in range(2):
        async with aiohttp.ClientSession() as http:
            body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "temperature": 0}
            async with http.post(f"{vllm_url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
    after, _ = await engine_page(vllm_url, None)
    assert after is not None
    assert after.num_tokens == before.num_tokens > len(ids)
    assert after.num_queried - before.num_queried >= 2 * len(ids), "other tests may call it too"
    assert after.num_hit > before.num_hit, "the second prompt was there"
