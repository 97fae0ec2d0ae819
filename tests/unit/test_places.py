"""Calls that wait for a place in an engine's cache: until there is one, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest

from gangline.domain.tokens import token_ids
from gangline.models.engines.cache import EngineCache, cache_of_page
from gangline.models.engines.contract import EngineCapabilities
from gangline.node.backends.admission import Admission
from gangline.node.backends.engine import Assignment, Backend, BackendSpec
from gangline.node.backends.gate import GateMeter
from gangline.node.backends.places import Places
from gangline.node.backends.pool import Placement

VLLM = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="64000",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="128",engine="1",kv_cache_size_tokens="64000",num_gpu_blocks="1000"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1.5e+03
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 500.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1024.0
"""
SGLANG = b"""sglang:max_total_num_tokens{engine_type="unified",model_name="m",tp_rank="0"} 471258.0
sglang:prompt_tokens_total{model_name="m"} 100.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 30.0
"""


@pytest.mark.parametrize(
    ("page", "cache"),
    [
        (VLLM, EngineCache(128_000, 2000, 1024)),
        (VLLM.replace(b"\n", b"\r\n"), EngineCache(128_000, 2000, 1024)),
        (SGLANG, EngineCache(471_258, 100, 30)),
        (VLLM.replace(b'"64000"', b'"None"'), EngineCache(128_000, 2000, 1024)),
        (VLLM.replace(b'kv_cache_size_tokens="64000",', b""), EngineCache(128_000, 2000, 1024)),
        (VLLM.replace(b'"64000"', b'"None"').replace(b'"1000"', b'"None"'), None),
        (b'vllm:prefix_cache_queries_total{engine="0",\t=m} 1 # {a="b"} 1\n' + VLLM, EngineCache(128_000, 2000, 1024)),
        (
            b'vllm:prefix_cache_hits_total{a="b} 9\nvllm:prefix_cache_hits_total many\n' + VLLM,
            EngineCache(128_000, 2000, 1024),
        ),
        (b'vllm:prefix_cache_hits_total{model_name="a\xe2\x80\xa8b"} 1\n' + VLLM, EngineCache(128_000, 2000, 1025)),
        (b"vllm:prefix_cache_hits_total 12.0\n", None),
        (b"<html>", None),
    ],
)
def test_what_a_page_says_of_the_cache(page: bytes, cache: EngineCache | None) -> None:
    assert cache_of_page(page) == cache


class House:
    """Two backends and the places in them, on a clock that stands."""

    def __init__(self, *sizes: int | None, is_eager: bool = True) -> None:
        self.now = 0.0
        self.backends = {f"b{n}": _backend(n) for n in range(len(sizes))}
        self.placement = Placement(self.backends, affinity_slack=0)
        for one in self.backends.values():
            self.placement.offer(one)
        policy = Admission(patience_s=5.0, headroom=0.05, is_eager=is_eager)
        self.places = Places(policy, self.backends, self.placement.place, lambda: self.now)
        for backend, size in zip(self.backends.values(), sizes, strict=True):
            self.places.read(backend, None if size is None else EngineCache(size))
        self.calls: dict[str, Call] = {}

    def session(self, name: str, group: str | None = None) -> Call:
        return self.calls.setdefault(name, Call(self, Assignment(name, group or name)))


class Call:
    """A session that calls, one call at a time."""

    def __init__(self, house: House, assignment: Assignment) -> None:
        self.house = house
        self.assignment = assignment
        self.meter = GateMeter()
        self.answered = asyncio.Event()
        self.in_flight = False
        self.task: asyncio.Task[None] | None = None

    async def begins(self) -> bool:
        """Call. Returns whether the call went on."""
        self.answered = asyncio.Event()
        self.task = asyncio.create_task(self._call())
        await _settle(self.house)
        return self.in_flight

    async def ends(self, num_tokens: int, ids: Any = None) -> None:
        self.assignment.read(ids, num_tokens)
        self.assignment.num_tokens = num_tokens
        self.answered.set()
        await _settle(self.house)

    async def _call(self) -> None:
        async with self.house.places.turn(self.assignment, self.meter):
            self.in_flight = True
            self.house.placement.settle(self.assignment)
            await self.answered.wait()
        self.in_flight = False


def _backend(number: int) -> Backend:
    capabilities = cast("EngineCapabilities", None)
    spec, engine = BackendSpec(f"http://{number}"), cast("Any", None)
    return Backend(f"b{number}", number, spec, engine, capabilities, {}, True, "healthy", 0.0)


