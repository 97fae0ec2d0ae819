"""Images from real registries by real engines: who pulls, what goes, and the words that failures are told by."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from containers.engines import IMAGE
from containers.registry import Registry, moody_registry, registry
from containers.test_container_images import derived_image, engine
from containers.test_container_sessions import run, service, task
from gangline.domain.errors import PullFailed, RuntimeFailed
from gangline.domain.image_names import located
from gangline.domain.image_store import ImageStore
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.images.cache import ImageCache
from gangline.sandbox.images.pulling import Pulls, trouble_of
from gangline.sandbox.images.supply import ImageSupply
from gangline.settings.plugins import make_runtime
from gangline.wire.client.server import ServerClient
from support.service.cli_process import processes_with, wait_for

__all__ = ["derived_image"]


@pytest.fixture(scope="module")
def served(container_runtime: str) -> Generator[Registry]:
    with registry(container_runtime) as started:
        yield started


@pytest.fixture(scope="module")
def moody(container_runtime: str) -> Generator[Registry]:
    with moody_registry(container_runtime) as started:
        yield started


def store_of(name: str) -> ImageStore:
    store = make_runtime(name).image_store
    assert store is not None
    return store


def pushed(runtime: str, served: Registry, folder: Path, name: str) -> str:
    """A small image in the registry, and no more in the engine."""
    (folder / name).write_text(name)
    archive = folder / f"{name}.tar"
    subprocess.run(["tar", "-C", folder, "-cf", archive, name], check=True)
    image = f"{served.address}/{name}:1"
    engine(runtime, "import", str(archive), image)
    engine(runtime, "push", image)
    engine(runtime, "rmi", image)
    return image


async def test_a_hundred_who_wait_cost_one_pull_and_have_the_registrys_digest(
    container_runtime: str, served: Registry, tmp_path: Path
) -> None:
    image = await asyncio.to_thread(pushed, container_runtime, served, tmp_path, "crowd")
    store, pulls = store_of(container_runtime), Pulls()
    assert await store.find(image) is None
    found = await asyncio.gather(*(pulls.ready(container_runtime, store, image) for _ in range(100)))
    assert len(set(found)) == 1
    held = found[0]
    assert held.size_bytes > 0
    assert held.tags == (image,)
    layers = served.layers_sent("crowd")
    assert len(layers) == len(set(layers)) > 0, "each blob once"
    for name in (image, held.image_id, f"{served.address}/crowd@{held.digest}"):
        again = await store.find(name)
        assert again is not None
        assert (again.image_id, again.digest) == (held.image_id, held.digest)
    assert located(image)[1] in (await make_runtime(container_runtime).images())[""]
    assert await store.remove_image(image)
    by_digest = await pulls.ready(container_runtime, store, f"{served.address}/crowd@{held.digest}")
    assert (by_digest.image_id, by_digest.digest) == (held.image_id, held.digest)


async def test_layers_that_images_share_have_one_name(container_runtime: str, derived_image: str) -> None:
    store = store_of(container_runtime)
    base, derived, held = await store.layers(IMAGE), await store.layers(derived_image), await store.find(IMAGE)
    assert held is not None
    assert base.items() < derived.items()
    # Once a container of it has run, rootless podman keeps and counts a copy of the top layer with the user's ids.
    copied = [*base.values()][-1]
    sizes = [held.size_bytes, held.size_bytes - copied]
    assert any(sum(base.values()) == pytest.approx(size, rel=0.05) for size in sizes)


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        *(("busy", "busy"), ("gone", "lasting"), ("denied", "lasting"), ("closed", "lasting")),
        *(("broken", "passing"), ("away", "passing"), ("cut", "passing")),
    ],
)
async def test_the_words_of_an_engine_are_understood(
    container_runtime: str, moody: Registry, kind: str, trouble: str
) -> None:
    with pytest.raises(RuntimeFailed) as caught:
        await store_of(container_runtime).pull(f"{moody.address}/{kind}:1")
    assert trouble_of(caught.value.message) == trouble, caught.value.message


async def test_a_missing_image_and_a_registry_that_is_away_differ(
    container_runtime: str, served: Registry, tmp_path: Path
) -> None:
    image = await asyncio.to_thread(pushed, container_runtime, served, tmp_path, "outage")
    store = store_of(container_runtime)
    for missing in (f"{served.address}/outage:429", f"{served.address}/nobody:1"):
        with pytest.raises(PullFailed, match=r"(?s)could not be pulled: .*(unknown|not found)") as caught:
            await Pulls().ready(container_runtime, store, missing)
        assert caught.value.code == "pull_failed"
    served.stop()
    with pytest.raises(RuntimeFailed) as refused:
        await store.pull(image)
    assert trouble_of(refused.value.message) == "passing", refused.value.message
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            await asyncio.to_thread(served.start)

    held = await Pulls(pause=pause).ready(container_runtime, store, image)
    assert (len(pauses), held.tags) == (2, (image,))


async def test_a_pull_that_nobody_waits_for_any_more_ends(container_runtime: str, moody: Registry) -> None:
    store, pulls = store_of(container_runtime), Pulls()
    image = f"{moody.address}/slow:1"
    first, second = (asyncio.create_task(pulls.ready(container_runtime, store, image)) for _ in range(2))
    await asyncio.to_thread(wait_for, lambda: moody.num_asked("slow"))
    first.cancel()
    await asyncio.wait({first})
    assert processes_with(image)
    second.cancel()
    await asyncio.wait({second})
    await asyncio.to_thread(wait_for, lambda: not processes_with(image))
    ending = asyncio.all_tasks() - {asyncio.current_task()}
    assert not ending or not (await asyncio.wait(ending, timeout=60))[1], "its pull is still being ended"


async def test_only_what_was_pulled_goes_and_nothing_that_a_container_has(
    container_runtime: str, served: Registry, tmp_path: Path
) -> None:
    names = ["mine", "busy", "tagged", "old", "new"]
    images = {name: await asyncio.to_thread(pushed, container_runtime, served, tmp_path, name) for name in names}
    store = store_of(container_runtime)
    await store.pull(images["mine"])
    supply = ImageSupply(Pulls(), cache=ImageCache(tmp_path / "images.json", max_bytes=1))
    for name in names:
        await supply.bring(name, [RuntimeSpec(backend=container_runtime, image=images[name])])
    container = engine(container_runtime, "create", images["busy"], "true").strip()
    engine(container_runtime, "tag", images["tagged"], "localhost/gangline-test-kept:1")
    for name in ("mine", "busy", "tagged", "old"):
        supply.release(name)
    keeping = asyncio.create_task(supply.keep_bound())
    try:
        async with asyncio.timeout(60):
            while await store.find(images["old"]) is not None:
                await asyncio.sleep(0.05)
        for kept in (images["mine"], images["busy"], images["new"], "localhost/gangline-test-kept:1"):
            assert await store.find(kept) is not None, kept
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})
        engine(container_runtime, "rm", container)
        for image in (images["mine"], images["busy"], images["new"], "localhost/gangline-test-kept:1"):
            engine(container_runtime, "rmi", image)


async def test_sessions_go_through_a_small_cache_and_an_outage_and_none_is_lost(
    container_runtime: str, served: Registry, tmp_path: Path
) -> None:
    """Six images over one base, of which the cache holds two, and a registry that is away for a while."""
    images: list[str] = []
    for number in range(6):
        image = f"{served.address}/many{number}:1"
        fill = f"head -c 2000000 /dev/urandom > /{number}"
        engine(container_runtime, "run", "--network", "none", "--name", "gangline-test-many", IMAGE, "sh", "-c", fill)
        engine(container_runtime, "commit", "gangline-test-many", image)
        engine(container_runtime, "rm", "gangline-test-many")
        engine(container_runtime, "push", image)
        images.append(image)
    engine(container_runtime, "rmi", *images)
    size = sum((await store_of(container_runtime).layers(IMAGE)).values())
    up = service(tmp_path, "--image-cache-gb", f"{(size + 5_000_000) / 1e9:.6f}", "--pulls-at-once", "2")
    try:
        assert up.ready(), "the service did not start"
        running = up.running()
        async with ServerClient(running["server_url"], running["control_token"]) as client:
            submitted = [await client.submit(_many(container_runtime, image)) for image in images]
            await asyncio.to_thread(wait_for, lambda: served.layers_sent("many0"))
            served.stop()
            await asyncio.sleep(5.0)  # an outage, not a wait
            served.start()
            for one in submitted:
                await client.wait(one.task_id, timeout_s=400)
            results = [result for one in submitted for result in await client.result(one.task_id)]
            async with asyncio.timeout(120):  # what no session uses any more goes after it
                while len(await _held(container_runtime, images)) > 3:
                    await asyncio.sleep(0.5)
    finally:
        up.close()
    assert [(result.outcome, result.attempt) for result in results] == [("completed", 1)] * 12
    assert len({digest for result in results for digest in result.images.values()}) == 6
    sent = Counter(layer for number in range(6) for layer in served.layers_sent(f"many{number}"))
    assert max(sent.values()) <= 3, "a layer comes again only after its last image went, or the registry was away"
    kept = await _held(container_runtime, images)
    assert 1 <= len(kept) <= 3
    engine(container_runtime, "rmi", *kept)


async def _held(name: str, images: list[str]) -> list[str]:
    return [image for image in images if await store_of(name).find(image) is not None]


def _many(name: str, image: str) -> dict[str, Any]:
    agent = {"harness": "shell", "settings": {"command": "test -e /usr"}, "allow_no_model_call": True}
    runtime = {"backend": name, "image": image, "network": "none"}
    return {"instruction": "x", "num_samples": 2, "max_attempts": 1, "runtime": runtime, "agent": agent}


async def test_a_session_brings_its_image_and_records_which_it_was(
    container_runtime: str, served: Registry, tmp_path: Path
) -> None:
    image = f"{served.address}/base:1"
    engine(container_runtime, "tag", IMAGE, image)
    engine(container_runtime, "push", image)
    engine(container_runtime, "rmi", image)
    request: dict[str, Any] = task(container_runtime, "python3 agent.py", num_samples=3)
    request["runtime"]["image"] = image
    up = service(tmp_path)
    try:
        results = await run(up, request)
        held = await store_of(container_runtime).find(image)
    finally:
        up.close()
        engine(container_runtime, "rmi", image)
    assert [(result.outcome, result.reward, result.failure) for result in results] == [("completed", 1.0, None)] * 3
    assert held is not None
    assert [result.images for result in results] == [{image: held.digest}] * 3
    assert engine(container_runtime, "ps", "--all", "--quiet") == ""
