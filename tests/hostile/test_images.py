"""Hostile images harm only their own session: in the sandbox, which unpacks them itself, and in docker and podman.

A canary lies on the host where links, members and white-outs of the images lead, and a neighbour with a good image runs
on the same node.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import secrets
import shutil
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from containers.base_image import write_root
from containers.conftest import ENGINES, engine_running
from containers.engines import installed
from containers.registry import Registry, registry
from gangline.domain.errors import GanglineError, PullFailed
from gangline.domain.ids import new_id
from gangline.domain.image_store import ImageStore
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.sandbox.bubblewrap import command_line
from gangline.sandbox.images import unpacked
from gangline.sandbox.images.pulling import Pulls
from gangline.sandbox.shared.removal import remove_tree
from gangline.settings.plugins import make_runtime
from gangline.wire.client.server import ServerClient
from support.oci_images import Member, file, folder, layer, link, node, push_again, pushed
from support.requirements import need
from support.service.cli_process import UpProcess

_PACKAGES = ("base-files", "coreutils", "dash", "findutils", "grep", "libc-bin")
_UP = "../" * 40
_LIMITS = LimitsSpec(disk_bytes=256 << 20, max_files=8_000)
"""Of unpacked images here."""
_WORKDIR = "/testbed"
_CAP_SYS_CHROOT = 1 << 18
_SHELL = """#!/usr/bin/realsh
/usr/bin/touch /tmp/ran-$$
exec /usr/bin/realsh "$@"
"""


class Host(NamedTuple):
    """Where hostile images would do harm."""

    canary: Path
    secret: str
    base: bytes

    def intact(self) -> bool:
        return os.listdir(self.canary) == ["secret"] and (self.canary / "secret").read_text() == self.secret

    def program(self, path: str) -> bytes:
        with tarfile.open(fileobj=io.BytesIO(self.base)) as archive:
            found = archive.extractfile(path)
            assert found is not None
            return found.read()


@dataclass(frozen=True)
class Hostile:
    """An image on top of the good one."""

    layers: Callable[[Host], Sequence[bytes]]
    probe: str = ":"
    """A line for the agent's shell that says BREACH if the attack has worked; `@` is the secret."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ends: tuple[str, ...] = ("starts",)
    """How it may end in the sandbox: `starts`, `refused` (not pulled), `fails` (pulled, but no sandbox starts)."""
    engines: bool = True
    """Whether docker and podman are attacked too: they bound no image's size."""


def _members(*members: Member) -> Callable[[Host], Sequence[bytes]]:
    return lambda _host: [layer(members)]


def _capable(host: Host) -> Sequence[bytes]:
    info, data = file("usr/bin/chrooted", host.program("usr/sbin/chroot"), mode=0o755)
    version_2 = b"\x01\x00\x00\x02"
    capabilities = version_2 + _CAP_SYS_CHROOT.to_bytes(4, "little") + bytes(12)
    info.pax_headers = {"SCHILY.xattr.security.capability": capabilities.decode()}
    return [layer([(info, data)])]


def _devices(_host: Host) -> Sequence[bytes]:
    disk = os.stat("/").st_dev
    return [layer([node("disk", tarfile.BLKTYPE, os.major(disk), os.minor(disk)), node("mem", tarfile.CHRTYPE, 1, 1)])]


def _sparse(_host: Host) -> Sequence[bytes]:
    info, data = file("GNUSparseFile.0/large", b"1\n0\n1\n".ljust(512, b"\0") + b"x")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "large"}
    info.pax_headers["GNU.sparse.realsize"] = str(1 << 40)
    return [layer([(info, data)])]


def _linked_layers(host: Host) -> Sequence[bytes]:
    return [
        layer([folder("swapped"), file("swapped/old", "old")]),
        layer([link("swapped", str(host.canary))]),
        layer([file("swapped/evil", "evil"), file("swapped/.wh.secret")]),
    ]


