"""Images as roots of the runtime `sandbox`: pulled by skopeo and unpacked by umoci, without an engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from containers.base_image import write_root
from containers.engines import installed
from containers.registry import Registry, moody_registry, registry
from containers.test_container_sessions import run, task
from gangline.cli.machine.prefetch import prefetch
from gangline.domain.errors import ImageMissing, InvalidRequest, PullFailed, RuntimeFailed, RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Checkpoint, RuntimeStart, Sandbox
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.sandbox.images import unpacked
from gangline.sandbox.images.cache import ImageCache
from gangline.sandbox.images.pulling import Pulls, trouble_of
from gangline.sandbox.images.supply import ImageSupply
from gangline.sandbox.images.unpacked import UnpackedImages
from gangline.testing.adoption_conformance import AdoptionCheck, adoption_checks, run_adoption_check
from gangline.testing.runtime_conformance import Check, checks, run_check
from support.oci_images import Form, Member, file, folder, layer, link, node, pushed
from support.requirements import need
from support.service.cli_process import UpProcess, processes_with, wait_for

CONFIG = {
    "Env": ["PATH=/opt/image/bin:/usr/bin:/bin", "FROM_IMAGE=1", "GANGLINE_RUNTIME=a/b/c", "HOME=/root"],
    "WorkingDir": "/testbed",
    "Entrypoint": ["/bin/sh", "-c", "echo ran > /tmp/ran"],
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A layer with a small Debian."""
    given = os.environ.get("GANGLINE_TEST_BASE")
    archive = Path(given) if given else tmp_path_factory.mktemp("base") / "base.tar"
    if not given:
        need(installed("dpkg-query"), "dpkg-query makes what is tested")
        write_root(archive)
    return archive.read_bytes()


@pytest.fixture(scope="module")
def served() -> Generator[Registry]:
    need(installed("skopeo", "umoci", "bwrap"), "apt-get install -y skopeo umoci bubblewrap")
    with registry("sandbox") as started:
        yield started


@pytest.fixture(scope="module")
def moody() -> Generator[Registry]:
    need(installed("skopeo", "umoci", "bwrap"), "apt-get install -y skopeo umoci bubblewrap")
    with moody_registry("sandbox") as started:
        yield started


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UnpackedImages:
    """An empty one, the runtime's own."""
    monkeypatch.setenv("GANGLINE_CACHE", str(tmp_path / "cache"))
    found = BubblewrapRuntime().image_store
    assert found is not None
    return found


class Maker:
    """Images of one test in the registry."""

    def __init__(self, served: Registry, folder: Path) -> None:
        self._served = served
        self._folder = folder

    async def __call__(self, name: str, *layers: bytes, tag: str = "1", config: dict[str, Any] | None = None) -> str:
        image = f"{self._served.address}/{name}:{tag}"
        return await asyncio.to_thread(pushed, image, self._folder / new_id("layout"), layers, config)


@pytest.fixture
def make(served: Registry, tmp_path: Path) -> Maker:
    return Maker(served, tmp_path)


def small(*members: Member) -> bytes:
    return layer([folder("usr"), *members])


@asynccontextmanager
async def started(root: Path, image: str, *, base: Checkpoint | None = None, **changes: Any) -> AsyncGenerator[Sandbox]:
    spec = RuntimeSpec(backend="sandbox", image=image, network="none", **changes)
    runtime_id = new_id("runtime")
    start = RuntimeStart(runtime_id=runtime_id, owner="me", spec=spec, folder=root / runtime_id, base=base)
    sandbox = await BubblewrapRuntime().start(start)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def said(sandbox: Sandbox, command: str | Sequence[str]) -> str:
    result = await sandbox.exec(command)
    assert result.ok, result.stderr
    return result.stdout.decode()


# -- pulls --------------------------------------------------------------------------------------------------------


