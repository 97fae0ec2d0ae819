"""What only containers have: images, layers, an engine that outlives everything and may be shared with others."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from containers.engines import IMAGE
from gangline.domain.errors import InvalidRequest, RuntimeFailed
from gangline.domain.ids import new_id
from gangline.domain.image_names import located
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.settings.plugins import make_runtime

OWNER = os.environ.setdefault("TEST_IMAGES_OWNER", new_id("images"))
"""Nobody else's, as reapers kill by it, and the same in a program that a test starts."""


def engine(name: str, *words: str) -> str:
    command = shlex.split(os.environ.get(f"GANGLINE_{name.upper()}", name))
    return subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture(autouse=True)
async def _nothing_stays(container_runtime: str, tmp_path: Path):
    """Also when a test fails."""
    yield
    await make_runtime(container_runtime).reap(OWNER, tmp_path)


def start_of(name: str, root: Path, image: str | None = IMAGE, **spec: object) -> RuntimeStart:
    runtime_id = new_id("runtime")
    whole = RuntimeSpec.model_validate({"backend": name, "network": "none", "image": image, **spec})
    return RuntimeStart(runtime_id=runtime_id, owner=OWNER, spec=whole, folder=root / runtime_id)


async def started(name: str, root: Path, **spec: object) -> Sandbox:
    return await make_runtime(name).start(start_of(name, root, **spec))


async def test_the_engines_images_are_told_by_every_name_that_it_would_take(container_runtime: str) -> None:
    runtime = make_runtime(container_runtime)
    told = await runtime.images()
    image_id = engine(container_runtime, "image", "inspect", "--format", "{{.Id}}", IMAGE).strip()
    for name in (IMAGE, image_id, image_id.removeprefix("sha256:")[:12]):
        assert located(name)[1] in told[""]
    assert located(f"{IMAGE}-not")[1] not in told[""]


