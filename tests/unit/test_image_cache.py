"""Which pulled images go when they take too much room, and which never do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.domain.errors import RuntimeFailed
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.images.cache import ImageCache
from gangline.sandbox.images.pulling import Pulls
from gangline.sandbox.images.supply import ImageSupply
from support.image_store import ScriptedStore, held

EACH = 100
"""Bytes of a scripted image."""


class Supply(ImageSupply):
    def __init__(self, store: ScriptedStore, *, num_images: float | None = 3, file: Path | None = None) -> None:
        self.ticks = 0
        max_bytes = None if num_images is None else num_images * EACH
        super().__init__(Pulls(), cache=ImageCache(file, max_bytes=max_bytes, clock=self._tick))
        self.cache.load()
        self._stores["docker"] = store

    def _tick(self) -> float:
        self.ticks += 1
        return float(self.ticks)


def name(number: int) -> str:
    return f"docker.io/x/i{number}:1"


def spec(number: int) -> RuntimeSpec:
    return RuntimeSpec(backend="docker", image=f"x/i{number}:1")


async def settled(supply: ImageSupply) -> None:
    """Let the bound be kept."""
    keeping = asyncio.create_task(supply.keep_bound())
    for _ in range(200):
        await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait({keeping})


async def used(supply: ImageSupply, *numbers: int) -> None:
    for number in numbers:
        await supply.bring(f"u{number}", [spec(number)])
        supply.release(f"u{number}")


async def test_the_least_recently_used_go_first() -> None:
    store = ScriptedStore()
    supply = Supply(store)
    await used(supply, 0, 1, 2, 0, 3, 4)
    await settled(supply)
    assert sorted(store.images) == [name(0), name(3), name(4)]
    assert (supply.now().num_removed, supply.now().cache_bytes) == (2, 3 * EACH)
    await used(supply, 1)
    assert store.pulled.count(name(1)) == 2, "it comes again when it is needed"


async def test_a_layer_that_images_share_counts_once_and_stays_counted_with_the_last() -> None:
    store = ScriptedStore()
    store.shared = {name(number): {"base": 200, f"top{number}": 50} for number in range(3)}
    supply = Supply(store, num_images=3)
    await used(supply, 0, 1)
    await settled(supply)
    assert (len(store.images), supply.now().cache_bytes) == (2, 300)
    await used(supply, 2)
    await settled(supply)
    assert (sorted(store.images), supply.now().cache_bytes) == ([name(1), name(2)], 300)


async def test_none_goes_while_a_session_or_a_container_has_it() -> None:
    store = ScriptedStore()
    supply = Supply(store, num_images=1)
    for number in range(4):
        await supply.bring(f"u{number}", [spec(number)])
    store.used = {held(name(3)).image_id}
    await settled(supply)
    assert len(store.images) == 4, "it may be over its bound for a while"
    for number in (1, 2, 3):
        supply.release(f"u{number}")
    await settled(supply)
    assert sorted(store.images) == [name(0), name(3)]
    store.used = set()
    supply.release("u0")
    await settled(supply)
    assert sorted(store.images) == [name(0)] or sorted(store.images) == [name(3)]


async def test_an_image_beyond_the_whole_bound_stays_for_whoever_awaits_it() -> None:
    store = ScriptedStore()
    supply = Supply(store, num_images=0.5)
    keeping = asyncio.create_task(supply.keep_bound())
    await supply.bring("u", [spec(1)])
    for _ in range(100):
        await asyncio.sleep(0)
    assert list(store.images) == [name(1)]
    supply.release("u")
    for _ in range(100):
        await asyncio.sleep(0)
    assert store.images == {}
    keeping.cancel()
    await asyncio.wait({keeping})


async def test_the_operators_own_images_are_never_touched() -> None:
    store = ScriptedStore(own=["mine:1", name(0)])
    supply = Supply(store, num_images=0.5)
    await used(supply, 0, 1)
    store.images["kept-under-a-name:1"] = held(name(2))
    store.known["kept-under-a-name:1", 1] = held(name(2))
    await used(supply, 2)
    await settled(supply)
    assert set(store.images) >= {"mine:1", name(0), "kept-under-a-name:1"}
    assert name(1) not in store.images
    for one in ("mine:1", name(0), name(2)):
        assert held(one).image_id in await store.image_ids()


async def test_what_somebody_gave_another_name_since_is_theirs() -> None:
    store = ScriptedStore()
    supply = Supply(store, num_images=0.5)
    await supply.bring("u", [spec(1)])
    store.images["saved:1"] = store.images[name(1)]
    supply.release("u")
    await settled(supply)
    assert held(name(1)).image_id in await store.image_ids()
    assert "saved:1" in store.images
    assert supply.now().cache_bytes == 0, "it counts no more"


@pytest.mark.parametrize("how", ["removed", "tagged"])
async def test_what_is_the_nodes_no_more_makes_room_so_no_other_image_goes(how: str) -> None:
    """Somebody removed the oldest image, or gave it a name: without it, the cache is within its bound."""
    store = ScriptedStore()
    supply = Supply(store, num_images=3)
    await used(supply, 0, 1, 2)
    if how == "removed":
        assert await store.remove_image(name(0))
    else:
        store.images["saved:1"] = store.images[name(0)]
    await used(supply, 3)
    await settled(supply)
    assert {name(1), name(2), name(3)} <= set(store.images)
    assert supply.now().cache_bytes == 3 * EACH


async def test_on_a_low_disk_a_record_without_its_image_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.sandbox.images.supply._MEASURED_S", 0.0)
    store = ScriptedStore()
    supply = Supply(store, num_images=1)
    await used(supply, 0, 1)
    assert await store.remove_image(name(0))
    supply.disk_changed(is_low=True)
    await settled(supply)
    assert store.images == {}


async def test_an_image_whose_layers_cannot_be_read_counts_with_its_whole_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = ScriptedStore()
    store.shared = {name(0): RuntimeFailed("the engine closed the connection")}
    supply = Supply(store)
    await used(supply, 0, 1)
    assert supply.now().cache_bytes == 2 * EACH
    assert f"image.layers_unknown image={name(0)}" in caplog.text


async def test_an_image_whose_tag_moved_on_goes_by_its_id_unless_it_has_another_name() -> None:
    store = ScriptedStore()
    supply = Supply(store, num_images=1)
    supply.policy = "always"
    await used(supply, 1)
    supply.pulls.gone(held(name(1)).image_id)
    store.version = 2
    await used(supply, 1)
    await settled(supply)
    assert await store.image_ids() == {held(name(1), 2).image_id}
    assert list(store.images) == [name(1)]


async def test_the_record_outlives_the_node_and_a_lost_one_removes_nothing(tmp_path: Path) -> None:
    store, file = ScriptedStore(), tmp_path / "images.json"
    await used(Supply(store, file=file), 0, 1, 2)
    again = Supply(store, num_images=1, file=file)
    again.ticks = 100
    await used(again, 3)
    keeping = asyncio.create_task(again.keep_bound())
    async with asyncio.timeout(30):
        while again.now().num_removed < 3:
            await asyncio.sleep(0.001)
    keeping.cancel()
    await asyncio.wait({keeping})
    assert list(store.images) == [name(3)]
    file.write_text("{")
    lost = Supply(store, num_images=0.1, file=file)
    lost.release("nobody")
    await settled(lost)
    assert list(store.images) == [name(3)]


async def test_while_the_disk_is_low_unused_images_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.sandbox.images.supply._MEASURED_S", 0.0)
    store = ScriptedStore(own=["mine:1"])
    supply = Supply(store, num_images=None)
    await used(supply, 0, 1, 2)
    await supply.bring("u", [spec(2)])
    supply.disk_changed(is_low=True)
    await settled(supply)
    assert sorted(store.images) == [name(2), "mine:1"]
    supply.release("u")
    await settled(supply)
    assert sorted(store.images) == ["mine:1"]
    supply.disk_changed(is_low=False)
    await used(supply, 1)
    await settled(supply)
    assert sorted(store.images) == [name(1), "mine:1"]


async def test_a_full_disk_makes_the_oldest_go_even_without_a_bound() -> None:
    store = ScriptedStore()
    supply = Supply(store, num_images=None)
    await used(supply, 0, 1)
    store.words = ["write /x: no space left on device"]
    await used(supply, 2)
    assert sorted(store.images) == [name(1), name(2)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=40), st.integers(1, 4))
def test_whatever_sessions_come_and_go_none_loses_its_image(steps: list[tuple[int, bool]], num_images: int) -> None:
    async def lived() -> None:
        store = ScriptedStore(own=[name(9)])
        supply = Supply(store, num_images=num_images)
        keeping = asyncio.create_task(supply.keep_bound())
        holding = dict[str, int]()
        for at, (number, begins) in enumerate(steps):
            if begins:
                await supply.bring(f"u{at}", [spec(number)])
                holding[f"u{at}"] = number
            elif holding:
                user = next(iter(holding))
                del holding[user]
                supply.release(user)
            for _ in range(30):
                await asyncio.sleep(0)
            assert {name(number) for number in holding.values()} | {name(9)} <= set(store.images)
        for user in holding:
            supply.release(user)
        for _ in range(300):
            await asyncio.sleep(0)
        assert len(store.images) <= num_images + 1
        keeping.cancel()
        await asyncio.wait({keeping})

    asyncio.run(lived())


@pytest.mark.parametrize("answer", [None, "not json"])
def test_a_record_that_is_not_there_or_not_readable_is_empty(tmp_path: Path, answer: str | None) -> None:
    if answer is not None:
        (tmp_path / "images.json").write_text(answer)
    cache = ImageCache(tmp_path / "images.json")
    cache.load()
    assert cache.num_bytes == 0
