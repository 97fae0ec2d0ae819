"""What every runtime must do, as checks that any runtime's author can run.

    @pytest.mark.parametrize("check", checks(isolated=True), ids=lambda check: check.__name__)
    async def test_my_runtime(check, tmp_path):
        await run_check(check, MyRuntime(), tmp_path, isolated=True)

`isolated` says that the runtime promises isolation (own processes, own network, own files). A check that
fails raises AssertionError with what was expected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path

from gangline.domain.contracts import ExecResult, Runtime, RuntimeHandle, RuntimeStart
from gangline.domain.errors import CallerError, InvalidRequest, LimitExceeded, NotFound, RuntimeFailed
from gangline.domain.ids import new_id
from gangline.domain.task import LimitsSpec, NetworkPolicy, RuntimeSpec

__all__ = ["Bench", "Check", "checks", "run_check"]

_PATIENCE_S = 60.0
_DAEMON = "setsid sh -c '(while :; do date +%s%N > {beat}; sleep 0.05; done) & ' > /dev/null 2>&1 < /dev/null"
"""Starts a grandchild in a session of its own, whose parent is gone, that keeps writing to a file."""


class Bench:
    """Starts sandboxes of the runtime under test, and a proxy for them to reach."""

    def __init__(self, runtime: Runtime, root: Path, *, isolated: bool) -> None:
        self.runtime = runtime
        self.root = root
        self.isolated = isolated
        self.owner = new_id("conformance")
        self.proxy_port = 0
        self._handles: list[RuntimeHandle] = []

    async def start(
        self, *, network: NetworkPolicy = "proxy", limits: LimitsSpec | None = None, env: dict[str, str] | None = None
    ) -> RuntimeHandle:
        runtime_id = new_id("runtime")
        spec = RuntimeSpec(
            backend=self.runtime.name,
            network=network,
            limits=limits or LimitsSpec(),
            env=env or {},
            workdir="/workspace",
        )
        start = RuntimeStart(
            runtime_id=runtime_id,
            owner=self.owner,
            spec=spec,
            folder=self.root / runtime_id,
            proxy_port=self.proxy_port,
        )
        handle = await self.runtime.start(start)
        self._handles.append(handle)
        return handle

    async def stop_all(self) -> None:
        for handle in self._handles:
            await handle.stop()


Check = Callable[[Bench], Awaitable[None]]
_CHECKS: list[Check] = []
_ISOLATION: set[Check] = set()


def _check(check: Check) -> Check:
    _CHECKS.append(check)
    return check


def _needs_isolation(check: Check) -> Check:
    _ISOLATION.add(check)
    return _check(check)


def checks(*, isolated: bool) -> list[Check]:
    """Those that apply to a runtime with or without isolation."""
    return [check for check in _CHECKS if isolated or check not in _ISOLATION]


async def run_check(check: Check, runtime: Runtime, root: Path, *, isolated: bool) -> None:
    """Run one check against a runtime; `root` is an empty folder."""
    bench = Bench(runtime, root, isolated=isolated)
    async with _proxy() as bench.proxy_port:
        try:
            await asyncio.wait_for(check(bench), _PATIENCE_S)
        finally:
            await bench.stop_all()
    left = os.listdir(root)
    assert not left, f"stop left {left} behind"


@contextlib.asynccontextmanager
async def _proxy() -> AsyncGenerator[int]:
    """Answers a line with `proxy:` and the line, until the client ends."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                writer.write(b"proxy:" + line)
                await writer.drain()
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 24)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _dial(port: int, line: str = "hello", host: str = "127.0.0.1") -> list[str]:
    program = (
        f"import socket; s = socket.create_connection(({host!r}, {port}), 5); "
        f"s.sendall({line!r}.encode() + b'\\n'); print(s.makefile().readline().strip())"
    )
    return ["python3", "-c", program]


async def _beats(handle: RuntimeHandle, name: str = "beat") -> bool:
    """Whether a daemon of `_DAEMON` still writes: it has twenty times its period to do so."""
    await handle.upload(name, b"silent")
    for _try in range(20):
        await asyncio.sleep(0.05)
        if await handle.download(name) != b"silent":
            return True
    return False