async def test_a_hundred_who_wait_cost_one_pull_and_layers_are_shared(
    store: UnpackedImages, served: Registry, make: Maker
) -> None:
    below = small(file("usr/below", "b" * 5000))
    image = await make("crowd", below, small(file("usr/a", "a")))
    other = await make("other", below, small(file("usr/a", "another")))
    assert await store.find(image) is None
    pulls = Pulls()
    found = await asyncio.gather(*(pulls.ready("sandbox", store, image) for _ in range(100)))
    assert len(set(found)) == 1
    held = found[0]
    assert held.tags == (image,)
    assert len(served.layers_sent("crowd")) == len(set(served.layers_sent("crowd"))) == 3, "two layers, configuration"
    for name in (image, held.image_id, f"{served.address}/crowd@{held.digest}"):
        again = await store.find(name)
        assert again is not None
        assert (again.image_id, again.digest) == (held.image_id, held.digest)
    await pulls.ready("sandbox", store, other)
    assert len(served.layers_sent("other")) == 2, "its own layer, configuration"
    mine, theirs = await store.layers(image), await store.layers(other)
    assert len(mine.keys() & theirs.keys()) == 1
    assert held.size_bytes == sum(mine.values()) >= 5000
    assert {f"{served.address}/crowd:1", held.image_id[:12]} <= set((await BubblewrapRuntime().images())[""])


@pytest.mark.parametrize("form", ["docker", "zstd"])
async def test_images_of_other_forms_arrive(
    store: UnpackedImages, served: Registry, tmp_path: Path, form: Form
) -> None:
    need(form != "zstd" or installed("zstd"), "apt-get install -y zstd")
    image = f"{served.address}/form-{form}:1"
    layers = [small(file("usr/x", "below")), small(file("usr/x", form))]
    await asyncio.to_thread(pushed, image, tmp_path / "layout", layers, CONFIG, form=form)
    await store.pull(image)
    with store.used(image) as (root, described):
        assert (root / "usr" / "x").read_text() == form
        assert described.env == {"PATH": "/opt/image/bin:/usr/bin:/bin", "FROM_IMAGE": "1", "HOME": "/root"}
        assert described.names.keys() == {image, f"{served.address}/form-{form}@{described.names[image]}"}
        assert await store.find(f"{served.address}/form-{form}@{described.names[image]}") is not None


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        *(("busy", "busy"), ("gone", "lasting"), ("denied", "lasting"), ("closed", "lasting")),
        *(("broken", "passing"), ("away", "passing"), ("cut", "passing")),
    ],
)
async def test_the_words_of_skopeo_are_understood(
    store: UnpackedImages, moody: Registry, kind: str, trouble: str
) -> None:
    with pytest.raises(RuntimeFailed) as caught:
        await store.pull(f"{moody.address}/{kind}:1")
    assert trouble_of(caught.value.message) == trouble, caught.value.message
    assert "level=" not in caught.value.message, "its words, without its log's form"


async def test_a_missing_image_and_a_registry_that_is_away_differ(
    store: UnpackedImages, served: Registry, make: Maker
) -> None:
    image = await make("outage", small())
    for missing in (f"{served.address}/outage:429", f"{served.address}/nobody:1"):
        with pytest.raises(PullFailed, match=r"could not be pulled: .*unknown") as caught:
            await Pulls().ready("sandbox", store, missing)
        assert caught.value.code == "pull_failed"
    served.stop()
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            await asyncio.to_thread(served.start)

    held = await Pulls(pause=pause).ready("sandbox", store, image)
    assert (len(pauses), held.tags) == (2, (image,))


async def test_a_pull_that_nobody_waits_for_any_more_ends(store: UnpackedImages, moody: Registry) -> None:
    image = f"{moody.address}/slow:1"
    waiting = asyncio.create_task(Pulls().ready("sandbox", store, image))
    await asyncio.to_thread(wait_for, lambda: moody.num_asked("slow"))
    assert processes_with(image)
    waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.to_thread(wait_for, lambda: not processes_with(image))