_READ = "for path in /out /up; do grep -rqs @ $path && echo BREACH; done"
_ATTACKS: dict[str, Hostile] = {
    "set_user_id_programs": Hostile(
        lambda host: [layer([file("usr/bin/rooted", host.program("usr/bin/id"), mode=0o6755)])],
        "[ $(/usr/bin/rooted -u) != 0 ] || echo BREACH",
    ),
    "file_capabilities": Hostile(_capable, "/usr/bin/chrooted / /usr/bin/true && echo BREACH"),
    "devices": Hostile(
        _devices, "for one in /disk /mem; do [ $(head -c 1 $one 2>&- | wc -c) = 0 ] || echo BREACH; done"
    ),
    "links_out": Hostile(
        lambda host: [
            layer([link("out", str(host.canary)), link("up", f"{_UP}{host.canary}")]),
            layer([file("out/evil", "evil"), file("up/evil", "evil")]),
        ],
        _READ,
    ),
    "links_of_one_layer": Hostile(
        lambda host: [layer([link("out", str(host.canary)), file("out/evil", "evil"), folder("out/more")])], _READ
    ),
    "links_between_layers": Hostile(_linked_layers, "grep -qs @ /swapped/secret && echo BREACH"),
    "hard_links_out": Hostile(
        lambda host: [layer([link("stolen", str(host.canary / "secret"), hard=True)])],
        "grep -qs @ /stolen && echo BREACH",
        ends=("refused", "starts"),
    ),
    "hard_links_through_a_link": Hostile(
        lambda host: [layer([link("out", str(host.canary)), link("stolen", "out/secret", hard=True)])],
        "grep -qs @ /stolen && echo BREACH",
        ends=("refused", "starts"),
    ),
    "members_above_the_root": Hostile(
        lambda host: [
            layer([file(f"{_UP}{host.canary}/evil", "evil"), file(f"usr/{_UP}evil", "evil"), file("//evil", "evil")])
        ]
    ),
    "a_white_out_of_what_is_above": Hostile(_members(file(".wh...")), ends=("refused", "starts", "fails")),
    "a_white_out_of_what_is_above_a_folder": Hostile(_members(file("usr/.wh...")), ends=("refused", "starts", "fails")),
    "a_white_out_of_the_root": Hostile(_members(file(".wh..")), ends=("refused", "starts", "fails")),
    "white_outs_through_a_link": Hostile(
        lambda host: [layer([link("out", str(host.canary))]), layer([file("out/.wh.secret"), file("out/.wh..wh..opq")])]
    ),
    "white_outs_of_a_path": Hostile(
        lambda host: [layer([file(f"{_UP}{host.canary}/.wh.secret"), file(f"{_UP}{host.canary}/.wh..wh..opq")])],
        ends=("refused", "starts"),
    ),
    "a_large_file": Hostile(lambda _host: [layer([file("large", bytes(300 << 20))])], ends=("refused",), engines=False),
    "many_large_files": Hostile(
        lambda _host: [layer(file(f"large/{at}", bytes(30 << 20)) for at in range(10))],
        ends=("refused",),
        engines=False,
    ),
    "a_sparse_file": Hostile(_sparse, ends=("refused",), engines=False),
    "many_files": Hostile(
        lambda _host: [layer(file(f"many/{at}") for at in range(9_000))], ends=("refused",), engines=False
    ),
    "deep_folders": Hostile(_members(folder("deep/" * 700))),
    "folders_deeper_than_a_path": Hostile(_members(folder("deep/" * 1500)), ends=("refused",)),
    "deep_folders_of_the_session": Hostile(_members(folder("testbed/" + "deep/" * 300)), ends=("fails",)),
    "etc_is_a_link": Hostile(lambda host: [layer([link("etc", f"/oldroot{host.canary}")])]),
    "files_of_etc_are_links": Hostile(
        lambda host: [
            layer(
                [
                    link(f"etc/{name}", f"/oldroot{host.canary}/{name}")
                    for name in ("passwd", "group", "hosts", "resolv.conf", "ld.so.preload")
                ]
            )
        ]
    ),
    "folders_of_the_session_are_links": Hostile(
        lambda host: [
            layer([link(name, f"/oldroot{host.canary}") for name in ("testbed", "home", "tmp", "data", "usr/src")])
        ],
        "grep -rqs @ /testbed /home /tmp /data /usr/src && echo BREACH",
    ),
    "home_is_a_link": Hostile(lambda host: [layer([link("home", f"/oldroot{host.canary}")])]),
    "folders_of_the_session_lead_out": Hostile(
        lambda host: [layer([link("testbed", str(host.canary)), link("data", f"{_UP}{host.canary}")])],
        "grep -rqs @ /testbed /data && echo BREACH",
    ),
    "folders_of_the_session_are_loops": Hostile(
        _members(link("testbed", "data"), link("data", "testbed"), link("usr/src", "x/" * 2000), link("tmp", "y" * 300))
    ),
    "folders_of_the_session_are_files": Hostile(
        _members(file("testbed", "x"), file("home", "x"), node("data", tarfile.FIFOTYPE), file("usr/src", "x"))
    ),
    "what_the_kernel_mounts": Hostile(
        lambda host: [
            layer([link(name, f"/oldroot{host.canary}") for name in ("dev", "proc", "sys", "run")]),
            layer([file("proc/self/evil", "x"), file("dev/evil", "x"), node("dev/sda", tarfile.BLKTYPE, 8, 0)]),
        ],
        ends=("starts", "refused"),
    ),
    "odd_names": Hostile(
        _members(
            *(file(name, "x") for name in ("--bind", "-", "new\nline", "usr/\x1b[2J", "testbed/\xff", "a b'\"$(id)")),
            *(folder(name) for name in ("--dev-bind", "etc/\n/etc/passwd")),
        )
    ),
    "a_crowded_root": Hostile(
        lambda _host: [layer(folder(f"top{at}") for at in range(4_000))], ends=("starts", "fails")
    ),
    "an_entry_point": Hostile(
        _members(folder("testbed")),
        "[ -e /tmp/ran ] && echo BREACH",
        config={
            "Entrypoint": ["/bin/sh", "-c", "echo > /tmp/ran"],
            "Cmd": ["/bin/sh", "-c", "echo > /tmp/ran"],
            "Healthcheck": {"Test": ["CMD-SHELL", "echo > /tmp/ran"], "Interval": 1000000},
            "User": "0:0",
            "StopSignal": "SIGKILL",
        },
    ),
    "variables": Hostile(
        _members(),
        '[ "$GANGLINE_RUNTIME:$HOME" = ":/home/agent" ] || echo BREACH',
        config={
            "Env": [
                "GANGLINE_RUNTIME=hostile/neighbour/x",
                "LD_PRELOAD=/evil.so",
                "HOME=/root",
                "=x",
                "A=b\0c",
                "ENV=/evil",
            ],
            "WorkingDir": f"{_UP}root",
        },
    ),
    "a_shell_of_its_own": Hostile(
        lambda host: [
            layer(
                [
                    file("usr/bin/realsh", host.program("usr/bin/dash"), mode=0o755),
                    file("usr/bin/sh", _SHELL, mode=0o755),
                ]
            )
        ]
    ),
    "a_configuration_that_is_none": Hostile(_members(), config={"Env": {"A": 1}}, ends=("refused",)),
}