@pytest.fixture
def derived_image(container_runtime: str):
    """An image with a workdir that has content of root's, and a volume."""
    name = "localhost/gangline-test-derived:1"
    options = ("--network", "none", "--name", "gangline-test-derived")
    program = "mkdir -p /testbed/sub /data && echo whole > /testbed/sub/file && echo deep > /data/file"
    engine(container_runtime, "run", *options, IMAGE, "sh", "-c", program)
    engine(container_runtime, "commit", "--change", "VOLUME /data", "gangline-test-derived", name)
    engine(container_runtime, "rm", "gangline-test-derived")
    yield name
    engine(container_runtime, "rmi", name)


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (None, "needs an image"),
        ("localhost/no-such-image:7", "is not on this machine.* pull localhost/no-such-image:7"),
        ("--privileged", "the name of an image"),
        ("dir:/etc", "the name of an image"),
    ],
)
async def test_an_image_that_is_not_there_is_refused_with_what_to_do(
    container_runtime: str, tmp_path: Path, image: str | None, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await make_runtime(container_runtime).start(start_of(container_runtime, tmp_path, image))
    assert os.listdir(tmp_path) == []
    assert "gangline-" not in engine(container_runtime, "ps", "--all")


async def test_an_image_without_a_shell_is_told_as_such(container_runtime: str, tmp_path: Path) -> None:
    (tmp_path / "only").touch()
    archive = tmp_path / "empty.tar"
    subprocess.run(["tar", "-C", tmp_path, "-cf", archive, "only"], check=True)
    engine(container_runtime, "import", str(archive), "localhost/gangline-test-empty:1")
    with pytest.raises(RuntimeFailed, match="sh"):
        await started(container_runtime, tmp_path / "root", image="localhost/gangline-test-empty:1")
    engine(container_runtime, "rmi", "localhost/gangline-test-empty:1")


async def test_the_workdir_keeps_what_the_image_has_there_and_is_the_agents(
    container_runtime: str, tmp_path: Path, derived_image: str
) -> None:
    handle = await started(container_runtime, tmp_path, image=derived_image, workdir="/testbed")
    assert (await handle.exec("cat sub/file && echo more >> sub/file && touch sub/other")).stdout == b"whole\n"
    assert await handle.download("/testbed/sub/file") == b"whole\nmore\n"
    assert await handle.download("/data/file") == b"deep\n", "what the image has elsewhere can be read"
    again = await started(container_runtime, tmp_path, image=derived_image, workdir="/testbed")
    assert await again.download("sub/file") == b"whole\n", "each container has its own layer"
    await handle.stop()
    await again.stop()


async def test_more_folders_are_the_agents(container_runtime: str, tmp_path: Path) -> None:
    handle = await started(container_runtime, tmp_path, folders=["/logs/agent", "/tests"])
    assert (await handle.exec("touch /logs/agent/a /tests/b")).ok
    assert not (await handle.exec("touch /logs/c")).ok
    await handle.upload("/tests/run.sh", b"true")
    assert (await handle.exec("sh /tests/run.sh && rm /tests/run.sh")).ok
    await handle.stop()


async def test_volumes_of_an_image_go_with_the_container(
    container_runtime: str, tmp_path: Path, derived_image: str
) -> None:
    handle = await started(container_runtime, tmp_path, image=derived_image)
    assert engine(container_runtime, "volume", "ls", "--quiet")
    await handle.stop()
    assert engine(container_runtime, "volume", "ls", "--quiet") == ""


async def test_an_images_variables_and_path_come_first(container_runtime: str, tmp_path: Path) -> None:
    handle = await started(container_runtime, tmp_path, env={"FROM_SPEC": "2"})
    seen = dict(line.split("=", 1) for line in (await handle.exec("env")).stdout.decode().splitlines())
    assert (seen["FROM_IMAGE"], seen["FROM_SPEC"]) == ("1", "2")
    assert seen["PATH"].startswith("/opt/image/bin:/usr/bin:/bin:")
    assert f"{sys.prefix}/bin" in seen["PATH"].split(":")
    assert set(seen) == {"FROM_IMAGE", "FROM_SPEC", "PATH", "HOME", "LANG", "PWD"}
    assert (await handle.exec("id -un; getent passwd $(id -u) | cut -d: -f6")).stdout == b"agent\n/home/agent\n"
    await handle.stop()


async def test_what_is_mounted_into_a_container_cannot_be_moved_out_or_changed(
    container_runtime: str, tmp_path: Path
) -> None:
    handle = await started(container_runtime, tmp_path)
    assert handle.limits()["max_pids"] != "not enforced"
    for path in ("/proc/1/environ", "/sys/kernel/notes", f"{sys.prefix}/pyvenv.cfg", "/run/gangline/life"):
        with pytest.raises(InvalidRequest):
            await handle.download(path)
    result = await handle.exec(f"touch {sys.prefix}/planted; touch /run/gangline/planted")
    assert not result.ok
    assert not Path(sys.prefix, "planted").exists()
    await handle.stop()


async def test_commands_are_confined_as_the_engine_confines(container_runtime: str, tmp_path: Path) -> None:
    handle = await started(container_runtime, tmp_path)
    told = handle.limits()["system_calls"]
    assert told == "seccomp filter" + ("; seccomp filter of the engine" if os.geteuid() == 0 else "")
    result = await handle.exec("grep -E '^(CapPrm|CapEff|NoNewPrivs|Seccomp):' /proc/self/status | tr -d '\\t'")
    lines = [f"CapPrm:{0:016x}", f"CapEff:{0:016x}", "NoNewPrivs:1", "Seccomp:2"]
    assert result.stdout.decode().splitlines() == lines
    await handle.stop()


async def test_orphans_do_not_pile_up_as_zombies(container_runtime: str, tmp_path: Path) -> None:
    handle = await started(container_runtime, tmp_path, limits={"max_pids": 40})
    for _round in range(5):
        assert (await handle.exec("for n in 1 2 3 4 5 6 7 8 9 10; do (setsid true &); done")).ok
    zombies = "cat /proc/[0-9]*/stat | cut -d' ' -f3 | grep -c Z"
    left = await handle.exec(f'for n in $(seq 50); do [ "$({zombies})" = 0 ] && break; sleep 0.1; done; {zombies}')
    assert left.stdout == b"0\n", "not even a few seconds later"
    await handle.stop()


async def test_reaping_leaves_what_is_others(container_runtime: str, tmp_path: Path) -> None:
    other = f"other-{new_id('c')}"
    engine(container_runtime, "run", "--detach", "--network", "none", "--name", other, IMAGE, "sleep", "1000")
    handle = await started(container_runtime, tmp_path)
    runtime = make_runtime(container_runtime)
    assert await runtime.reap("somebody", tmp_path) == 0
    assert await runtime.reap(OWNER, tmp_path) == 1
    names = engine(container_runtime, "ps", "--all", "--format", "{{.Names}}").split()
    assert names == [other]
    await handle.stop()
    engine(container_runtime, "rm", "--force", other)


async def test_a_container_that_somebody_ended_goes_on_with_its_files(container_runtime: str, tmp_path: Path) -> None:
    handle = await started(container_runtime, tmp_path)
    await handle.upload("mine", b"1")
    engine(container_runtime, "kill", f"gangline-{handle.runtime_id}")
    assert await handle.download("mine") == b"1"
    await handle.stop()


async def test_a_container_that_somebody_removed_is_a_failure_of_the_runtime(
    container_runtime: str, tmp_path: Path
) -> None:
    handle = await started(container_runtime, tmp_path)
    engine(container_runtime, "rm", "--force", f"gangline-{handle.runtime_id}")
    with pytest.raises(RuntimeFailed):
        await handle.exec("true")
    await handle.stop()
    assert os.listdir(tmp_path) == []


async def test_a_container_ends_with_the_process_that_started_it(container_runtime: str, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from containers.test_container_images import started\n"
        "async def main():\n"
        f"    handle = await started({container_runtime!r}, Path({str(tmp_path)!r}))\n"
        "    print(handle.runtime_id, flush=True); await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=env, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    runtime_id = (await process.stdout.readline()).decode().strip()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await asyncio.to_thread(engine, container_runtime, "wait", f"gangline-{runtime_id}")
    assert await make_runtime(container_runtime).reap(OWNER, tmp_path) == 1
    assert engine(container_runtime, "ps", "--all", "--quiet") == ""


@pytest.mark.parametrize("workdir", ["/etc", "/proc/x", "/usr", "relative", "/a/../etc", "/"])
async def test_a_workdir_is_no_folder_of_the_systems(container_runtime: str, tmp_path: Path, workdir: str) -> None:
    with pytest.raises((InvalidRequest, ValidationError), match="workdir"):
        await started(container_runtime, tmp_path, workdir=workdir)
    assert os.listdir(tmp_path) == []


async def test_under_full_the_network_is_the_engines_and_the_proxy_is_there(
    container_runtime: str, tmp_path: Path
) -> None:
    if container_runtime == "podman":
        pytest.skip("does not apply: podman's bridge would be this machine's, and stay")

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"proxy\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    spec = RuntimeSpec(backend=container_runtime, network="full", image=IMAGE, limits=LimitsSpec(max_pids=None))
    start = RuntimeStart(runtime_id=new_id("runtime"), owner=OWNER, spec=spec, folder=tmp_path / "r", proxy_port=port)
    handle = await make_runtime(container_runtime).start(start)
    dial = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).makefile().read(), end='')"
    assert (await handle.exec(["python3", "-c", dial])).stdout == b"proxy\n"
    assert b"eth0" in (await handle.exec("cat /proc/net/dev")).stdout
    await handle.stop()
    server.close()