async def test_a_tag_that_moves_changes_no_running_sandbox(store: UnpackedImages, make: Maker, tmp_path: Path) -> None:
    image = await make("moves", small(folder("testbed"), file("testbed/version", "old")))
    old = await Pulls().ready("sandbox", store, image)
    with store.used(old.image_id) as (root, _):
        assert await make("moves", small(folder("testbed"), file("testbed/version", "new"))) == image
        assert await Pulls().ready("sandbox", store, image) == old, "the policy says: if missing"
        new = await Pulls().ready("sandbox", store, image, "always")
        assert new.image_id != old.image_id
        moved = await store.find(old.image_id)
        assert moved is not None
        assert moved.tags == ()
        assert (root / "testbed" / "version").read_text() == "old"


async def test_only_what_nobody_uses_goes_and_shared_layers_stay(
    store: UnpackedImages, served: Registry, make: Maker, tmp_path: Path
) -> None:
    below = small(file("usr/below", "below"))
    names = ["operators", "used", "old", "new"]
    images = {name: await make(f"cache-{name}", below, small(file("usr/own", name))) for name in names}
    await store.pull(images["operators"])
    supply = ImageSupply(Pulls(), cache=ImageCache(tmp_path / "images.json", max_bytes=1))
    for name in names:
        await supply.bring(name, [RuntimeSpec(backend="sandbox", image=images[name])])
    for name in names[:-1]:
        supply.release(name)
    with store.used(images["used"]):  # by a sandbox of another node of this machine
        keeping = asyncio.create_task(supply.keep_bound())
        try:
            async with asyncio.timeout(60):
                while await store.find(images["old"]) is not None:
                    await asyncio.sleep(0.05)
        finally:
            keeping.cancel()
            await asyncio.wait({keeping})
        assert await store.find(images["used"]) is not None
    for name in ("operators", "new"):
        assert await store.find(images[name]) is not None, name
    with pytest.raises(ImageMissing), store.used(images["old"]):
        pass
    before = len(served.layers_sent("cache-old"))
    await store.pull(images["old"])
    assert len(served.layers_sent("cache-old")) == before + 2, "its own layer and configuration, not the shared layer"
    for image in images.values():
        assert await store.remove_image(image)
    kept = tmp_path / "cache" / "unpacked"
    assert [*(kept / "roots").iterdir(), *(kept / "blobs" / "sha256").iterdir(), *(kept / "work").iterdir()] == []


async def test_what_a_killed_node_left_is_removed_and_what_another_pulls_is_not(
    store: UnpackedImages, make: Maker, tmp_path: Path
) -> None:
    image = await make("crash", small(file("usr/x", "x")))
    kept = tmp_path / "cache" / "unpacked"
    await store.pull(image)
    held = await store.find(image)
    assert held is not None
    (kept / "images.json").unlink()  # a crash between the root and the list
    (kept / "work" / "left" / "unpacked").mkdir(parents=True)
    assert await store.find(image) is None
    await store.pull(image)
    assert await store.find(image) == held
    assert list((kept / "work").iterdir()) == []
    images = [await make(f"at-once{at}", small()) for at in range(4)]
    await asyncio.gather(*(UnpackedImages(kept).pull(one) for one in images))
    found = [await store.find(one) for one in images]
    assert len({one.image_id for one in found if one is not None}) == 1
    assert None not in found
    assert len(await store.image_ids()) == 2


def test_the_images_of_a_task_file_are_prefetched(store: UnpackedImages, make: Maker, tmp_path: Path) -> None:
    image = asyncio.run(make("prefetched", small(file("usr/x", "x"))))
    runtimes = [{"backend": "sandbox", "image": name} for name in (image, f"{image}-missing", str(tmp_path))]
    lines = [json.dumps({"instruction": "x", "runtime": runtime}) for runtime in runtimes]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    app = typer.Typer()
    app.command()(prefetch)
    ran = CliRunner().invoke(app, [str(tmp_path / "tasks.jsonl"), "--local", "--json"])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), repr(ran.exception)
    found = {one["image"]: one for one in json.loads(ran.stdout)}
    assert (ran.exit_code, len(found)) == (1, 2), "a path is not pulled"
    held = asyncio.run(store.find(image))
    assert held is not None
    assert (found[image]["digest"], found[image]["size_bytes"]) == (held.digest, held.size_bytes)
    assert "manifest unknown" in found[f"{image}-missing"]["error"]