async def _until_beating(handle: RuntimeHandle, name: str = "beat") -> None:
    while True:
        with contextlib.suppress(CallerError):
            if await handle.download(name):
                return
        await asyncio.sleep(0.02)


def _told_once(result: ExecResult) -> bool:
    return [result.exit_code is not None, result.signal is not None, result.timed_out].count(True) == 1


@_check
async def tells_exit_codes(bench: Bench) -> None:
    handle = await bench.start()
    for code in (0, 1, 7, 255):
        result = await handle.exec(f"exit {code}")
        assert result.exit_code == code
        assert _told_once(result)


@_check
async def tells_signals_apart_from_exit_codes(bench: Bench) -> None:
    handle = await bench.start()
    result = await handle.exec("kill -TERM $$")
    assert (result.exit_code, result.signal, result.timed_out) == (None, 15, False)
    assert (await handle.exec("exit 143")).exit_code == 143


@_check
async def a_missing_program_is_127(bench: Bench) -> None:
    handle = await bench.start()
    result = await handle.exec(["no-such-program-at-all"])
    assert result.exit_code == 127
    assert b"no-such-program-at-all" in result.stderr


@_check
async def an_argument_list_meets_no_shell(bench: Bench) -> None:
    handle = await bench.start()
    assert (await handle.exec(["printf", "%s|", "a b", "$HOME", "'"])).stdout == b"a b|$HOME|'|"