class Arena:
    """A node's runtime with a registry, a good image, and a neighbour in it."""

    def __init__(self, runtime: str, served: Registry, host: Host, root: Path) -> None:
        self.runtime = runtime
        self.host = host
        self._served = served
        self.root = root
        self._owner = new_id("hostile")

    @property
    def store(self) -> ImageStore:
        store = make_runtime(self.runtime).image_store
        assert store is not None
        return store

    async def image(self, name: str, layers: Sequence[bytes], config: Mapping[str, Any] | None = None) -> str:
        image = f"{self._served.address}/{name}:1"
        path = self.root / new_id("layout")
        try:
            return await asyncio.to_thread(pushed, image, path, layers, config, self._served.entering)
        finally:
            await asyncio.to_thread(shutil.rmtree, path)

    async def pull(self, image: str) -> str:
        return (await Pulls().ready(self.runtime, self.store, image)).image_id

    async def start(self, image_id: str) -> Sandbox:
        network = "full" if self.runtime == "sandbox" else "none"
        spec = RuntimeSpec(
            backend=self.runtime,
            image=image_id,
            workdir=_WORKDIR,
            folders=("/data", "/usr/src/app"),
            network=network,
        )
        runtime_id = new_id("runtime")
        folder = self.root / "sandboxes" / runtime_id
        start = RuntimeStart(runtime_id=runtime_id, owner=self._owner, spec=spec, folder=folder)
        return await make_runtime(self.runtime).start(start)


