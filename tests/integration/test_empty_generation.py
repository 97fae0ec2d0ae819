"""Replies without any content: sampled again as the task asks, recorded, counted, and not trained on when given up."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from gangline.domain.completion import Completion
from gangline.domain.conversation import Text, Thinking, ToolCall
from gangline.domain.tokens import token_ids
from gangline.models.engines.contract import EngineChoice, assistant_message
from gangline.node.calls.chat_call import is_empty
from gangline.node.health.metrics import NodeMetrics
from gangline.rows.audit import audit
from gangline.rows.chains import built
from gangline.serving.scripted.server import scripted_server
from gangline.settings.plugins import make_builder
from support.engines.held import HeldCall, HeldEngine
from support.node.proxy import Proxied, proxied_engine

MESSAGES: Any = [{"role": "user", "content": "hello"}]
SILENT = {"default": {"text": ""}}
END = ""
"""A token without text, as the end of a turn is."""


async def ask(running: Proxied, **fields: Any) -> Any:
    async with running.client() as client:
        return await client.chat.completions.create(model="scripted", messages=MESSAGES, **fields)


async def streamed(running: Proxied, **fields: Any) -> list[Any]:
    async with running.client() as client:
        create: Any = client.chat.completions.create
        chunks = await create(model="scripted", messages=MESSAGES, stream=True, **fields)
        found: list[Any] = [chunk async for chunk in chunks]
        return found


def fates(completions: list[Completion]) -> list[tuple[str, str | None]]:
    return [(one.status, one.metadata.get("empty_generation")) for one in completions]


def seeds(engine: HeldEngine) -> list[int | None]:
    return [call.request.call.sampling.seed for call in engine.calls]


async def answer(engine: HeldEngine, *replies: tuple[str, ...]) -> list[HeldCall]:
    calls: list[HeldCall] = []
    for number, words in enumerate(replies, start=1):
        calls.append(await engine.asked(number))
        calls[-1].finish(*words)
    return calls


async def test_an_empty_reply_is_delivered_as_it_is_unless_the_task_asks_for_more() -> None:
    async with scripted_server(SILENT) as url, proxied_engine(url) as running:
        reply = await ask(running)
        assert not reply.choices[0].message.content
        (completion,) = running.journal.completions
        assert fates([completion]) == [("complete", "delivered")]
        assert completion.trainable, "the end of the turn is what the policy sampled"


async def test_a_retried_reply_stays_in_the_audit_and_out_of_training() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, empty_generation_retries=2) as running:
        asked = asyncio.create_task(ask(running))
        await answer(engine, (END,), ("at ", "last"))
        assert (await asked).choices[0].message.content == "at last"
        first, second = running.journal.completions
        assert fates([first, second]) == [("aborted", "retried"), ("complete", None)]
        assert (first.certificate.untrainable, second.metadata["empty_retries"]) == (
            "aborted: empty_generation: sampled again",
            1,
        )
        assert (second.lineage.relation, second.lineage.origin_id) == ("retry", first.completion_id)
        assert running.session.num_calls == 1, "it is one turn"
    trajectory = built(make_builder("prefix_merging", {}), [first, second], session_id="s1", task_id="t1")
    assert sum(int(trace.loss_mask.sum()) for trace in trajectory.traces) == len(second.sampled_ids)
    report = audit(trajectory, [first, second])
    assert (report.ok, report.num_completions, report.num_sampled_tokens) == (True, 2, 3)


async def test_at_the_limit_the_reply_is_delivered_and_says_so() -> None:
    metrics = NodeMetrics()
    async with scripted_server(SILENT) as url, proxied_engine(url, empty_generation_retries=2) as running:
        reply = await ask(running)
        assert (reply.choices[0].message.content or "", reply.choices[0].finish_reason) == ("", "stop")
        completions = running.journal.completions
        assert fates(completions) == [("aborted", "retried")] * 2 + [("complete", "delivered")]
        for completion in completions:
            metrics.kept([completion])
    read = metrics._registry.get_sample_value
    counts = [read("gangline_empty_generations_total", {"fate": fate}) for fate in ("retried", "delivered")]
    assert counts == [2.0, 1.0]


async def test_a_stream_shows_nothing_of_a_reply_that_was_given_up() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, empty_generation_retries=1) as running:
        asked = asyncio.create_task(streamed(running))
        await answer(engine, (END,), ("one ", "two"))
        chunks = await asked
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one two"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert [len(one.sampled_ids) for one in running.journal.completions] == [1, 2]


async def test_each_try_samples_by_another_seed_and_the_record_has_it() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, empty_generation_retries=2, seed=7) as running:
        asked = asyncio.create_task(ask(running, seed=3))
        await answer(engine, (END,), (END,), ("hi",))
        await asked
        sent = seeds(engine)
        assert len(set(sent)) == 3
        assert [one.certificate.sampling.seed for one in running.journal.completions] == sent
        assert [one.metadata["sampling_wished"]["seed"] for one in running.journal.completions] == [3] * 3
    again = HeldEngine()
    async with proxied_engine(again, empty_generation_retries=2, seed=7) as running:
        asked = asyncio.create_task(ask(running))
        await answer(again, (END,), (END,), ("hi",))
        await asked
    assert seeds(again) == sent, "and by the same ones in another session of that seed"


async def test_a_session_that_ends_meanwhile_keeps_both_tries() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, empty_generation_retries=1) as running:
        asked = asyncio.create_task(streamed(running))
        await answer(engine, (END,))
        (await engine.asked(2)).say("half")
        async with asyncio.timeout(10):
            while not any(flight.progress.shown for flight in running.session.in_flight):
                await asyncio.sleep(0.005)
        await running.session.fence("the session is over")
        await asyncio.gather(asked, return_exceptions=True)
        assert fates(running.journal.completions) == [("aborted", "retried"), ("aborted", None)]


async def test_a_failed_retry_is_the_engines_failure() -> None:
    engine = HeldEngine()
    async with proxied_engine(engine, empty_generation_retries=1) as running:
        asked = asyncio.create_task(ask(running))
        await answer(engine, (END,))
        (await engine.asked(2)).fail()
        with pytest.raises(openai.InternalServerError):
            await asked


def choice(*parts: Any, **fields: Any) -> EngineChoice:
    message = assistant_message("", "")
    given: dict[str, Any] = {"finish_reason": "stop", "sampled_ids": token_ids([1]), "logprobs": None} | fields
    return EngineChoice(index=0, message=type(message)("assistant", parts), **given)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (choice(), True),
        (choice(Text("")), True),
        (choice(sampled_ids=token_ids()), True),
        (choice(Text(" ")), False),
        (choice(Thinking("hm")), False),
        (choice(ToolCall("c", "shell", "{}")), False),
        (choice(finish_reason="length"), False),
        (choice(finish_reason=None), False),
        (choice(parse="failed"), False),
        (choice(stop_reason="END"), False),
        (choice(stop_reason="</s>"), True),
    ],
)
def test_what_an_empty_reply_is(one: EngineChoice, expected: bool) -> None:
    assert is_empty([one], ("END",)) is expected


def test_one_choice_with_content_is_enough() -> None:
    assert not is_empty([choice(), choice(Text("x"))], ())