@_check
async def keeps_stdout_and_stderr_apart(bench: Bench) -> None:
    handle = await bench.start()
    result = await handle.exec("echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


@_check
async def carries_any_bytes(bench: Bench) -> None:
    handle = await bench.start()
    every = bytes(range(256)) * 300
    assert (await handle.exec(["cat"], stdin=every)).stdout == every
    await handle.upload("bytes", every)
    assert (await handle.exec("cat bytes")).stdout == every
    assert await handle.download("bytes") == every


@_check
async def without_stdin_a_command_reads_nothing(bench: Bench) -> None:
    handle = await bench.start()
    assert (await handle.exec("cat; echo done")).stdout == b"done\n"


@_check
async def output_is_bounded_and_the_rest_drained(bench: Bench) -> None:
    handle = await bench.start()
    result = await handle.exec("echo front; head -c 5000000 /dev/zero; exit 4", max_output_bytes=1000)
    assert result.exit_code == 4
    assert len(result.stdout) == 1000
    assert result.stdout.startswith(b"front\n")
    assert result.truncated


@_check
async def output_streams_while_the_command_runs(bench: Bench) -> None:
    handle = await bench.start()
    first = asyncio.Event()
    pieces: list[bytes] = []

    def sink(_name: str, data: bytes) -> None:
        pieces.append(data)
        first.set()

    running = asyncio.create_task(
        handle.exec("echo one; while [ ! -e go ]; do sleep 0.02; done; echo two", on_output=sink)
    )
    await first.wait()
    assert not running.done()
    await handle.upload("go", b"")
    assert (await running).stdout == b"one\ntwo\n"
    assert b"".join(pieces) == b"one\ntwo\n"


@_check
async def the_environment_is_clean(bench: Bench) -> None:
    os.environ["GANGLINE_CONFORMANCE_SECRET"] = "leaked"
    try:
        handle = await bench.start(env={"FROM_SPEC": "1"})
        lines = (await handle.exec("env", env={"FROM_CALL": "2"})).stdout.decode().splitlines()
    finally:
        del os.environ["GANGLINE_CONFORMANCE_SECRET"]
    seen = dict(line.split("=", 1) for line in lines)
    assert "GANGLINE_CONFORMANCE_SECRET" not in seen
    assert (seen["FROM_SPEC"], seen["FROM_CALL"], seen["HOME"]) == ("1", "2", handle.home)
    assert seen["LANG"] == "C.UTF-8"


@_check
async def starts_in_the_workdir_and_honours_cwd(bench: Bench) -> None:
    handle = await bench.start()
    assert (await handle.exec("pwd")).stdout.decode().strip() == handle.workdir
    await handle.upload("sub/file", b"x")
    assert (await handle.exec("pwd", cwd="sub")).stdout.decode().strip() == f"{handle.workdir}/sub"
    assert (await handle.exec("pwd", cwd=handle.home)).stdout.decode().strip() == handle.home


@_check
async def home_and_workdir_are_writable_and_last(bench: Bench) -> None:
    handle = await bench.start()
    assert (await handle.exec("echo a > ~/kept && echo b > kept && mkdir -p d/e")).ok
    assert (await handle.exec("cat ~/kept kept")).stdout == b"a\nb\n"


@_check
async def files_in_one_sandbox_are_not_in_another(bench: Bench) -> None:
    one, two = await asyncio.gather(bench.start(), bench.start())
    await one.upload("mine", b"1")
    assert (await two.exec("test -e mine || test -e ~/mine")).exit_code == 1


@_check
async def uploads_make_parents_and_set_the_mode(bench: Bench) -> None:
    handle = await bench.start()
    await handle.upload("a/b/run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert (await handle.exec(["./a/b/run.sh"])).stdout == b"ran\n"
    await handle.upload("a/b/run.sh", b"new")
    assert await handle.download(f"{handle.workdir}/a/b/run.sh") == b"new"
    assert (await handle.exec("echo more >> a/b/run.sh && touch a/b/other")).ok, "the agent owns what is uploaded"


@_check
async def download_follows_no_link(bench: Bench) -> None:
    handle = await bench.start()
    await handle.exec(
        "ln -s /etc/passwd link; ln -s /etc folder; mkdir real; ln -s ../real real/loop; ln -s real/x dangling"
    )
    for path in ("link", "folder/passwd", "dangling"):
        with _refused():
            await handle.download(path)


@_check
async def upload_follows_no_link(bench: Bench) -> None:
    handle = await bench.start()
    outside = bench.root / "outside"
    outside.mkdir()
    try:
        await handle.exec(f"ln -s {outside} folder; ln -s {outside}/file link")
        with _refused():
            await handle.upload("folder/planted", b"x")
        with contextlib.suppress(InvalidRequest):
            await handle.upload("link", b"x")
        assert not os.listdir(outside)
    finally:
        outside.rmdir()


@_check
async def paths_do_not_escape(bench: Bench) -> None:
    handle = await bench.start()
    for path in ("../x", "a/../../x", f"{handle.workdir}/../x", "", ".", "/"):
        with _refused():
            await handle.download(path)
        with _refused():
            await handle.upload(path, b"x")


@_check
async def only_regular_files_come_out(bench: Bench) -> None:
    handle = await bench.start()
    await handle.exec("mkfifo pipe; mkdir folder; ln /dev/null hard 2>/dev/null; true")
    for path in ("pipe", "folder"):
        with _refused():
            await handle.download(path)
    with _raises(NotFound):
        await handle.download("absent")


@_check
async def downloads_are_bounded(bench: Bench) -> None:
    handle = await bench.start()
    await handle.exec("truncate -s 1T huge; printf 12345 > five")
    with _raises(LimitExceeded):
        await handle.download("huge", max_bytes=1 << 20)
    with _raises(LimitExceeded):
        await handle.download("five", max_bytes=4)
    assert await handle.download("five", max_bytes=5) == b"12345"


@_check
async def timeout_kills_the_whole_tree(bench: Bench) -> None:
    handle = await bench.start()
    command = _DAEMON.format(beat="beat") + "; trap '' TERM; (sleep 1000 &); sleep 1000"
    running = asyncio.create_task(handle.exec(command, timeout_s=3.0))
    await _until_beating(handle)
    result = await running
    assert (result.exit_code, result.signal, result.timed_out) == (None, None, True)
    assert not await _beats(handle), "a daemonised grandchild outlived the timeout"


@_check
async def cancel_kills_the_whole_tree(bench: Bench) -> None:
    handle = await bench.start()
    running = asyncio.create_task(handle.exec(_DAEMON.format(beat="beat") + "; sleep 1000"))
    await _until_beating(handle)
    running.cancel()
    with _raises(asyncio.CancelledError):
        await running
    assert not await _beats(handle), "a daemonised grandchild outlived the cancel"
    assert (await handle.exec("echo alive")).stdout == b"alive\n"


@_check
async def timeout_of_one_command_spares_another(bench: Bench) -> None:
    handle = await bench.start()
    other = asyncio.create_task(handle.exec("touch ready; while [ ! -e go ]; do sleep 0.02; done; echo spared"))
    while True:
        with contextlib.suppress(NotFound):
            await handle.download("ready")
            break
        await asyncio.sleep(0.02)
    assert (await handle.exec("sleep 1000", timeout_s=0.2)).timed_out
    await handle.upload("go", b"")
    assert (await other).stdout == b"spared\n"


@_check
async def background_children_outlive_their_command_but_not_kill(bench: Bench) -> None:
    handle = await bench.start()
    assert (await handle.exec(_DAEMON.format(beat="beat"))).ok
    await _until_beating(handle)
    assert await _beats(handle), "a background child died with its command"
    await handle.kill()
    assert not await _beats(handle), "a background child outlived kill"


@_check
async def a_background_child_does_not_hold_its_command_up(bench: Bench) -> None:
    handle = await bench.start()
    result = await handle.exec("sleep 1000 & echo started", timeout_s=30)
    assert (result.exit_code, result.stdout) == (0, b"started\n")


@_check
async def kill_keeps_files_and_exec_works_again(bench: Bench) -> None:
    handle = await bench.start()
    running = asyncio.create_task(handle.exec("echo x > here; echo y > /tmp/there; touch ready; sleep 1000"))
    await _until_present(handle, "ready")
    await handle.kill()
    ended = await running
    assert ended.exit_code is None
    assert not ended.timed_out
    assert (await handle.exec("cat here")).stdout == b"x\n"
    if bench.isolated:
        assert (await handle.exec("cat /tmp/there")).stdout == b"y\n"
    assert (await handle.exec(_dial(bench.proxy_port))).stdout == b"proxy:hello\n"


async def _until_present(handle: RuntimeHandle, path: str) -> None:
    while True:
        with contextlib.suppress(NotFound):
            await handle.download(path)
            return
        await asyncio.sleep(0.02)


@_check
async def commands_run_at_the_same_time(bench: Bench) -> None:
    handle = await bench.start()
    names = [f"meet{number}" for number in range(4)]
    wait = " && ".join(f"[ -e {name} ]" for name in names)
    results = await asyncio.gather(
        *(handle.exec(f"touch {name}; until {wait}; do sleep 0.02; done; echo {name}") for name in names)
    )
    assert [result.stdout.decode().strip() for result in results] == names


@_check
async def sandboxes_start_at_the_same_time(bench: Bench) -> None:
    handles = await asyncio.gather(*(bench.start() for _number in range(4)))
    results = await asyncio.gather(*(handle.exec("pwd") for handle in handles))
    assert all(result.ok for result in results)


@_check
async def stop_is_idempotent_and_final(bench: Bench) -> None:
    handle = await bench.start()
    running = asyncio.create_task(handle.exec("touch ready; sleep 1000"))
    await _until_present(handle, "ready")
    await asyncio.gather(handle.stop(), handle.stop())
    await handle.stop()
    assert (await running).exit_code is None
    with _raises(RuntimeFailed):
        await handle.exec("true")
    with _raises(RuntimeFailed):
        await handle.download("ready")


@_check
async def stop_removes_what_the_agent_made_hard_to_remove(bench: Bench) -> None:
    handle = await bench.start()
    await handle.exec("mkdir -p shut/inner && touch shut/inner/f && chmod 000 shut/inner shut; ln -s / root")
    deep = "import os\nfor _ in range(1500): os.mkdir('deep'); os.chdir('deep')"
    await handle.exec(["python3", "-c", deep])
    await handle.stop()


@_check
async def tells_the_truth_about_limits(bench: Bench) -> None:
    limits = LimitsSpec(memory_bytes=256 << 20, max_pids=40, max_file_bytes=1 << 20, cpus=1.0)
    handle = await bench.start(limits=limits)
    told = handle.limits()
    assert set(LimitsSpec.model_fields) <= set(told)
    if told["max_file_bytes"] != "not enforced":
        await handle.exec("head -c 3000000 /dev/zero > big")
        assert len(await handle.download("big")) <= 1 << 20
    if told["memory_bytes"] != "not enforced":
        greedy = await handle.exec(["python3", "-c", "x = bytearray(600 << 20); x[::4096] = b'1' * len(x[::4096])"])
        assert not greedy.ok, "memory was said to be limited"
    if told["max_pids"] != "not enforced":
        forks = "import os, time\nfor _ in range(100):\n  if os.fork() == 0: time.sleep(30)"
        many = await handle.exec(["python3", "-c", forks], timeout_s=30)
        assert many.exit_code == 1, f"the number of processes was said to be limited: {many}"


@_check
async def reap_removes_a_lost_sandbox_and_keeps_the_others(bench: Bench) -> None:
    lost, kept = await asyncio.gather(bench.start(), bench.start())
    for handle in (lost, kept):
        await handle.exec(_DAEMON.format(beat="beat"))
        await _until_beating(handle)
    assert await bench.runtime.reap("someone-else", bench.root) == 0
    assert await bench.runtime.reap(bench.owner, bench.root, frozenset({kept.runtime_id})) == 1
    assert not (bench.root / lost.runtime_id).exists()
    assert await _beats(kept), "reap ended a sandbox that it was told to keep"
    assert await bench.runtime.reap(bench.owner, bench.root, frozenset({kept.runtime_id})) == 0


@_check
async def the_proxy_is_reached_and_streams(bench: Bench) -> None:
    handle = await bench.start()
    assert handle.proxy_url == f"http://127.0.0.1:{bench.proxy_port}" or bench.isolated
    assert handle.proxy_url is not None
    port = int(handle.proxy_url.rpartition(":")[2])
    assert (await handle.exec(_dial(port))).stdout == b"proxy:hello\n"
    program = (
        f"import socket; s = socket.create_connection(('127.0.0.1', {port})); f = s.makefile('rwb')\n"
        "for n in range(200):\n  f.write(b'%d ' % n + b'x' * 20000 + b'\\n'); f.flush()\n"
        "  assert f.readline().startswith(b'proxy:%d ' % n)\n"
        "s.shutdown(socket.SHUT_WR); assert f.read() == b''; print('streamed')"
    )
    result = await handle.exec(["python3", "-c", program])
    assert result.stdout == b"streamed\n", result


@_needs_isolation
async def under_proxy_nothing_else_is_reachable(bench: Bench) -> None:
    async with _proxy() as other_port:
        handle = await bench.start()
        assert not (await handle.exec(_dial(other_port))).ok, "a service on the host's loopback was reached"
    for host in ("1.1.1.1", "10.0.0.1"):
        result = await handle.exec(_dial(80, host=host))
        assert b"unreachable" in result.stderr, f"the outside must be unreachable at once: {result}"


@_needs_isolation
async def under_none_there_is_no_proxy(bench: Bench) -> None:
    handle = await bench.start(network="none")
    assert handle.proxy_url is None
    assert not (await handle.exec(_dial(bench.proxy_port))).ok


@_needs_isolation
async def the_agent_is_not_root_and_not_process_one(bench: Bench) -> None:
    handle = await bench.start()
    assert (await handle.exec("id -u")).stdout.strip() != b"0"
    assert (await handle.exec("echo $$")).stdout.strip() != b"1"
    assert not (await handle.exec("cat /etc/shadow")).ok


@_needs_isolation
async def the_host_is_read_only_and_its_processes_invisible(bench: Bench) -> None:
    handle = await bench.start()
    assert not (await handle.exec("touch /usr/x /etc/x /x 2>/dev/null")).ok
    assert (
        await handle.exec(
            f"test -e /proc/{os.getpid()}/environ && tr '\\0' '\\n' < /proc/{os.getpid()}/environ | grep -q ^PATH="
        )
    ).exit_code != 0
    assert not (await handle.exec(["test", "-e", str(bench.root)])).ok


@_needs_isolation
async def an_agent_that_kills_all_it_can_ends_only_itself(bench: Bench) -> None:
    handle = await bench.start()
    result = await handle.exec("kill -9 -1; sleep 1000", timeout_s=2)
    assert not result.ok
    assert (await handle.exec("echo again")).stdout == b"again\n"


@contextlib.contextmanager
def _raises(kind: type[BaseException]) -> Generator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} expected")


def _refused() -> contextlib.AbstractContextManager[None]:
    return _raises(CallerError)
