"""The catalogue of docs/token-truth.md, part two: what is kept of a call, and what a row may claim of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gangline.domain.completion import CompletionTree, VersionSpan
from support.engines import tokenizers
from support.engines.families import MEDIA_ID, Turn, families, families_with_tools
from support.node.proxy import proxied
from support.training.agent_loop import FIRST, SHELL, STITCHED, agent, checked_rows

LS = ("shell", '{"command": "ls"}')
OTHER_TOOL = {"type": "function", "function": {"name": "other", "description": "Another.", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


# -- 10: the parser of calls fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ['{"name": "shell", "arguments": {"command": "ls"', "ls -l", '{"name": "shell"}'])
async def test_a_call_that_does_not_parse_is_text_and_every_id_is_kept(body: str) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    tokenizer = tokenizers.qwen3()
    async with proxied({"default": {"text": text}}, tokenizer) as running, running.client() as client:
        answer: Any = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Go."}], tools=[SHELL]
        )
        assert answer.choices[0].message.content == text
        assert not answer.choices[0].message.tool_calls
        (record,) = running.journal.completions
        assert record.certificate.parse == "failed"
        assert tokenizer.decode(record.sampled_ids.tolist()) == f"{text}<|im_end|>"
        assert record.trainable


# -- 11: parallel calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "glm"])
async def test_calls_that_an_engine_names_alike_have_ids_of_their_own(name: str) -> None:
    """Each of these engines says `engine-0` and `engine-1`, in every reply."""
    turns = [Turn(calls=(LS, ("shell", '{"command": "pwd"}')))] * 2 + [Turn(text="Done.")]
    async with agent(name, turns, tools=[SHELL]) as one:
        await one.run(3)
        ids = [call["id"] for message in one.messages for call in message.get("tool_calls") or ()]
        assert len(set(ids)) == len(ids) == 4
        assert one.kinds == [FIRST, STITCHED, STITCHED]
        assert len(one.rows().traces) == 1


# -- 13: tools and template arguments --------------------------------------------------------------------------------


@families_with_tools
async def test_other_tools_or_template_arguments_are_another_branch(name: str) -> None:
    async with agent(name, [Turn(text="Hello."), Turn(text="Yes.")], tools=[SHELL]) as one:
        await one.call()
        one.messages.append({"role": "user", "content": "And now?"})
        history = list(one.messages)
        await one.call(tools=[SHELL, OTHER_TOOL])
        one.messages = list(history)
        await one.call(chat_template_kwargs={"date_string": "1 Jan 2026"})
        one.messages = history
        await one.call()
        assert one.kinds == [FIRST, FIRST, FIRST, STITCHED]
        assert len({completion.branch_key for completion in one.completions}) == 3
        assert len(one.rows().traces) == 3


# -- 14: calls alongside the conversation
# -------------------------------------------------------------------------------


@families
async def test_a_call_for_a_title_is_a_row_of_its_own_beside_the_main_one(name: str) -> None:
    async with agent(name, [Turn(text="Hello there, what a day."), Turn(text="Title"), Turn(text="Yes.")]) as one:
        await one.call()
        conversation = list(one.messages)
        one.messages = [{"role": "user", "content": "Give a title."}]
        await one.call()
        one.messages = [*conversation, {"role": "user", "content": "And now?"}]
        await one.call()
        assert one.kinds == [FIRST, FIRST, STITCHED]
        main, side = one.rows().traces
        assert (main.role, side.role) == ("main", "side")
        assert [len(main.spans), len(side.spans)] == [2, 1]


# -- 18: log-probs that are none -------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize(("value", "reason"), [(-9999.0, "-9999.0"), (float("nan"), "not finite"), (0.5, "positive")])
async def test_a_turn_without_real_log_probs_is_masked_and_its_neighbours_are_not(
    name: str, value: float, reason: str
) -> None:
    turns = [Turn(text="Hello."), Turn(text="Well.", logprob=value), Turn(text="Yes.")]
    async with agent(name, turns) as one:
        await one.run(3, then="And now?")
        assert reason in (one.completions[1].certificate.untrainable or "")
        (row,) = one.rows().traces
        assert [bool(row.loss_mask[span.start : span.end].all()) for span in row.spans] == [True, False, True]


# -- 19: several choices ---------------------------------------------------------------------------------------------


@families
async def test_each_choice_is_a_record_and_the_one_that_is_continued_goes_on(name: str) -> None:
    async with agent(name, [Turn(text="Hello."), Turn(text="Yes.")]) as one:
        status, answer = await one.post(n=3)
        assert (status, len(answer["choices"])) == (200, 3)
        one.messages += [answer["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        await one.call()
        *choices, last = one.completions
        assert [completion.choice_index for completion in choices] == [0, 1, 2]
        assert len({completion.prompt_suffix_ids.tobytes() for completion in choices}) == 1
        assert last.parent_id in {completion.completion_id for completion in choices}
        assert sorted(len(trace.spans) for trace in one.rows().traces) == [1, 1, 2]


# -- 20 and 21: streams, and engines that hide ids -------------------------------------------------------------------


@families
async def test_a_stream_leaves_the_record_that_the_whole_reply_leaves(name: str) -> None:
    turns = [Turn(text="the fishing command", split=True), Turn(text="Yes.")]
    async with agent(name, turns) as whole, agent(name, turns) as streamed:
        await whole.run(2, then="And now?")
        for message in whole.messages[1:]:
            if message["role"] == "assistant":
                await streamed.post(stream=True)
            streamed.messages.append(message)
        assert streamed.kinds == whole.kinds == [FIRST, STITCHED]
        for a, b in zip(whole.completions, streamed.completions, strict=True):
            assert np.array_equal(a.sampled_ids, b.sampled_ids)
            assert np.array_equal(a.logprobs, b.logprobs)
            assert np.array_equal(a.prompt_suffix_ids, b.prompt_suffix_ids)
        streamed.rows()


async def test_a_harness_that_wants_no_thinking_gets_its_ids_recorded_all_the_same() -> None:
    script = {"default": {"thinking": "Easy.", "text": "Hello."}}
    tokenizer = tokenizers.qwen3()
    async with proxied(script, tokenizer) as running, running.client() as client:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Go."}], extra_body={"include_reasoning": False}
        )
        (record,) = running.journal.completions
        assert "Easy." in tokenizer.decode(record.sampled_ids.tolist())
        assert record.trainable


# -- 22: characters that are cut -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [tokenizers.qwen3, tokenizers.smollm2])
async def test_a_stream_of_half_characters_is_whole_text_and_exact_ids(tokenizer: Any) -> None:
    text = "caf\u00e9 \u65e5\u672c \U0001f600!"
    script = {"default": {"text": text, "split": "bytes"}}
    async with proxied(script, tokenizer()) as running, running.client() as client:
        stream: Any = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Go."}], stream=True
        )
        deltas = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)
        (record,) = running.journal.completions
        assert len(record.sampled_ids) == len(text.encode()) + 1


# -- 23: images ------------------------------------------------------------------------------------------------------


@families
async def test_an_image_is_never_stitched_and_its_expanded_ids_are_in_the_record(name: str) -> None:
    first = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}
    async with agent(name, [Turn(text="A cat."), Turn(text="Yes.")], messages=[first]) as one:
        await one.run(2, then="And now?")
        assert one.engine.sent_ids == [None, None]
        assert "images in the conversation" in (one.completions[1].certificate.fallback or "")
        tree = CompletionTree(one.completions)
        assert [tree.prompt_ids(c).tolist().count(MEDIA_ID) >= 4 for c in one.completions] == [True, True]
        assert [message.parts for message in one.completions[0].new_messages] == [
            message.parts for message in tree.messages(one.completions[1])[:1]
        ]
        one.rows()


# -- 24: weights that change inside a reply --------------------------------------------------------------------------


@families
async def test_tokens_of_one_reply_have_the_versions_that_sampled_them(name: str) -> None:
    turn = Turn(text="the fishing command", version_spans=(VersionSpan(7, 0, 2), VersionSpan(8, 2, 4)))
    async with agent(name, [turn, Turn(text="Yes.", version_spans=(VersionSpan(9, 0, 2),))]) as one:
        await one.run(2, then="And now?")
        (row,) = one.rows().traces
        assert row.response_versions[:4].tolist() == [7, 7, 8, 8]
        second = row.spans[1]
        assert row.response_versions[second.start : second.start + 2].tolist() == [9, 9]
        assert (row.response_versions[row.loss_mask == 0] == -1).all()


# -- 25: a router that strips ids ------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_without_ids_fails_loudly_and_leaves_no_record(name: str, stream: bool) -> None:
    async with agent(name, [Turn(text="Hello.", strips_ids=True)]) as one:
        status, answer = await one.post(stream=stream)
        assert status == 502 or stream
        assert "returned no token ids" in json.dumps(answer)
        assert one.completions == []
        failure = one.running.session.failures.engine
        assert failure is not None
        assert (failure.boundary, failure.code) == ("engine", "engine_incapable")


# -- the rule of the builder -----------------------------------------------------------------------------------------


@families
async def test_a_row_of_other_ids_than_the_engines_is_found_out(name: str) -> None:
    """The check that the other tests rely on fails when an id, a mask or an order is wrong."""
    async with agent(name, [Turn(text="Hello."), Turn(text="Yes.")]) as one:
        await one.run(2, then="And now?")
        seen, records = list(one.engine.seen), list(one.completions)
        checked_rows(records, seen)
        wrong = replace(seen[1], prompt_ids=[*seen[1].prompt_ids[:-1], 5])
        with pytest.raises(AssertionError):
            checked_rows(records, [seen[0], wrong])
        other = msgspec.structs.replace(records[1], sampled_ids=records[1].sampled_ids[::-1].copy())
        with pytest.raises(AssertionError):
            checked_rows([records[0], other], seen)
