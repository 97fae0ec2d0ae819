"""The texts of sampled tokens (`capture.token_texts`): what the engine reports is kept, and only the record has it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from gangline.domain.completion import CompletionTree
from gangline.models.engines.sglang.engine import SglangEngine
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.engines.sglang_engine import FakeSglang, sglang_server
from support.node.proxy import Proxied, proxied, proxied_engine

HELLO: Any = [{"role": "user", "content": "hello"}]
PARTS_OF_A_CHARACTER = {"default": {"text": "wörld 🙂", "split": "bytes"}}


async def _say(client: openai.AsyncOpenAI, messages: Any, *, stream: bool, **fields: Any) -> tuple[str, list[str]]:
    """The reply, and the texts of its log-probs."""
    if not stream:
        reply = await client.chat.completions.create(model="m", messages=messages, **fields)
        (choice,) = reply.choices
        shown = [] if choice.logprobs is None else choice.logprobs.content or []
        return choice.message.content or "", [entry.token for entry in shown]
    text, tokens = "", list[str]()
    async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True, **fields):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            tokens += [] if choice.logprobs is None else [entry.token for entry in choice.logprobs.content or []]
    return text, tokens


def _texts_alone(running: Proxied) -> list[str]:
    """What vLLM and SGLang report: each token decoded by itself."""
    tokenizer = TinyTokenizer()
    return [tokenizer.decode([token]) for token in running.journal.completions[0].sampled_ids.tolist()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asks", [False, True], ids=["the client does not ask", "the client asks"])
async def test_texts_are_kept_as_the_engine_reports_them_and_shown_to_who_asks(stream: bool, asks: bool) -> None:
    async with proxied(PARTS_OF_A_CHARACTER, token_texts=True) as running, running.client() as client:
        said, shown = await _say(client, HELLO, stream=stream, **({"logprobs": True} if asks else {}))
        (record,) = running.journal.completions
        assert list(record.sampled_texts) == _texts_alone(running)
        assert record.sampled_texts.count("\ufffd") == 6  # two bytes of ö, four of the face
        assert said == "wörld 🙂"
        assert shown == (_texts_alone(running) if asks else [])


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_kept_unasked(stream: bool) -> None:
    async with proxied(PARTS_OF_A_CHARACTER) as running, running.client() as client:
        await _say(client, HELLO, stream=stream, logprobs=True)
        assert running.journal.completions[0].sampled_texts == ()


async def test_a_trace_has_the_text_of_each_sampled_token_and_none_between_turns() -> None:
    async with proxied({"default": {"text": "fine"}}, token_texts=True) as running, running.client() as client:
        said, _ = await _say(client, HELLO, stream=False)
        again = [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        await _say(client, again, stream=True)
        trajectory = PrefixMergingBuilder().build(CompletionTree(running.session.tree), session_id="s", task_id="t")
    (trace,) = trajectory.traces
    assert [text is not None for text in trace.response_texts] == trace.loss_mask.astype(bool).tolist()
    texts = ["".join(text or "" for text in trace.response_texts[span.start : span.end]) for span in trace.spans]
    assert texts == ["fine<|im_end|>"] * 2


async def test_sglangs_texts_are_kept_too() -> None:
    async with (
        sglang_server(FakeSglang()) as url,
        proxied_engine(SglangEngine(url), token_texts=True) as running,
        running.client() as client,
    ):
        await _say(client, HELLO, stream=False)
        assert list(running.journal.completions[0].sampled_texts) == _texts_alone(running)
