"""What is Apptainer's own about its containers: images, overlays, loopback addresses, a root that is none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.apptainer.runtime import ApptainerRuntime
from gangline.sandbox.images.building import ImageBuilder
from gangline.sandbox.images.recipe import Recipe
from gangline.settings.machine import Settings

SETTINGS = Settings.from_environ()
IS_WHOLE_ROOT = "CapEff:\t000001ffffffffff" in Path("/proc/self/status").read_text()


@asynccontextmanager
async def _container(folder: Path, image: str | None = None, network: str = "none") -> AsyncGenerator[Sandbox]:
    runtime_id = new_id("container")
    spec = RuntimeSpec.model_validate({"backend": "apptainer", "image": image, "network": network})
    start = RuntimeStart(runtime_id=runtime_id, owner="owner", spec=spec, folder=folder / runtime_id, proxy_port=1)
    handle = await ApptainerRuntime(SETTINGS).start(start)
    try:
        yield handle
    finally:
        await handle.stop()


@pytest.fixture
def image() -> str:
    return os.environ["GANGLINE_TEST_IMAGE"]


async def test_check_starts_one() -> None:
    await ApptainerRuntime(SETTINGS).check()


async def test_containers_on_the_hosts_network_have_a_localhost_each(tmp_path: Path) -> None:
    serve = "import socket; print(*socket.create_server(('localhost', 7391)).getsockname())"
    async with _container(tmp_path, network="full") as one, _container(tmp_path, network="full") as two:
        held = asyncio.create_task(
            one.exec(["python3", "-c", f"{serve}; import time; open('ready', 'w'); time.sleep(1000)"])
        )
        while not (await one.exec("test -e ready")).ok:
            assert not held.done(), held.result()
        result = await two.exec(["python3", "-c", serve])
        assert result.ok, result
        assert result.stdout.decode().split() == [
            (await two.exec("echo $GANGLINE_LOOPBACK")).stdout.decode().strip(),
            "7391",
        ]
        held.cancel()


async def test_what_is_written_to_the_image_ends_with_the_container(tmp_path: Path, image: str) -> None:
    is_open = os.geteuid() != 0 or SETTINGS.apptainer_fakeroot
    async with _container(tmp_path, image) as handle:
        assert (await handle.exec("echo x > /usr/kept")).ok is is_open
        await handle.kill()
        assert (await handle.exec("cat /usr/kept")).ok is is_open, "kill keeps files"
    async with _container(tmp_path, image) as handle:
        assert not (await handle.exec("test -e /usr/kept")).ok


@pytest.mark.skipif(not SETTINGS.apptainer_fakeroot, reason="GANGLINE_APPTAINER_FAKEROOT is not set")
async def test_under_fakeroot_the_agent_is_root_of_its_container_alone(tmp_path: Path, image: str) -> None:
    async with _container(tmp_path, image) as handle:
        assert (await handle.exec("id -u")).stdout == b"0\n"
        assert (
            await handle.exec("touch mine && chown 33:33 mine && mkdir shut && chown 33:33 shut && chmod 700 shut")
        ).ok
        assert not (await handle.exec("test -w /proc/sys/kernel/core_pattern")).ok
    assert not list(tmp_path.iterdir()), "what belongs to a subordinate id is removed too"


async def test_an_image_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    for name in ("docker://debian:12", "/nowhere.sif"):
        with pytest.raises(InvalidRequest):
            async with _container(tmp_path, name):
                pass


async def test_nothing_is_left(tmp_path: Path, image: str) -> None:
    def mounts() -> list[str]:
        return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "apptainer" in line]

    before = mounts()
    async with _container(tmp_path, image) as handle:
        await handle.exec("sleep 1000 &")
    assert mounts() == before
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0 and not IS_WHOLE_ROOT, reason="apptainer builds as a root with all capabilities")
async def test_an_image_is_built_once_and_used(tmp_path: Path, image: str) -> None:
    definition = tmp_path / "own.def.j2"
    definition.write_text(
        "Bootstrap: {{ bootstrap }}\nFrom: {{ base }}\n\n%post\n    echo built > /opt/by-us\n    chmod 755 /opt\n\n"
        "%environment\n    export OF_IMAGE=yes\n    export PATH=/opt/own:$PATH\n"
    )
    builder = ImageBuilder(tmp_path / "images", apptainer=SETTINGS.apptainer, docker=SETTINGS.docker)
    recipe = Recipe(name="own", base=image, definition=definition)
    built = await asyncio.to_thread(builder.build, recipe)
    assert built.is_new
    assert not (await asyncio.to_thread(builder.build, recipe)).is_new
    async with _container(tmp_path, built.record.image) as handle:
        assert (await handle.exec("cat /opt/by-us; echo $OF_IMAGE")).stdout == b"built\nyes\n"
        assert (await handle.exec("echo $PATH")).stdout.startswith(b"/opt/own:")
    assert [record.image for record in await asyncio.to_thread(builder.prune, 0)] == [built.record.image]