# -- sandboxes ----------------------------------------------------------------------------------------------------


async def test_a_sandbox_has_the_images_root_and_the_content_of_its_folders(
    store: UnpackedImages, make: Maker, base: bytes, tmp_path: Path
) -> None:
    content = [
        *(folder("testbed"), file("testbed/a.py", "one", owner=1000), folder("testbed/.git", mode=0o700)),
        *(file("testbed/.git/HEAD", "two", mode=0o400), link("testbed/b.py", "testbed/a.py", hard=True)),
        *(folder("data"), file("data/x", "x"), link("linked", "/usr/../data"), folder("usr/src/app")),
        *(file("usr/src/app/main", "m"), file("etc/resolv.conf", "nameserver 1.2.3.4\n"), node("fifo", b"6")),
    ]
    image = await make("whole", base, layer(content), config=CONFIG)
    await store.pull(image)
    folders = ("/linked", "/usr/src/app", "/usr/src/missing", "/absent/deep")
    async with started(tmp_path / "boxes", image, workdir="/testbed", folders=folders) as sandbox:
        assert await said(sandbox, ["ls", "-A", "/tmp"]) == "", "its entry point did not run"
        assert (await said(sandbox, "id -un; pwd; echo $FROM_IMAGE $HOME $GANGLINE_RUNTIME")).split() == [
            *("agent", "/testbed", "1", "/home/agent")
        ]
        assert (await said(sandbox, "echo $PATH")).startswith("/opt/image/bin:/usr/bin:/bin")
        assert await said(sandbox, "cat a.py .git/HEAD b.py /linked/x /data/x /usr/src/app/main") == "onetwoonexxm"
        assert await said(sandbox, "stat -c %U:%a . a.py .git .git/HEAD /linked/x /usr/src/app/main") == (
            "agent:755\nagent:644\nagent:700\nagent:400\nagent:644\nagent:644\n"
        )
        await said(sandbox, "echo changed > a.py; touch .git/new /linked/y /usr/src/missing/z /absent/deep/z")
        assert await said(sandbox, "cat b.py") == "changed\n", "hard links stay"
        for closed in ("/data/x", "/usr/bin/new", "/new", "/etc/new"):
            assert not (await sandbox.exec(f"touch {closed}")).ok, closed
        assert await said(sandbox, "cat /etc/hosts | head -n 1; getent passwd agent | cut -d: -f6") == (
            "127.0.0.1 localhost gangline\n/home/agent\n"
        )
        assert await sandbox.download("/testbed/a.py") == b"changed\n"
        kept = await sandbox.checkpoint("changed")
        await sandbox.reset()
        assert await said(sandbox, "cat a.py; ls /linked") == "onex\n"
        await sandbox.reset(kept)
        assert await said(sandbox, "cat a.py; ls /linked") == "changed\nx\ny\n"
        await sandbox.kill()
        assert await said(sandbox, "cat a.py /data/x") == "changed\nx"
        async with started(tmp_path / "boxes", image, workdir="/testbed", folders=folders, base=kept) as fork:
            await said(fork, "rm .git/HEAD")
            assert await said(fork, "cat a.py; ls -A .git") == "changed\nnew\n"
            await fork.reset()
            assert await said(fork, "ls -A .git") == "HEAD\nnew\n"
        assert not await store.remove_image(image), "a sandbox uses it"
    await BubblewrapRuntime().release(kept)
    assert await store.remove_image(image)


