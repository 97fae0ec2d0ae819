"""Services alongside an agent's container: reached by name, from nowhere else, and gone with the session."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from containers.engines import IMAGE
from containers.test_container_images import OWNER, engine, started
from gangline.domain.errors import InvalidRequest, LimitExceeded, NotFound, RuntimeFailed
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.settings.plugins import make_runtime

FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode(), end='')"
WEB = "mkdir -p /srv && cd /srv && echo $WORD > word && exec python3 -m http.server 80"


@pytest.fixture(autouse=True)
async def _nothing_stays(container_runtime: str, tmp_path: Path):
    """Also when a test fails."""
    yield
    await make_runtime(container_runtime).reap(OWNER, tmp_path)


def web(word: str, **fields: Any) -> dict[str, Any]:
    """A web server on port 80, which says a word."""
    check = {"command": ["python3", "-c", FETCH, "http://localhost/word"]}
    return {
        "image": IMAGE,
        "command": ["sh", "-c", WEB],
        "env": {"WORD": word},
        "healthcheck": check,
        **fields,
    }


async def with_proxy(name: str, root: Path, port: int, **fields: Any) -> Sandbox:
    """A sandbox that reaches the node's proxy, on this port."""
    spec = RuntimeSpec.model_validate({"backend": name, "image": IMAGE, **fields})
    runtime_id = new_id("runtime")
    start = RuntimeStart(runtime_id=runtime_id, owner=OWNER, spec=spec, folder=root / runtime_id, proxy_port=port)
    return await make_runtime(name).start(start)


async def fetched(handle: Sandbox, url: str) -> str:
    result = await handle.exec(["python3", "-c", FETCH, url])
    return result.stdout.decode() if result.ok else result.stderr.decode().splitlines()[-1]


def names(runtime: str) -> list[str]:
    return engine(runtime, "ps", "--all", "--format", "{{.Names}}").split()


async def test_services_are_reached_by_name_and_each_has_its_own_ports(container_runtime: str, tmp_path: Path) -> None:
    relay = f'python3 -c "{FETCH}" http://store/word > /tmp/word && cd /tmp && exec python3 -m http.server 80'
    services = {
        "front": {
            "image": IMAGE,
            "command": ["sh", "-c", relay],
            "healthcheck": {"command": f'python3 -c "{FETCH}" http://front/word'},
            "depends_on": {"store": "ready", "once": "ready"},
        },
        "store": web("mush", user="0:0", workdir="/tmp"),
        "once": {"image": IMAGE, "entrypoint": ["sh", "-c", "test $A = b"], "env": {"A": "b"}, "completes": True},
    }
    handle = await started(container_runtime, tmp_path, services=services)
    assert await fetched(handle, "http://store/word") == "mush\n"
    assert await fetched(handle, "http://front/word") == "mush\n", "it met the other one when it began"
    await handle.upload("kept", b"1")
    await handle.kill()
    assert await fetched(handle, "http://front/word") == "mush\n", "they outlive the agent's processes"
    await handle.stop()
    assert names(container_runtime) == []


async def test_the_node_runs_commands_in_services_and_copies_their_files(
    container_runtime: str, tmp_path: Path
) -> None:
    store = {"image": IMAGE, "command": ["sleep", "1000"], "env": {"WORD": "mush"}, "user": "1000:1000"}
    spec = {"services": {"other": web("dog"), "store": store}}
    handle = await started(container_runtime, tmp_path, **spec)
    runtime = make_runtime(container_runtime)
    assert runtime.has_services
    whole = RuntimeSpec.model_validate({"backend": container_runtime, "image": IMAGE, **spec})
    services = runtime.services_of(handle.runtime_id, whole)
    own = await services.exec("store", "id -u; echo $WORD; exit 3", timeout_s=30)
    assert (own.exit_code, own.stdout) == (3, b"1000\nmush\n")
    root = await services.exec("store", "id -u; head -c 100 /dev/zero", timeout_s=30, user="root", max_output_bytes=9)
    assert (root.stdout, root.truncated) == (b"0\n" + bytes(7), True)
    late = await services.exec("store", "sleep 60", timeout_s=1)
    assert (late.timed_out, late.ok) == (True, False)
    make = "mkdir -p /data/in && echo sled > /data/in/kind && ln -s in /data/link"
    made = await services.exec("other", make, timeout_s=30)
    assert made.ok, made.stderr
    with tarfile.open(fileobj=io.BytesIO(await services.archive("other", "/data", max_bytes=1 << 20))) as archive:
        assert archive.getnames() == ["data", "data/in", "data/in/kind", "data/link"]
        kind = archive.extractfile("data/in/kind")
        assert kind is not None
        assert kind.read() == b"sled\n"
    with pytest.raises(LimitExceeded, match="/data takes more than 99 bytes"):
        await services.archive("other", "/data", max_bytes=99)
    with pytest.raises(NotFound, match="/none of service 'store' could not be copied"):
        await services.archive("store", "/none", max_bytes=99)
    with pytest.raises(RuntimeFailed, match=r"no service 'third', but other, store"):
        await services.archive("third", "/data", max_bytes=99)
    await handle.stop()


