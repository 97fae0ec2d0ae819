"""Collectors under any order of endings: each group is handed out once, none is lost, none outlives its collector."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gangline.train.collecting.collector import PlainCollector, ReplenishingCollector, informative
from support.training.service import DULL, GOOD, FakeService, tasks


@given(
    calls=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    num_in_flight=st.integers(1, 5),
    unfinished=st.sampled_from(["carry", "cancel"]),
    seed=st.integers(0, 2**32),
)
def test_replenishing(calls: list[int], num_in_flight: int, unfinished: str, seed: int) -> None:
    service = FakeService()

    async def run() -> None:
        async with ReplenishingCollector(
            service,
            tasks(),
            num_in_flight=num_in_flight,
            unfinished=unfinished,
            admit=informative,  # type: ignore[arg-type]
        ) as collector:
            handed_out = await _collect(collector, calls, service, random.Random(seed))
            counts = collector.counts
        assert Counter(handed_out).most_common(1)[0][1] == 1
        assert all(service.rewards[task_id] == GOOD for task_id in handed_out)
        accounted = counts.handed_out + counts.not_admitted + counts.cancelled + collector.num_waiting
        assert counts.submitted == accounted
        assert counts.handed_out == len(handed_out)
        assert counts.cancelled <= (num_in_flight if unfinished == "carry" else counts.submitted)
        assert set(service.cancelled) >= set(service.submitted) - set(service.rewards)

    asyncio.run(run())


@given(calls=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_plain(calls: list[int], seed: int) -> None:
    service = FakeService()

    async def run() -> None:
        async with PlainCollector(service, tasks(), admit=informative) as collector:
            handed_out = await _collect(collector, calls, service, random.Random(seed))
            counts = collector.counts
        assert len(set(handed_out)) == len(handed_out)
        assert counts.submitted == counts.handed_out + counts.not_admitted + counts.wasted
        assert service.cancelled == []

    asyncio.run(run())


async def _collect(
    collector: PlainCollector | ReplenishingCollector, calls: list[int], service: FakeService, chance: random.Random
) -> list[str]:
    """Ids handed out by calls for so many groups each, while open tasks end in random order, two of three worth it."""

    async def end_some() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)
            if service.open:
                chosen = chance.choice(service.open)
                service.end(chosen, chance.choice([GOOD, GOOD, DULL]))

    ending = asyncio.create_task(end_some())
    handed_out = list[str]()
    for num_groups in calls:
        found = await collector.collect(num_groups)
        assert len(found) == num_groups
        handed_out += [one.task_id for one in found]
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    return handed_out
