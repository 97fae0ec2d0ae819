"""Nothing is left behind: not by stops and cancels, not by a node that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Runtime, RuntimeStart, Sandbox
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.sandbox.process import ProcessRuntime

DAEMON = "setsid sh -c 'sleep 4242 &' > /dev/null 2>&1"


@pytest.fixture(params=[BubblewrapRuntime, ProcessRuntime], ids=["sandbox", "process"])
async def runtime(request: pytest.FixtureRequest) -> Runtime:
    runtime: Runtime = request.param()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    return runtime


def start_of(owner: str, root: Path, runtime_id: str) -> RuntimeStart:
    spec = RuntimeSpec(limits=LimitsSpec(memory_bytes=512 << 20, cpus=1.5))
    return RuntimeStart(runtime_id=runtime_id, owner=owner, spec=spec, folder=root / runtime_id, proxy_port=9)


def processes(owner: str) -> list[str]:
    """Labelled processes, and what runs in the sandboxes they made: command lines."""
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"GANGLINE_RUNTIME={owner}/".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def groups(owner: str) -> Iterator[str]:
    for folder, names, _files in os.walk("/sys/fs/cgroup"):
        yield from (f"{folder}/{name}" for name in names if f"@{owner}@" in name)


def assert_nothing_left(owner: str, root: Path) -> None:
    assert processes(owner) == []
    assert list(groups(owner)) == []
    assert os.listdir(root) == []
    assert str(root) not in Path("/proc/self/mountinfo").read_text()


async def test_starts_stops_cancels_and_kills_leave_nothing(runtime: Runtime, tmp_path: Path) -> None:
    owner = new_id("leak")

    async def use(number: int) -> None:
        handle = await runtime.start(start_of(owner, tmp_path, f"r{number}"))
        await handle.exec(DAEMON)
        running = asyncio.create_task(handle.exec("sleep 4242"))
        await handle.exec("true")
        if number % 2:
            running.cancel()
        else:
            await handle.kill()
            assert (await handle.exec("echo back")).stdout == b"back\n"
        await asyncio.gather(running, return_exceptions=True)
        await handle.stop()

    await use(0)  # what is opened once and for all is open now
    descriptors = len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*(use(number) for number in range(1, 5)))
    assert_nothing_left(owner, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_a_start_cancelled_at_any_moment_leaves_nothing(runtime: Runtime, tmp_path: Path) -> None:
    owner = new_id("leak")
    for turns in range(0, 40, 2):
        task = asyncio.create_task(runtime.start(start_of(owner, tmp_path, f"r{turns}")))
        for _turn in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(done, BaseException):
            await done.stop()
    for stage_s in (0.005, 0.01, 0.02, 0.03, 0.05):
        task = asyncio.create_task(runtime.start(start_of(owner, tmp_path, f"t{stage_s}")))
        await asyncio.wait([task], timeout=stage_s)
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(done, BaseException):
            await done.stop()
    assert_nothing_left(owner, tmp_path)


NODE = """
import asyncio, sys
from pathlib import Path
from gangline.domain.sandbox import RuntimeStart
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.settings.plugins import load

async def main(kind, owner, root):
    runtime = load("runtime", kind)()
    start = RuntimeStart(
        runtime_id="lost", owner=owner, spec=RuntimeSpec(limits=LimitsSpec(memory_bytes=512 << 20)),
        folder=Path(root) / "lost", proxy_port=9,
    )
    handle = await runtime.start(start)
    await handle.exec("setsid sh -c 'sleep 4242 &' > /dev/null 2>&1")
    def started(_name, data):
        print("running", flush=True)
    await handle.exec("(setsid sleep 4243 &); echo go; sleep 4244", on_output=started)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_node_leaves_what_reap_removes(runtime: Runtime, tmp_path: Path) -> None:
    owner = new_id("crash")
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, runtime.name, owner, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert node.stdout is not None
    with node, node.stdout:
        assert await asyncio.to_thread(node.stdout.readline) == "running\n"
        assert processes(owner)
        node.send_signal(signal.SIGKILL)
    spared = {"sleep 4242 "} if isinstance(runtime, ProcessRuntime) else set[str]()
    while set(processes(owner)) != spared:  # nobody but the kernel is at work here
        await asyncio.sleep(0.01)
    assert await runtime.reap("another-owner", tmp_path) == 0
    assert await runtime.reap(owner, tmp_path) == 1
    assert_nothing_left(owner, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="does not apply: only root can become another user")