async def test_each_session_has_a_network_of_its_own_without_the_nodes_proxy(
    container_runtime: str, tmp_path: Path
) -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"proxy\n")
        writer.close()

    server = await asyncio.start_server(answer, "0.0.0.0", 0)
    port = server.sockets[0].getsockname()[1]

    one = await with_proxy(container_runtime, tmp_path, port, services={"w": web("one")})
    other = await with_proxy(container_runtime, tmp_path, port, services={"w": web("other")})
    assert (await fetched(one, "http://w/word"), await fetched(other, "http://w/word")) == ("one\n", "other\n")
    dial = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).makefile().read())"
    assert (await one.exec(["python3", "-c", dial, "127.0.0.1", str(port)])).stdout == b"proxy\n\n"
    service = f"gangline_service-1-{one.runtime_id}"
    for host in ("127.0.0.1", "main", "198.18.0.1", "198.18.0.254", "8.8.8.8"):
        with pytest.raises(subprocess.CalledProcessError):
            engine(container_runtime, "exec", service, "python3", "-c", dial, host, str(port))
    assert "services" not in Path("/proc/net/dev").read_text(), "nothing of it is in this machine's network"
    await one.stop()
    await other.stop()
    server.close()


async def test_under_full_services_have_the_engines_network_beside_their_own(
    container_runtime: str, tmp_path: Path
) -> None:
    if container_runtime == "podman":
        pytest.skip("does not apply: podman's bridge would be this machine's, and stay")
    handle = await with_proxy(container_runtime, tmp_path, 9, network="full", services={"w": web("out")})
    assert await fetched(handle, "http://w/word") == "out\n"
    for name in (f"gangline-{handle.runtime_id}", f"gangline_service-1-{handle.runtime_id}"):
        links = engine(container_runtime, "exec", name, "cat", "/proc/net/dev")
        assert "eth0:" in links
        assert "services:" in links
    await handle.stop()


@pytest.mark.parametrize(
    ("service", "error", "says"),
    [
        ({"command": ["sh", "-c", "echo no room >&2; exit 3"]}, RuntimeFailed, "'w' ended with exit code 3.*no room"),
        (
            {"command": ["sleep", "99"], "healthcheck": {"command": "exit 1", "within_seconds": 1}},
            RuntimeFailed,
            "'w' was not healthy within 1 s",
        ),
        ({"image": "localhost/no-such-image:7"}, InvalidRequest, "pull localhost/no-such-image:7"),
        ({"image": "--privileged"}, InvalidRequest, "the name of an image"),
    ],
)
async def test_a_service_that_does_not_come_to_work_is_named_and_nothing_stays(
    container_runtime: str, tmp_path: Path, service: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=f"(?s){says}"):
        await started(container_runtime, tmp_path, services={"w": {"image": IMAGE, **service}})
    assert names(container_runtime) == []
    assert os.listdir(tmp_path) == []


async def test_services_are_reaped_after_a_crash_and_those_of_living_sessions_are_not(
    container_runtime: str, tmp_path: Path
) -> None:
    program = (
        "import asyncio; from pathlib import Path\n"
        "from containers.test_container_services import started, web\n"
        "async def main():\n"
        f"    handle = await started({container_runtime!r}, Path({str(tmp_path)!r}), services={{'w': web('late')}})\n"
        "    print(handle.runtime_id, flush=True); await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=env, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    lost = (await process.stdout.readline()).decode().strip()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    living = await started(container_runtime, tmp_path, services={"w": web("alive")})
    assert sorted(name for name in names(container_runtime) if name.endswith(lost)) == [
        f"gangline-{lost}",
        f"gangline_network-1-{lost}",
        f"gangline_service-1-{lost}",
    ]
    assert await make_runtime(container_runtime).reap(OWNER, tmp_path, frozenset({living.runtime_id})) == 1
    assert [name for name in names(container_runtime) if name.endswith(lost)] == []
    assert await fetched(living, "http://w/word") == "alive\n"
    await living.stop()
    assert names(container_runtime) == []