async def test_without_its_programs_nothing_is_pulled_and_the_remedy_is_told(
    store: UnpackedImages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(unpacked, "PATH", str(tmp_path))
    assert BubblewrapRuntime().image_store is None
    assert (await BubblewrapRuntime().images())[""] == set()
    with pytest.raises(RuntimeUnavailable, match="apt-get install -y skopeo umoci"):
        await store.pull("debian:12")
    with pytest.raises(ImageMissing, match="apt-get install -y skopeo umoci"):
        async with started(tmp_path / "boxes", "debian:12"):
            pass
    with pytest.raises(InvalidRequest, match="the name of an image"):
        BubblewrapRuntime.check_spec(RuntimeSpec(backend="sandbox", image="oci:/etc"))


@pytest.fixture(scope="module")
def in_image(served: Registry, base: bytes, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The id of an image that is here."""
    folder = tmp_path_factory.mktemp("in-image")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_CACHE", str(folder / "cache"))
        image = pushed(f"{served.address}/contract:1", folder / "layout", [base], CONFIG)
        images = UnpackedImages(folder / "cache" / "unpacked")
        asyncio.run(images.pull(image))
        (image_id,) = images.held()
        yield image_id


@pytest.mark.parametrize("check", checks(isolated=True), ids=lambda check: check.__name__)
async def test_a_sandbox_in_an_image_keeps_the_contract(in_image: str, check: Check, tmp_path: Path) -> None:
    await run_check(check, BubblewrapRuntime(), tmp_path, isolated=True, image=in_image)


@pytest.mark.parametrize("check", adoption_checks(), ids=lambda check: check.__name__)
async def test_a_sandbox_in_an_image_outlives_its_node(in_image: str, check: AdoptionCheck, tmp_path: Path) -> None:
    await run_adoption_check(check, "sandbox", tmp_path, image=in_image)


async def test_an_image_without_any_program_starts(store: UnpackedImages, make: Maker, tmp_path: Path) -> None:
    image = await make("empty", small(file("testbed/x", "x")))
    await store.pull(image)
    async with started(tmp_path / "boxes", image, workdir="/testbed") as sandbox:
        assert await sandbox.download("/testbed/x") == b"x"
        assert (await sandbox.exec("true")).exit_code == 127


async def test_content_beyond_the_sandboxs_limit_is_refused(store: UnpackedImages, make: Maker, tmp_path: Path) -> None:
    image = await make("large", small(*(file(f"testbed/{at}", os.urandom(30_000)) for at in range(3))))
    await store.pull(image)
    with pytest.raises(RuntimeFailed, match="folders in the image would have more than 40000 bytes"):
        async with started(tmp_path / "boxes", image, workdir="/testbed", limits=LimitsSpec(disk_bytes=40_000)):
            pass
    assert list((tmp_path / "boxes").iterdir()) == []


async def test_a_session_brings_its_image_and_records_which_it_was(
    served: Registry, make: Maker, base: bytes, tmp_path: Path
) -> None:
    need(installed("skopeo", "umoci"), "apt-get install -y skopeo umoci")
    image = await make("session", base, config=CONFIG)
    request: dict[str, Any] = task("sandbox", "python3 agent.py", num_samples=3)
    request["runtime"]["image"] = image
    env = {
        "GANGLINE_CACHE": str(tmp_path / "cache"),
        "CONTAINERS_REGISTRIES_CONF": os.environ["CONTAINERS_REGISTRIES_CONF"],
    }
    up = UpProcess(tmp_path, env=env)
    try:
        results = await run(up, request)
    finally:
        up.close()
    assert [(result.outcome, result.reward, result.failure) for result in results] == [("completed", 1.0, None)] * 3
    held = await UnpackedImages(tmp_path / "cache" / "unpacked").find(image)
    assert held is not None
    assert [result.images for result in results] == [{image: held.digest}] * 3
    assert len(served.layers_sent("session")) == 2, "one pull: a layer and the configuration"
