"""Pulls of images, with a script in place of an engine's client: who waits, what is tried again, what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gangline.domain.errors import ImageMissing, PullFailed, PullPostponed
from gangline.domain.image_names import full_name, mirrored
from gangline.sandbox.images.pulling import Pulls, trouble_of
from support.image_store import ScriptedStore, held

DEBIAN = "docker.io/library/debian:12"
BUSY = (
    "Error response from daemon: toomanyrequests: You have reached your unauthenticated pull rate limit. "
    "https://www.docker.com/increase-rate-limit"
)
REFUSED = (
    'Error response from daemon: Get "http://127.0.0.1:5000/v2/": dial tcp 127.0.0.1:5000: connect: connection refused'
)
UNKNOWN = "Error response from daemon: manifest for debian:429 not found: manifest unknown: manifest unknown"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def pulls(clock: Clock, **more: object) -> Pulls:
    return Pulls(pause=clock.pause, monotonic=clock, **more)  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("words", "trouble"),
    [
        (BUSY, "busy"),
        ("initializing source docker://debian:12: reading manifest 12 in docker.io/debian: toomanyrequests", "busy"),
        ("received unexpected HTTP status: 429 Too Many Requests", "busy"),
        (REFUSED, "passing"),
        ("dial tcp: lookup registry-1.docker.io on 10.0.0.2:53: no such host", "passing"),
        ("net/http: request canceled while waiting for connection (Client.Timeout exceeded)", "passing"),
        ("net/http: TLS handshake timeout", "passing"),
        ("received unexpected HTTP status: 503 Service Unavailable", "passing"),
        ("error pulling image configuration: download failed after attempts=6: unexpected EOF", "passing"),
        ("write /var/lib/docker/tmp/GetImageBlob1: no space left on device", "full"),
        (UNKNOWN, "lasting"),
        ("reading manifest 500 in localhost:5000/x: manifest unknown", "lasting"),
        ("pull access denied for nothere, repository does not exist or may require 'docker login'", "lasting"),
        ("unauthorized: authentication required", "lasting"),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries", "lasting"),
        ("no image found in manifest list for architecture arm64", "lasting"),
        ("something that nobody has heard of", "lasting"),
        ("", "lasting"),
    ],
)  # fmt: skip
def test_what_registries_say_is_understood(words: str, trouble: str) -> None:
    assert trouble_of(words) == trouble


@pytest.mark.parametrize(
    ("image", "full"),
    [
        ("debian", "docker.io/library/debian:latest"),
        ("debian:12", DEBIAN),
        ("docker.io/debian:12", DEBIAN),
        ("index.docker.io/library/debian:12", DEBIAN),
        ("swebench/eval:v1", "docker.io/swebench/eval:v1"),
        ("localhost/x:1", "localhost/x:1"),
        ("host:5000/x", "host:5000/x:latest"),
        ("ghcr.io/a/b/c:1@sha256:" + "a" * 64, "ghcr.io/a/b/c@sha256:" + "a" * 64),
    ],
)
def test_an_image_has_one_full_name(image: str, full: str) -> None:
    assert full_name(image) == full
    assert full_name(full) == full


def test_the_longest_prefix_of_a_mirror_counts_and_only_at_whole_parts() -> None:
    mirrors = {"docker.io": "cache:5000/hub/", "docker.io/swebench": "near.corp/swe", "ghcr": "wrong"}
    assert mirrored("docker.io/library/debian:12", mirrors) == "cache:5000/hub/library/debian:12"
    assert mirrored("docker.io/swebench/x:1", mirrors) == "near.corp/swe/x:1"
    assert mirrored("docker.io/swebenchmark/x:1", mirrors) == "cache:5000/hub/swebenchmark/x:1"
    assert mirrored("ghcr.io/x:1", mirrors) == "ghcr.io/x:1"


async def test_however_many_wait_an_image_is_pulled_once_under_all_its_names() -> None:
    may_end = asyncio.Event()
    store, clock = ScriptedStore(may_end=may_end), Clock()
    found = pulls(clock)
    names = ["debian:12", "docker.io/library/debian:12", "docker.io/debian:12"]
    waiters = [asyncio.create_task(found.ready("docker", store, names[number % 3])) for number in range(50)]
    await until(lambda: store.pulled)
    await until(lambda: found.waiting() == {DEBIAN: 50})
    may_end.set()
    assert {one.digest for one in await asyncio.gather(*waiters)} == {held(DEBIAN).digest}
    assert (store.pulled, found.waiting()) == ([DEBIAN], {})
    assert (found.counts.num_pulled, found.counts.num_bytes) == (1, 100)


async def test_an_image_that_is_there_is_not_pulled() -> None:
    store = ScriptedStore(own=["debian:12"])
    assert await pulls(Clock()).ready("docker", store, "debian:12") == held("debian:12")
    assert store.pulled == []


async def test_always_asks_the_registry_again_but_not_for_sessions_that_come_together() -> None:
    store, clock = ScriptedStore(own=[DEBIAN]), Clock()
    found = pulls(clock)
    store.version = 2
    for _ in range(5):
        assert await found.ready("docker", store, DEBIAN, "always") == held(DEBIAN, 2)
    assert store.pulled == [DEBIAN]
    clock.now += 60
    store.version = 3
    assert await found.ready("docker", store, DEBIAN, "always") == held(DEBIAN, 3)


async def test_never_says_what_is_missing() -> None:
    store = ScriptedStore()
    with pytest.raises(ImageMissing, match=r"'debian:12' is not on this machine"):
        await pulls(Clock()).ready("docker", store, "debian:12", "never")
    assert store.pulled == []


@pytest.mark.parametrize("image", ["localhost/built-here:1", "sha256:" + "a" * 64, "gangline/env:abc"])
async def test_what_no_registry_can_have_is_not_asked_for(image: str) -> None:
    store = ScriptedStore()
    with pytest.raises(PullFailed, match="no registry has it"):
        await pulls(Clock()).ready("docker", store, image)
    assert store.pulled == []


async def test_no_more_pulls_at_once_than_the_operator_wants() -> None:
    may_end = asyncio.Event()
    store = ScriptedStore(may_end=may_end)
    found = pulls(Clock(), at_once=3)
    waiters = [asyncio.create_task(found.ready("docker", store, f"x/i{number}:1")) for number in range(20)]
    await until(lambda: store.num_now == 3)
    may_end.set()
    await asyncio.gather(*waiters)
    assert (store.most_at_once, len(store.pulled)) == (3, 20)


async def test_a_pull_goes_on_for_those_who_still_wait_and_ends_with_the_last() -> None:
    may_end = asyncio.Event()
    store = ScriptedStore(may_end=may_end)
    found = pulls(Clock())
    first, second = (asyncio.create_task(found.ready("docker", store, DEBIAN)) for _ in range(2))
    await until(lambda: store.num_now == 1)
    first.cancel()
    await asyncio.wait({first})
    assert (store.num_now, found.waiting()) == (1, {DEBIAN: 1})
    second.cancel()
    await asyncio.wait({second})
    await until(lambda: store.num_now == 0)
    third = asyncio.create_task(found.ready("docker", store, DEBIAN))
    await until(lambda: store.num_now == 1)
    may_end.set()
    assert await third == held(DEBIAN)
    assert len(store.pulled) == 2, "one that was given up is begun anew"


async def test_passing_faults_are_tried_again_and_nobody_notices() -> None:
    store, clock = ScriptedStore(words=[REFUSED, "unexpected EOF", REFUSED]), Clock()
    assert await pulls(clock).ready("docker", store, DEBIAN) == held(DEBIAN)
    assert len(store.pulled) == 4
    assert clock.pauses == sorted(clock.pauses)


async def test_a_busy_registry_is_left_alone_by_all_pulls_and_other_registries_are_not() -> None:
    store, clock = ScriptedStore(words=[BUSY]), Clock()
    found = pulls(clock, at_once=1)
    await asyncio.gather(*(found.ready("docker", store, name) for name in (DEBIAN, "quay.io/x:1", "alpine:3")))
    assert store.pulled.index("quay.io/x:1") == 1, "it does not wait"
    assert store.pulled.count(DEBIAN) == 2
    assert clock.now >= 10


async def test_a_missing_image_is_told_in_the_registrys_words_and_not_asked_for_again_at_once() -> None:
    store, clock = ScriptedStore(words=[UNKNOWN] * 2), Clock()
    found = pulls(clock)
    for _ in range(3):
        with pytest.raises(PullFailed, match=r"image 'debian:429' could not be pulled: .*manifest unknown") as caught:
            await found.ready("docker", store, "debian:429")
        assert not isinstance(caught.value, PullPostponed)
        assert caught.value.failure().retryable
    assert len(store.pulled) == 1
    assert "manifest unknown" in found.refused()["docker"]["docker.io/library/debian:429"]
    store.images["debian:429"] = store.known["debian:429", 1] = held("debian:429")
    assert await found.ready("docker", store, "debian:429") == held("debian:429"), "somebody else brought it"
    assert await store.remove_image("debian:429")
    clock.now += 120
    assert found.refused() == {}
    with pytest.raises(PullFailed):
        await found.ready("docker", store, "debian:429")
    found.forget("docker", "debian:429")
    assert await found.ready("docker", store, "debian:429") == held("docker.io/library/debian:429")


async def test_a_registry_that_stays_away_is_not_the_images_fault() -> None:
    store = ScriptedStore(words=[REFUSED] * 99)
    with pytest.raises(PullPostponed, match="connection refused"):
        await pulls(Clock()).ready("docker", store, DEBIAN)
    assert 3 < len(store.pulled) < 10


async def test_a_full_disk_is_cleared_if_something_can_go() -> None:
    full = "write /x: no space left on device"
    store, clock = ScriptedStore(words=[full, full]), Clock()
    found = pulls(clock)
    answers = [True, True]

    async def make_room() -> bool:
        return answers.pop()

    found.make_room = make_room
    assert await found.ready("docker", store, DEBIAN) == held(DEBIAN)
    assert answers == []
    with pytest.raises(PullFailed, match="no space left"):
        await pulls(Clock()).ready("docker", ScriptedStore(words=[full]), DEBIAN)


async def test_the_mirror_is_asked_and_its_image_is_found_next_time() -> None:
    store, clock = ScriptedStore(), Clock()
    found = pulls(clock, mirrors={"docker.io": "cache:5000/hub"})
    for _ in range(2):
        assert await found.ready("docker", store, "debian:12") == held("cache:5000/hub/library/debian:12")
        clock.now += 60
    assert store.pulled == ["cache:5000/hub/library/debian:12"]


def test_what_came_from_a_mirror_is_told_by_the_names_that_tasks_use() -> None:
    found = pulls(Clock(), mirrors={"docker.io": "cache:5000/hub", "ghcr.io/team": "near.corp/team/"})
    listed = {"cache:5000/hub/library/debian:12", "near.corp/team/x:1", "near.corp/teams/y:1", "0123456789ab"}
    assert found.with_mirrored(listed) == {*listed, "debian:12", "ghcr.io/team/x:1"}


async def test_a_close_ends_pulls_and_tells_their_waiters() -> None:
    store = ScriptedStore(may_end=asyncio.Event())
    found = pulls(Clock())
    waiter = asyncio.create_task(found.ready("docker", store, DEBIAN))
    await until(lambda: store.num_now == 1)
    await found.close()
    with pytest.raises(PullPostponed):
        await waiter
    assert store.num_now == 0


async def test_on_a_low_disk_pulls_end_and_none_begins() -> None:
    may_end = asyncio.Event()
    store, clock = ScriptedStore(own=["here:1"], may_end=may_end), Clock()
    found = pulls(clock)
    waiter = asyncio.create_task(found.ready("docker", store, DEBIAN))
    await until(lambda: store.num_now == 1)
    found.disk_changed(is_low=True)
    with pytest.raises(PullPostponed, match="disk is low"):
        await waiter
    assert store.num_now == 0
    with pytest.raises(PullPostponed, match="disk is low"):
        await found.ready("docker", store, "alpine:3")
    assert (await found.ready("docker", store, "here:1")).tags == ("here:1",)
    found.disk_changed(is_low=False)
    may_end.set()
    with pytest.raises(PullPostponed):
        await found.ready("docker", store, DEBIAN)
    clock.now += 120
    assert await found.ready("docker", store, DEBIAN) == held(DEBIAN)
