"""The test bench of a check: sandboxes of the runtime under test, a proxy for them, and ways to find live processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import unittest
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path

from gangline.domain.errors import CallerError, NotFound
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Checkpoint, ExecResult, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import LimitsSpec, NetworkPolicy, RuntimeSpec, SystemCall

NOT_ENFORCED = "not enforced"
"""Value in `limits()` for a limit, or the network, that the runtime cannot enforce."""
NOT_SUPPORTED = "not supported"
"""Value in `limits()` for a feature that the runtime does not have."""
_PATIENCE_S = 120.0
_PAUSE_S = 0.02
"""Seconds between two polls."""


class Bench:
    """Starts sandboxes of the runtime under test, and a proxy for them."""

    def __init__(self, runtime: Runtime, root: Path, proxy: Proxy, *, isolated: bool, image: str | None) -> None:
        self.runtime = runtime
        self.root = root
        self.proxy = proxy
        self.isolated = isolated
        self.image = image
        self.owner = new_id("conformance")
        self._sandboxes: list[Sandbox] = []

    async def start(
        self,
        *,
        network: NetworkPolicy = "proxy",
        allow: tuple[str, ...] = (),
        limits: LimitsSpec | None = None,
        env: dict[str, str] | None = None,
        system_calls: tuple[SystemCall, ...] = (),
        base: Checkpoint | None = None,
    ) -> Sandbox:
        spec = RuntimeSpec(
            backend=self.runtime.name,
            image=self.image,
            network=network,
            network_allow=allow,
            system_calls_allow=system_calls,
            limits=limits or LimitsSpec(),
            env=env or {},
            workdir="/workspace",
        )
        return await self.start_of(new_id("runtime"), spec, base=base)

    async def start_of(
        self, runtime_id: str, spec: RuntimeSpec, hidden: tuple[Path, ...] = (), base: Checkpoint | None = None
    ) -> Sandbox:
        start = RuntimeStart(
            runtime_id=runtime_id,
            owner=self.owner,
            spec=spec,
            folder=self.root / runtime_id,
            proxy_port=self.proxy.port,
            hidden=hidden,
            base=base,
        )
        sandbox = await self.runtime.start(start)
        self._sandboxes.append(sandbox)
        return sandbox

    async def release(self, *checkpoints: Checkpoint) -> None:
        for checkpoint in checkpoints:
            await self.runtime.release(checkpoint)

    async def stop_all(self) -> None:
        for sandbox in self._sandboxes:
            await sandbox.stop()


Check = Callable[[Bench], Awaitable[None]]


class Checks:
    """The checks of one module, in order."""

    def __init__(self) -> None:
        self._all: list[Check] = []
        self._isolation: set[Check] = set()

    def add(self, check: Check) -> Check:
        """Add a check for every runtime."""
        self._all.append(check)
        return check

    def isolation(self, check: Check) -> Check:
        """Add a check for runtimes that promise isolation."""
        self._isolation.add(check)
        return self.add(check)

    def applying(self, *, isolated: bool) -> list[Check]:
        return [check for check in self._all if isolated or check not in self._isolation]


async def run_check(check: Check, runtime: Runtime, root: Path, *, isolated: bool, image: str | None = None) -> None:
    """Run one check against a runtime; `root` is an empty folder.

    Raises: AssertionError; unittest.SkipTest if the runtime reports that it lacks the checked feature.
    """
    async with proxies() as proxy:
        bench = Bench(runtime, root, proxy, isolated=isolated, image=image)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await check(bench)
        finally:
            await bench.stop_all()
    left = os.listdir(root)
    assert not left, f"stop left {left} behind"


class Proxy:
    """Replaces the node's proxy: answers a line with `proxy:` and the line.

    A connection that has sent `hold NAME` shows whether its process lives: it ends with the process.
    """

    def __init__(self) -> None:
        self.port = 0
        self._begun: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._ended: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def held(self, name: str) -> None:
        """Returns when a connection has sent this name."""
        await self._begun[name].wait()

    async def ended(self, name: str) -> None:
        """Returns when the connection of that name has ended."""
        await self._ended[name].wait()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        names: list[str] = []
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                if line.startswith(b"hold "):
                    names.append(line.removeprefix(b"hold ").decode().strip())
                    self._begun[names[-1]].set()
                writer.write(b"proxy:" + line)
                await writer.drain()
        for name in names:
            self._ended[name].set()
        writer.close()


@contextlib.asynccontextmanager
async def proxies() -> AsyncGenerator[Proxy]:
    """A proxy on its own port, on the host's loopback."""
    proxy = Proxy()
    server = await asyncio.start_server(proxy.answer, "127.0.0.1", 0, limit=1 << 24)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()