@pytest.fixture(scope="module", params=["sandbox", *ENGINES])
def grounds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Arena]:
    name: str = request.param
    need(installed("skopeo"), "skopeo pushes what is tested: apt-get install -y skopeo")
    root = tmp_path_factory.mktemp(f"images-{name}")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if name == "sandbox":
            need(installed("umoci", "bwrap"), "apt-get install -y umoci bubblewrap")
            patch.setenv("GANGLINE_CACHE", str(root / "cache"))
            patch.setattr(unpacked, "LIMITS", _LIMITS)
        else:
            stack.enter_context(engine_running(name))
        served = stack.enter_context(registry(name))
        given = os.environ.get("GANGLINE_TEST_BASE")
        archive = Path(given) if given else root / "base.tar"
        if not given:
            write_root(archive, _PACKAGES)
        canary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-canary-")))
        secret = secrets.token_hex(16)
        (canary / "secret").write_text(secret)
        canary.chmod(0o755)
        (root / "sandboxes").mkdir()
        yield Arena(name, served, Host(canary, secret, archive.read_bytes()), root)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbour(grounds: Arena) -> AsyncGenerator[Sandbox]:
    sandbox = await grounds.start(await grounds.pull(await grounds.image("good", [grounds.host.base])))
    try:
        await sandbox.upload(f"{_WORKDIR}/mine", b"mine")
        yield sandbox
    finally:
        await sandbox.stop()


async def _tried(grounds: Arena, name: str, attack: Hostile) -> tuple[str, str]:
    """How it ended, with the reason; and what its probe said."""
    image = await grounds.image(name.replace("_", "-"), _layers(grounds.host, name), attack.config)
    try:
        held = await grounds.pull(image)
    except PullFailed as error:
        return f"refused: {error.message}", ""
    try:
        return await _probed(grounds, attack, held)
    finally:
        assert await grounds.store.remove_image(held), "it goes like any other"


async def _probed(grounds: Arena, attack: Hostile, held: str) -> tuple[str, str]:
    try:
        sandbox = await grounds.start(held)
    except GanglineError as error:
        return f"fails: {error.message}", ""
    try:
        if grounds.runtime == "sandbox":
            ran = await sandbox.exec(["find", "/tmp", "-name", "ran*"])
            assert ran.stdout == b"", "nothing of an image runs before the agent's commands"
        result = await sandbox.exec(["sh", "-c", f"{attack.probe.replace('@', grounds.host.secret)}; echo probed"])
        return "starts", (result.stdout + result.stderr).decode(errors="replace")
    finally:
        await sandbox.stop()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", _ATTACKS)
async def test_a_hostile_image_harms_only_its_own_session(name: str, grounds: Arena, neighbour: Sandbox) -> None:
    attack = _ATTACKS[name]
    if grounds.runtime != "sandbox" and not attack.engines:
        pytest.skip("does not apply: an engine bounds no image's size, the node's disk reserve does")
    before = _state(grounds)
    end, said = await _tried(grounds, name, attack)
    assert "BREACH" not in said, said
    assert grounds.host.intact(), sorted(grounds.host.canary.iterdir())
    assert _state(grounds) == before
    if grounds.runtime == "sandbox":
        assert end.startswith(attack.ends), end
    if end == "starts" and attack.probe != ":":
        assert "probed" in said
    assert (await neighbour.exec(["sh", "-c", "cat mine; id -u > /tmp/again"])).stdout == b"mine"
    another = await grounds.start(await grounds.pull(await grounds.image("good", [grounds.host.base])))
    try:
        assert (await another.exec("ls -A")).stdout == b""
    finally:
        await another.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_image_with_more_layers_than_any_is_refused_at_once(grounds: Arena) -> None:
    if grounds.runtime != "sandbox":
        pytest.skip("does not apply: an engine has its own limit")
    image = await grounds.image("many-layers", [layer([file("x", "x")])])
    await asyncio.to_thread(push_again, image, 5000)
    with pytest.raises(PullFailed, match="5000 layers"):
        await grounds.pull(image)


