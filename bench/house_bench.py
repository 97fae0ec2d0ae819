"""How many files a reader must open to follow one model call, and one task from its submission to its result.

Server and node are the real ones, in this process and on a disk; a tracer notes the files of `gangline` in which a
function is entered. Importing a module does not count. The engine and the agent are their own processes, and the
runtime starts nothing. The smallest of several counts: what happens from time to time belongs to no call and no task.
`python bench/house_bench.py` lists the files, and `--check`, a part of `make check`, holds their numbers.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from no_runtime import NoHandle, NoRuntime

import gangline
from gangline.domain.node_views import OpenedSession
from gangline.domain.sandbox import ExecRequest, ExecResult, OutputSink, RuntimeStart, Sandbox
from gangline.node.node import serve as serve_node
from gangline.server.run import serve as serve_server
from gangline.settings import plugins
from gangline.settings.node import NodeSettings
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient

BENCH = Path(__file__).parent
SOURCE = f"{Path(gangline.__file__).parent}/"
ROUNDS = 5
BOUNDS = {"call": 42, "task": 116}
"""Files. Work in the background, such as a scrape or a heartbeat, may enter two more than a task does."""
_ASK = """
import json, sys, urllib.request
url, key = sys.argv[1:]
body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "Say hello."}]}).encode()
head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, head)) as reply:
    json.load(reply)["choices"]
"""

Figures = dict[str, dict[str, Any]]


class Tracer:
    """The files of the source in which functions are entered, in any thread that starts after `install`."""

    def __init__(self) -> None:
        self._files: set[str] | None = None

    def install(self) -> None:
        threading.setprofile(self._entered)
        sys.setprofile(self._entered)

    @contextmanager
    def watching(self) -> Generator[set[str]]:
        """Yields the files, as paths inside the package; they are complete when the block ends."""
        files = self._files = set[str]()
        try:
            yield files
        finally:
            self._files = None

    def _entered(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._files is not None and event == "call" and code.co_name != "<module>":
            path = code.co_filename
            if path.startswith(SOURCE):
                self._files.add(path.removeprefix(SOURCE))


async def ask(base_url: str, key: str) -> int:
    """One model call of an agent, which is its own process. Returns its exit code."""
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", _ASK, base_url, key)
    return await agent.wait()


class AskingRuntime(NoRuntime):
    async def start(self, start: RuntimeStart) -> Sandbox:
        return _AskingHandle(start)


class _AskingHandle(NoHandle):
    def __init__(self, start: RuntimeStart) -> None:
        super().__init__(start.runtime_id, f"http://127.0.0.1:{start.proxy_port}")

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        return ExecResult(exit_code=await ask(request.env["OPENAI_BASE_URL"], request.env["OPENAI_API_KEY"]))


@asynccontextmanager
async def served(serve: Any, **options: Any) -> AsyncGenerator[str]:
    """The URL of a server or node in this process."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(control_token=None, on_ready=ready.set_result, **options))
    await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result()
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


@asynccontextmanager
async def mock_engine() -> AsyncGenerator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = await asyncio.create_subprocess_exec(sys.executable, BENCH / "mock_engine.py", "100", "20", str(port))
    try:
        while engine.returncode is None:
            with suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            engine.terminate()
        await engine.wait()


async def files_of(tracer: Tracer, rounds: list[Coroutine[Any, Any, None]]) -> set[str]:
    """The fewest files that one of the rounds entered; the first one only warms up."""
    found: list[set[str]] = []
    for one in rounds:
        with tracer.watching() as files:
            await one
        found.append(files)
    return min(found[1:], key=len)


async def one_call(opened: OpenedSession) -> None:
    assert await ask(opened.base_url, opened.api_key) == 0


async def one_task(client: ServerClient, task_id: str) -> None:
    agent = {"harness": "shell", "settings": {"command": "ask"}}
    await client.submit_many([{"task_id": task_id, "instruction": "Say hello.", "agent": agent}])
    view = await client.wait(task_id)
    assert view.outcomes == {"completed": 1}, view.outcomes


async def measure() -> tuple[set[str], set[str]]:
    """The files of a call, and of a task."""
    tracer = Tracer()
    tracer.install()
    plugins.make_runtime = lambda name: AskingRuntime()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-")))
        engine_url = await stack.enter_async_context(mock_engine())
        server_url = await stack.enter_async_context(served(serve_server, data_dir=folder / "server"))
        node_url = await stack.enter_async_context(
            served(
                partial(serve_node, NodeSettings(engines=(engine_url,))),
                data_dir=folder / "node",
                node_id="n1",
                server_url=server_url,
            )
        )
        node = await stack.enter_async_context(NodeClient(node_url, None))
        client = await stack.enter_async_context(ServerClient(server_url, None))
        opened = await node.open_session()
        call_files = await files_of(tracer, [one_call(opened) for _ in range(ROUNDS)])
        await node.abort_session(opened.session_id)
        task_files = await files_of(tracer, [one_task(client, f"t{number}") for number in range(ROUNDS)])
    return call_files, task_files


def measured() -> list[set[str]]:
    """Once more, up to twice, where a bound is passed: what a busy machine does in the background only adds files."""
    found = list(asyncio.run(measure()))
    for _again in range(2):
        if all(len(files) <= bound for files, bound in zip(found, BOUNDS.values(), strict=True)):
            break
        found = [min(pair, key=len) for pair in zip(found, asyncio.run(measure()), strict=True)]
    return found


def run() -> Figures:
    """Measure; figure name -> {value, unit, note}. Half a minute."""
    call_files, task_files = measured()
    note = f"in which a function is entered, least of {ROUNDS - 1}; engine and agent are other processes; {{}}"
    call_note = note.format("one chat call, not streamed, from request to reply")
    task_note = note.format("one task with one such call, from `submit` to the result, in client, server and node")
    return {
        "house.call_files": {"value": len(call_files), "unit": "files", "note": call_note},
        "house.task_files": {"value": len(task_files), "unit": "files", "note": task_note},
    }


def main() -> int:
    """Lists the files; with --check only their numbers, and 1 where there are more than the bound."""
    is_check = "--check" in sys.argv[1:]
    num_over = 0
    for (title, bound), files in zip(BOUNDS.items(), measured(), strict=True):
        print(f"{datetime.now(UTC).date()} {title}: {len(files)} files (at most {bound})")
        num_over += len(files) > bound
        if not is_check:
            print(*sorted(files), sep="\n  ")
    return 1 if is_check and num_over else 0


if __name__ == "__main__":
    sys.exit(main())
