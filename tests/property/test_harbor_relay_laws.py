"""Calls of Harbor's agents, over any losses of the connection and restarts of the connector."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from support.service.harbor_relay import Death, FakeNode, FakeRelay, asked, connector_of, stopped

deaths = st.lists(st.builds(Death, st.integers(0, 12), st.integers(0, 3)), max_size=6)


async def _talk(relay: FakeRelay, rollout_id: str, num_calls: int) -> list[bytes]:
    """A conversation: each question has all answers so far."""
    answers: list[bytes] = []
    for number in range(num_calls):
        history = [answer.decode() for answer in answers]
        answers.append(await asked(relay, rollout_id, json.dumps([rollout_id, history, number]).encode()))
    return answers


@given(deaths, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=60)
def test_each_call_is_sampled_once_and_answered_once_however_often_the_connection_dies(
    deaths: list[Death], num_calls: int, num_rollouts: int
) -> None:
    async def check(folder: Path) -> None:
        relay, node = FakeRelay(deaths), FakeNode()
        kept = asyncio.create_task(connector_of(relay, node, folder).keep())
        talks = [_talk(relay, f"rollout-{number}", num_calls) for number in range(num_rollouts)]
        answers = [answer for talk in await asyncio.gather(*talks) for answer in talk]
        await stopped(kept)
        assert sorted(answers) == sorted(sample.whole for sample in node.samples)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(Path(folder)))


@given(deaths, st.integers(1, 4))
@settings(max_examples=40)
def test_equal_calls_at_a_time_get_samples_of_their_own(deaths: list[Death], num_equal: int) -> None:
    async def check(folder: Path) -> None:
        relay, node = FakeRelay(deaths), FakeNode()
        kept = asyncio.create_task(connector_of(relay, node, folder).keep())
        answers = await asyncio.gather(*(asked(relay, "rollout", b"the same") for _ in range(num_equal)))
        await stopped(kept)
        assert sorted(answers) == sorted(sample.whole for sample in node.samples)
        assert len(answers) == num_equal

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(Path(folder)))


@given(deaths, st.lists(st.integers(0, 25), max_size=3), st.integers(1, 4))
@settings(max_examples=60)
def test_a_connector_that_is_restarted_loses_and_doubles_no_answer(
    deaths: list[Death], restarts: list[int], num_calls: int
) -> None:
    """A sample that its restart cut off is given up, and no agent has it."""

    async def check(folder: Path) -> None:
        relay, node = FakeRelay(deaths), FakeNode()
        talk = asyncio.create_task(_talk(relay, "rollout", num_calls))
        kept = asyncio.create_task(connector_of(relay, node, folder).keep())
        for num_turns in restarts:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await stopped(kept)
            kept = asyncio.create_task(connector_of(relay, node, folder).keep())
        answers = await talk
        await stopped(kept)
        assert answers == [sample.whole for sample in node.samples if not sample.failed]

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check(Path(folder)))