def dial(url_or_port: str | int | None, line: str = "hello", host: str = "127.0.0.1") -> list[str]:
    """A command that sends a line to an address (a proxy's URL, or a port of `host`) and prints the answer."""
    assert url_or_port is not None, "a URL of the proxy expected"
    if isinstance(url_or_port, str):
        host, _, url_or_port = url_or_port.removeprefix("http://").rpartition(":")
    program = (
        f"import socket; s = socket.create_connection(({host!r}, {url_or_port}), 5); "
        f"s.sendall({line!r}.encode() + b'\\n'); print(s.makefile().readline().strip())"
    )
    return ["python3", "-c", program]


def daemon(lock: str = "lock", prelude: str = "") -> str:
    """A shell command that leaves a grandchild in a separate session, whose parent is gone, holding a lock.

    `prelude`: the grandchild's first commands.
    """
    inner = f"{prelude}exec 9> {lock}; flock 9; touch {lock}.held; sleep 100000"
    return f"setsid sh -c '({inner}) &' > /dev/null 2>&1 < /dev/null"


async def until_held(sandbox: Sandbox, lock: str = "lock") -> None:
    await until_present(sandbox, f"{lock}.held")


async def is_held(sandbox: Sandbox, lock: str = "lock") -> bool:
    """Whether any process still holds the lock."""
    result = await sandbox.exec(["flock", "--nonblock", "--conflict-exit-code", "9", lock, "true"])
    assert result.exit_code in (0, 9), f"flock itself failed: {result}"
    return result.exit_code == 9


async def is_let_go(sandbox: Sandbox, lock: str = "lock", within_s: float = 10.0) -> bool:
    """Whether the last process that holds the lock ends within this time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                if not await is_held(sandbox, lock):
                    return True
                await asyncio.sleep(_PAUSE_S)
    return False


async def until_present(sandbox: Sandbox, path: str) -> None:
    while True:
        with contextlib.suppress(NotFound):
            await sandbox.download(path)
            return
        await asyncio.sleep(_PAUSE_S)


async def timed_out_beside(sandbox: Sandbox, command: str, lock: str = "lock") -> ExecResult:
    """Run a command until it times out, with enough time for it to take the lock."""
    timeout_s = 1.0
    while True:
        result = await sandbox.exec(command, timeout_s=timeout_s)
        assert result.timed_out, f"the command was to run into its timeout: {result}"
        with contextlib.suppress(NotFound):
            await sandbox.download(f"{lock}.held")
            return result
        timeout_s *= 3


def promised(sandbox: Sandbox, name: str) -> str:
    """How the runtime enforces a limit, or the network. Raises: unittest.SkipTest if it reports that it does not."""
    state = sandbox.limits().get(name, NOT_ENFORCED)
    if state in (NOT_ENFORCED, NOT_SUPPORTED):
        raise unittest.SkipTest(f"does not apply: the runtime says that {name} is {state}")
    return state


@contextlib.contextmanager
def raises(kind: type[BaseException]) -> Generator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} expected")


def refused() -> contextlib.AbstractContextManager[None]:
    return raises(CallerError)