async def test_the_sandbox_keeps_its_contract_for_an_ordinary_user(tmp_path: Path) -> None:
    try:
        await BubblewrapRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    os.chown(tmp_path, 54321, 54321)
    # Python itself, or this checkout, may lie under /root or /tmp: give the user a view in which both can be reached.
    view = ["bwrap", "--dev-bind", "/", "/", "--bind", str(tmp_path), "/tmp", "--tmpfs", "/root"]
    suite = Path(__file__).with_name("test_runtime_conformance.py")
    for prefix in sorted({sys.base_prefix, str(suite.parents[2]), sys.prefix}):
        for parent in reversed(Path(prefix).parents):
            view += ["--perms", "0755", "--dir", str(parent)]
        view += ["--ro-bind", prefix, prefix]
    user = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "--bounding-set=-all"]
    checks = "sandbox- and (timeout or cancel or proxy or kills_all or limit or root or privileges or reach)"
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", checks, str(suite)]
    # What does not apply may be skipped: rlimits hold each process for itself, none holds cpus, and graders need root.
    environ = {"HOME": "/tmp", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "GANGLINE_REQUIRE_ALL": "1"}
    done = await asyncio.to_thread(
        subprocess.run,
        [*view, *user, *pytest_run],
        cwd=suite.parents[2],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 skipped" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("hosts", [None, "127.0.0.1 localhost\n10.0.0.9 database\n"])
async def test_an_image_is_the_root_file_system(tmp_path: Path, hosts: str | None) -> None:
    runtime = BubblewrapRuntime()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    image = tmp_path / "image"
    _make_image(image)
    if hosts is not None:
        (image / "etc/hosts").write_text(hosts)
    spec = RuntimeSpec(image=str(image), network="none", workdir="/srv/job")
    start = RuntimeStart(runtime_id="r", owner=new_id("image"), spec=spec, folder=tmp_path / "r")
    handle = await runtime.start(start)
    try:
        await handle.upload("note", b"mine")
        result = await handle.exec("cat /etc/image-name /srv/kept note; [ ! -e /etc/hostname ] && echo alone")
        assert (result.stdout, result.stderr) == (b"small\nkept\nminealone\n", b"")
        known = await handle.exec("cat /etc/hosts")
        assert known.stdout.decode() == "127.0.0.1 localhost gangline\n", "an image's own is not read: it may be a link"
    finally:
        await handle.stop()


def _make_image(image: Path) -> None:
    """A root file system with a shell and `cat`, copied with the libraries that they load."""
    for program in ("/bin/sh", "/bin/cat"):
        libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout.split()
        for file in [program, *(word for word in libraries if word.startswith("/"))]:
            target = image / file.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(Path(file).read_bytes())
            target.chmod(0o755)
    for name, text in (("etc/image-name", "small\n"), ("srv/kept", "kept\n")):
        (image / name).parent.mkdir(parents=True, exist_ok=True)
        (image / name).write_text(text)


async def test_exposing_a_folder_exposes_none_of_its_neighbours(tmp_path: Path) -> None:
    from gangline.settings.machine import Settings

    tool = tmp_path / "private" / "tool"
    (tool / "bin").mkdir(parents=True)
    (tool / "bin" / "greet").write_text("#!/bin/sh\necho greetings\n")
    (tool / "bin" / "greet").chmod(0o755)
    (tmp_path / "private" / "secret").write_text("secret")
    (tmp_path / "private").chmod(0o700)
    runtime = BubblewrapRuntime(Settings.from_environ({"GANGLINE_EXPOSE": str(tool), "HOME": str(tmp_path)}))
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    handle: Sandbox = await runtime.start(start_of(new_id("expose"), tmp_path, "r"))
    try:
        result = await handle.exec(f"greet; ls {tmp_path}/private; touch {tool}/x 2>/dev/null || echo closed")
        assert result.stdout == b"greetings\ntool\nclosed\n"
    finally:
        await handle.stop()