async def _settle(house: House) -> None:
    for _ in range(2):
        for _ in range(5):
            await asyncio.sleep(0)
        house.places.decide()  # else it comes some milliseconds later


async def _full_house() -> House:
    """Two sessions have places that fill the cache: a call of `busy` is in flight, a tool of `s0` runs."""
    house = House(200)
    for name in ("busy", "s0"):
        assert await house.session(name).begins()
        await house.session(name).ends(90)
    assert await house.session("busy").begins()
    return house


async def _over(house: House) -> None:
    house.places.release("s0")


async def _patience_is_over(house: House) -> None:
    house.now += 6.0
    house.places.decide()


async def _closed(house: House) -> None:
    house.places.close()


async def _unhealthy(house: House) -> None:
    house.backends["b0"].state = "unhealthy"
    house.places.decide()


@pytest.mark.parametrize("event", [_over, _patience_is_over, _closed, _unhealthy])
async def test_a_call_waits_for_a_place_and_goes_on(event: Callable[[House], Any]) -> None:
    house = await _full_house()
    waiting = house.session("s1")
    assert not await waiting.begins()
    assert house.places.view().num_waiting == 1
    assert waiting.meter.held_s > 0
    await event(house)
    await _settle(house)
    assert waiting.in_flight
    assert house.places.view().num_waiting == 0
    held_s = waiting.meter.held_s
    await _settle(house)
    assert waiting.meter.held_s == held_s


async def test_nobody_waits_while_an_engine_has_not_told_its_size() -> None:
    house = House(100, None)
    for name in ("s0", "s1", "s2"):
        assert await house.session(name).begins()
        await house.session(name).ends(90)
    house.places.read(house.backends["b1"], EngineCache(100))
    house.places.read(house.backends["b1"], None)  # a page that came too late changes nothing
    went = [await house.session(name).begins() for name in ("s0", "s1", "s2")]
    assert went == [True, True, False]


async def test_a_session_that_lost_its_place_waits_for_the_next() -> None:
    house = await _full_house()
    await house.session("s1").begins()
    await _patience_is_over(house)
    await _settle(house)
    assert not await house.session("s0").begins()
    await house.session("s1").ends(95)
    house.places.release("s1")
    await _settle(house)
    assert house.session("s0").in_flight


@pytest.mark.parametrize("just_as_it_may_go", [False, True])
async def test_a_call_given_up_while_it_waits_keeps_no_place_from_others(just_as_it_may_go: bool) -> None:
    house = await _full_house()
    waiting = house.session("s1")
    await waiting.begins()
    assert waiting.task is not None
    if just_as_it_may_go:
        house.places.release("s0")
    waiting.task.cancel()
    with suppress(asyncio.CancelledError):
        await waiting.task
    house.places.release("s0")
    assert house.places.view().num_waiting == 0
    house.now += 6.0
    assert await house.session("s2").begins()


async def test_a_second_call_of_a_session_goes_with_the_first() -> None:
    house = await _full_house()
    one = house.session("s0")
    assert await one.begins()
    other = Call(house, one.assignment)
    assert await other.begins()
    await one.ends(90)
    house.now += 60.0
    assert not await house.session("s1").begins()  # the other is still in flight
    await other.ends(90)


async def test_a_group_counts_what_it_shares_once() -> None:
    house = House(100)
    for name in ("s0", "s1", "s2"):
        assert await house.session(name, "g").begins()
        await house.session(name, "g").ends(65, token_ids([*range(60), int(name[1]) + 100]))
    view = house.places.view_of(house.backends["b0"])
    assert view is not None
    assert view.num_places == 3
    house.places.decide()
    view = house.places.view_of(house.backends["b0"])
    assert view is not None
    assert view.num_held_tokens == 60 + 3 * 5


async def test_new_sessions_go_where_there_is_room_and_return_to_it() -> None:
    house = House(100, 100)
    for name in ("s0", "s1"):
        assert await house.session(name).begins()
        await house.session(name).ends(80)
    places = [house.session(name).assignment.backend for name in ("s0", "s1")]
    assert {one.backend_id for one in places if one is not None} == {"b0", "b1"}
    assert await house.session("s0").begins()
    assert house.session("s0").assignment.backend is places[0]


