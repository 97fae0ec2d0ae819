"""A node as the benchmark of the proxy needs it: sessions, proxy and a journal on disk; no tasks, no sandboxes.

    python bench/proxy_node.py ENGINE_URL PORT FOLDER NUM_SESSIONS [SERVER_URL [CAPTURE]]

Sessions are `s0`, `s1` ... with the keys `gls-bench-s0` ...; CAPTURE is a task's `capture`, as JSON.
`POST /bench/renew/{session}` ends one and opens it anew, as a node does when a session's result is safe.
`POST /bench/result/{session}` reads a session's records, builds its traces and encodes its result, as a node does when
its agent has ended. `GET /bench/stats` gives the process's memory, CPU time and the event loop's lags since the last
such call. With a server's URL, which may be empty, all records are sent there, as with `capture.durable: turn`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from gangline.domain.completion import Completion
from gangline.domain.session import SessionResult
from gangline.domain.task import CaptureSpec
from gangline.domain.tokens import encode_msgpack
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.reading.pool import Readers
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.health.interpreter import collect_forever, settle_interpreter
from gangline.node.sessions.reuse.turns import TurnSender
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from gangline.rows.chains import built
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal
from gangline.wire.client.server import ServerClient

KEY = "gls-bench"
LAG_EVERY_S = 0.005


class BenchNode:
    def __init__(self, engine_urls: list[str], folder: Path, capture: CaptureSpec) -> None:
        """Sessions take turns in which engine they have."""
        self._capture = capture
        self.engines = [VllmEngine(url) for url in engine_urls]
        self.journal = Journal.open(folder)
        self.readers = Readers()
        self.proxy = Proxy(readers=self.readers)
        self.lags_s: list[float] = []
        self.num_by_source: Counter[str] = Counter()
        """Completions by where their prompt's ids came from."""
        self.journal.on_kept.append(self._count)
        self._sessions: dict[str, ModelSession] = {}
        self._sender: TurnSender | None = None

    def _count(self, completions: Sequence[Completion], payload: bytes) -> None:
        self.num_by_source.update(completion.certificate.prompt_source for completion in completions)

    def send_turns(self, sender: TurnSender) -> None:
        self._sender = sender

    async def open(self, session_id: str) -> None:
        if self._sender is not None:
            self._sender.follow(AttemptKey(session_id, 1), 1)
        await self.journal.open_attempt(AttemptOpened(session_id, 1, "task", 1))
        engine = self.engines[int(session_id[1:]) % len(self.engines)]
        spec = SessionSpec(session_id=session_id, attempt=1, key=f"{KEY}-{session_id}", capture=self._capture)
        session = ModelSession(spec, engine, self.journal)
        self._sessions[session_id] = session
        self.proxy.add(session)

    async def renew(self, request: web.Request) -> web.Response:
        session_id = request.match_info["session"]
        await self._sessions[session_id].fence("the session is over")
        self.proxy.remove(session_id)
        await self.journal.close_attempt(AttemptKey(session_id, 1))
        await self.open(session_id)
        return web.Response()

    async def result(self, request: web.Request) -> web.Response:
        session_id = request.match_info["session"]
        completions = tuple(await self.journal.read(AttemptKey(session_id, 1)))
        size = await asyncio.to_thread(_encoded_bytes, session_id, completions)
        return web.json_response({"result_bytes": size})

    async def stats(self, request: web.Request) -> web.Response:
        lags = sorted(self.lags_s) or [0.0]
        self.lags_s = []
        return web.json_response(
            {
                "rss_mb": _rss_bytes() / 1e6,
                "num_stitched": self.num_by_source["stitched"],
                "cpu_s": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
                "kernel_s": resource.getrusage(resource.RUSAGE_SELF).ru_stime,
                "num_lags": len(lags),
                "lag_p50_ms": 1000 * lags[len(lags) // 2],
                "lag_p99_ms": 1000 * lags[int(0.99 * (len(lags) - 1))],
                "lag_max_ms": 1000 * lags[-1],
            }
        )

    async def watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_at = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.lags_s.append(loop.time() - due_at)


def _encoded_bytes(session_id: str, completions: tuple[Completion, ...]) -> int:
    trajectory = built(PrefixMergingBuilder(), completions, session_id=session_id, task_id="task")
    result = SessionResult(
        session_id=session_id,
        task_id="task",
        node_id="bench",
        attempt=1,
        fence=1,
        outcome="completed",
        reward=1.0,
        trajectory=trajectory,
        completions=completions,
    )
    return len(encode_msgpack(result))


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def main(
    engine_urls: str, port: str, folder: str, num_sessions: str, server_url: str = "", capture: str = "{}"
) -> None:
    """engine_urls: separated by commas."""
    node = BenchNode(engine_urls.split(","), Path(folder), CaptureSpec.model_validate_json(capture))
    if not server_url:
        await serve(node, port, num_sessions)
        return
    async with ServerClient(server_url) as client:
        sender = TurnSender("bench", client, node.journal.on_kept)
        node.send_turns(sender)
        sending = asyncio.create_task(sender.run())
        await serve(node, port, num_sessions)
        sending.cancel()


async def serve(node: BenchNode, port: str, num_sessions: str) -> None:
    for engine in node.engines:
        await engine.probe()
    for number in range(int(num_sessions)):
        await node.open(f"s{number}")
    app = web.Application()
    app.add_routes(
        [
            web.get("/bench/stats", node.stats),
            web.post("/bench/renew/{session}", node.renew),
            web.post("/bench/result/{session}", node.result),
            *node.proxy.routes(),
        ]
    )
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, auto_decompress=False)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port), backlog=1024).start()
    settle_interpreter()
    await asyncio.gather(node.watch_lag(), collect_forever())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