_ENDS = {
    "a_configuration_that_is_none": ("infra_error", "pull_failed"),
    "hard_links_out": ("infra_error", "pull_failed"),
    "deep_folders_of_the_session": ("infra_error", "runtime_failed"),
    "a_crowded_root": ("infra_error", "runtime_failed"),
    "folders_of_the_session_are_links": ("completed", None),
    "a_shell_of_its_own": ("completed", None),
    "variables": ("completed", None),
}
"""Attack -> outcome and code of its session."""


@pytest.mark.asyncio(loop_scope="module")
async def test_sessions_of_a_node_go_on_beside_those_of_hostile_images(grounds: Arena, tmp_path: Path) -> None:
    if grounds.runtime != "sandbox":
        pytest.skip("does not apply: a node sees no difference")
    host = grounds.host
    names = {
        name: await grounds.image(f"node-{at}", _layers(host, name), _ATTACKS[name].config)
        for at, name in enumerate(_ENDS)
    }
    good = await grounds.image("good", [host.base])
    env = {name: os.environ[name] for name in ("CONTAINERS_REGISTRIES_CONF", "GANGLINE_CACHE")}
    up = UpProcess(tmp_path, env=env)
    try:
        assert up.ready(), "the service did not start"
        running = up.running()
        async with ServerClient(running["server_url"], running["control_token"]) as client:
            hostile = {name: await client.submit(_task(image)) for name, image in names.items()}
            others = await client.submit({**_task(good), "num_samples": 4})
            for one in (*hostile.values(), others):
                await client.wait(one.task_id, timeout_s=200)
            found = {name: (await client.result(one.task_id))[0] for name, one in hostile.items()}
            after = await client.submit(_task(good))
            await client.wait(after.task_id, timeout_s=60)
            results = [*await client.result(others.task_id), *await client.result(after.task_id)]
    finally:
        up.close()
    ends = {name: (one.outcome, None if one.failure is None else one.failure.code) for name, one in found.items()}
    assert ends == _ENDS
    assert [(one.outcome, one.attempt) for one in results] == [("completed", 1)] * 5
    assert host.intact()


def _layers(host: Host, name: str) -> list[bytes]:
    return [host.base, *_ATTACKS[name].layers(host)]


def _task(image: str) -> dict[str, Any]:
    agent = {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True}
    runtime = {"backend": "sandbox", "image": image, "workdir": _WORKDIR, "folders": ["/data"], "network": "none"}
    return {"instruction": "x", "max_attempts": 1, "runtime": runtime, "agent": agent}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["home_is_a_link", "etc_is_a_link"])
async def test_links_lead_out_where_mounts_follow_them(
    name: str, grounds: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack that could not succeed would be no check."""
    if grounds.runtime != "sandbox":
        pytest.skip("does not apply: an engine makes its own mounts")
    bound: Callable[..., Any] = vars(command_line)["_bound"]

    def follows(source: Path, target: str, inner: Sequence[str], **_more: bool) -> Any:
        return bound(source, target, inner, is_ours=True)

    monkeypatch.setattr(command_line, "_bound", follows)
    await _tried(grounds, name, _ATTACKS[name])
    assert not grounds.host.intact()
    for path in set(grounds.host.canary.iterdir()) - {grounds.host.canary / "secret"}:
        await asyncio.to_thread(remove_tree, path)
    assert grounds.host.intact()


def _state(grounds: Arena) -> object:
    """What is left on the host: of the store, the good image's root as it was, closed to others; and of sandboxes."""
    left = sorted(os.listdir(grounds.root))
    if grounds.runtime != "sandbox":
        return left
    store = grounds.root / "cache" / "unpacked"
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    facts = [
        (str(path), found.st_mode, found.st_size, found.st_mtime_ns)
        for path in sorted((store / "roots").rglob("*"))
        if not stat.S_ISDIR((found := path.lstat()).st_mode)
    ]
    assert os.listdir(store / "work") == []
    roots = (os.listdir(store / "roots"), hashlib.sha256(repr(facts).encode()).hexdigest())
    return left, sorted(os.listdir(store)), roots, sorted(os.listdir(grounds.root / "sandboxes"))