async def test_contexts_that_are_not_found_make_the_cache_smaller_and_then_larger() -> None:
    house, ids = House(100), token_ids(range(90))
    assert await house.session("s0").begins()
    await house.session("s0").ends(90, ids)
    backend, queried, hit = house.backends["b0"], 90, 90
    house.places.read(backend, EngineCache(100, queried, hit))
    usable: list[float] = []
    for found in [0] * 20 + [90] * 60:
        for _ in range(2):
            assert await house.session("s0").begins()
            await house.session("s0").ends(90, ids)
            queried, hit = queried + 90, hit + found
        house.places.read(backend, EngineCache(100, queried, hit))
        view = house.places.view_of(backend)
        assert view is not None
        assert view.hit_rate == found / 90
        usable.append(view.usable)
    assert min(usable) == usable[19] == 0.5
    assert usable[-1] == 1.0


def _whole(name: str, turn: int) -> range | list[int]:
    """A prompt that begins as the one before it."""
    return range(40 + turn)


def _without_thoughts(name: str, turn: int) -> range | list[int]:
    """A prompt of a template that leaves earlier thinking out, so that the end of the one before it is not in it."""
    return [*range(20), *range(1000 * turn, 1000 * turn + 25)]


Prompt = Callable[[str, int], "range | list[int]"]


async def _over_a_cache(house: House, prompt: Prompt, found: float | None, turns: int = 12) -> None:
    """Three sessions take turns. found: the part of what prompts share with the ones before them that the engine says
    it had cached; None: it does not count."""
    queried = hit = 0
    for turn in range(turns):
        for name in ("s0", "s1", "s2"):
            await house.session(name).begins()
            await house.session(name).ends(45, token_ids(prompt(name, turn)))
            queried += 45
            hit += 0 if turn == 0 else len(prompt(name, turn)) if prompt is _whole else 20
        counts = () if found is None else (queried, int(hit * found))
        house.places.read(house.backends["b0"], EngineCache(100, *counts))


LEFT_ALONE: dict[str, tuple[Prompt, float | None]] = {
    "holds all, whatever it says of its size": (_whole, 1.0),
    "keeps nothing": (_whole, 0.0),
    "counts nothing": (_whole, None),
    "is asked for prompts that change behind the first turns": (_without_thoughts, 1.0),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
async def test_without_eagerness_nobody_waits_for_an_engine_that(case: str) -> None:
    house = House(100, is_eager=False)
    await _over_a_cache(house, *LEFT_ALONE[case])
    for name in ("s0", "s1", "s2", "s3", "s4"):
        assert await house.session(name).begins()
    view = house.places.view_of(house.backends["b0"])
    assert view is not None
    assert view.num_places == 3  # the new ones' first calls have not ended
    assert view.usable == 1.0


@pytest.mark.parametrize("prompt", [_whole, _without_thoughts])
async def test_without_eagerness_calls_wait_once_an_engine_has_computed_contexts_again(
    prompt: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    house = House(100, is_eager=False)
    await _over_a_cache(house, prompt, 0.3)
    assert [record.message.split()[0] for record in caplog.records] == ["backend.over_subscribed"]
    went = [await house.session(name).begins() for name in ("s0", "s1", "s2")]
    assert went.count(False) == 1


async def test_calls_that_an_engine_counted_before_it_was_read_do_not_make_its_cache_look_small() -> None:
    house, ids, counted = House(100, is_eager=False), token_ids(range(45)), 0
    for turn in range(8):
        for name in ("s0", "s1", "s2"):
            assert await house.session(name).begins()
        counted += 3 * 45
        house.places.read(house.backends["b0"], EngineCache(100, counted, counted if turn else 1))
        for name in ("s0", "s1", "s2"):
            await house.session(name).ends(45, ids)
    house.places.read(house.backends["b0"], EngineCache(100, counted, counted))
    assert not house.places.are_needed


async def test_a_cache_is_first_judged_after_a_quarter_of_its_size() -> None:
    house, ids = House(100, is_eager=False), token_ids(range(13))
    for queried in (13, 26, 39):
        house.places.read(house.backends["b0"], EngineCache(100, queried, 1))
        assert not house.places.are_needed
        assert await house.session("s0").begins()
        await house.session("s0").ends(13, ids)
    house.places.read(house.backends["b0"], EngineCache(100, 52, 1))
    assert house.places.are_needed


async def test_without_eagerness_a_session_on_another_engine_is_not_expected_to_be_cached_there() -> None:
    house = House(100, 100, is_eager=False)
    one, other = house.backends.values()
    for turn in range(20):
        session = house.session("s0")
        assert await session.begins()
        house.placement.place(session.assignment, (one, other)[turn % 2])
        await session.ends(90, token_ids(range(80)))
        for backend in (one, other):
            house.places.read(backend, EngineCache(100, 90 * (turn + 1), turn + 1))
    assert [await house.session(name).begins() for name in ("s0", "s1", "s2")] == [True] * 3
