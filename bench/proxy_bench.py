"""Speed and memory of the proxy, alongside its peers, over an engine that answers at once.

Engine (`mock_engine.py`), proxy and load (`load_client.py`) are their own processes. Ours is a node's proxy with
capture, certificates and the journal on disk (`proxy_node.py`). Peers come from PyPI into their own environments
(`peer_environments.py`) and are started as their own commands start them, without access logs. Every call is a first
turn with its own text, so nothing is answered from a memory of earlier calls; but memory is measured with
conversations, whose turns are stitched, and whose sessions end. Systems take turns; the median of the rounds counts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cpu_quota import quota
from load_client import HttpClient, Load, drive, get, post
from peer_environments import peer_python

BENCH = Path(__file__).parent
ROUNDS = 3
ROUND_S = 0.8
NUM_SESSIONS = 256
QUOTA = 0.25
SIZES = {"small": (300, 50), "2k_200": (2_000, 200), "20k_500": (20_000, 500)}
PEERS = {
    "agentlightning": ("agentlightning==1.0.2", "agent_lightning.py", (3, 12)),
    "rllm": ("rllm-model-gateway==0.1.0", "rllm_gateway.py", (3, 10)),
    "openenv": ("openenv==0.10.0", "openenv_capture.py", (3, 10)),
}
PATHS = {
    "direct": "/v1/chat/completions",
    "ours": "/s/s{}/v1/chat/completions",
    "durable": "/s/s{}/v1/chat/completions",
    "elsewhere": "/s/s{}/v1/chat/completions",
    "agentlightning": "/proxy/rollout/s{}/attempt/a/mode/train/openai/v1/chat/completions",
    "rllm": "/sessions/s{}/v1/chat/completions",
    "openenv": "/v1/chat/completions",
}

Figures = dict[str, dict[str, Any]]


# -- processes ---------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def process(python: str | Path, *arguments: object, port: int) -> Generator[subprocess.Popen[bytes]]:
    """Started and listening on `port`; ended on leaving."""
    with tempfile.TemporaryFile() as log:
        command = [str(python), *(str(argument) for argument in arguments)]
        running = subprocess.Popen(command, stdout=log, stderr=log, cwd=BENCH)
        try:
            _wait_for(port, running, lambda: _tail(log))
            yield running
        finally:
            running.terminate()
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def _wait_for(port: int, running: subprocess.Popen[bytes], tail: Any) -> None:
    for _ in range(600):
        with socket.socket() as probing:
            if probing.connect_ex(("127.0.0.1", port)) == 0:
                return
        if running.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"{running.args} does not listen: {tail()}")


def _tail(log: Any) -> str:
    log.seek(0)
    return str(log.read()[-2000:].decode("utf-8", "replace"))


class Stand:
    """One engine, and the proxies before it that could be started."""

    def __init__(
        self,
        stack: ExitStack,
        size: str,
        *,
        events_per_s: int = 0,
        peers: bool = True,
        of_strangers: bool = False,
        elsewhere: bool = False,
        renders: bool = False,
        num_sessions: int = NUM_SESSIONS,
    ) -> None:
        """
        events_per_s: tokens that the engine gives an answer in a second; 0 is all at once.
        of_strangers: every second session, from the first on, has its own engine, which yields to all else.
        elsewhere: start a second node of ours, with the same engines.
        renders: prompts are the engine's rendering, so that conversations are stitched.
        """
        self.size = size
        self._stack = stack
        self._num_sessions = num_sessions
        self.ports = {"direct": free_port()}
        self.pids: dict[str, int] = {}
        num_prompt, num_sampled = SIZES[size]
        engine = (
            sys.executable,
            "mock_engine.py",
            num_prompt,
            num_sampled,
            self.ports["direct"],
            events_per_s,
            int(renders),
        )
        stack.enter_context(process(*engine, port=self.ports["direct"]))
        self._urls = [f"http://127.0.0.1:{self.ports['direct']}"]
        if of_strangers:
            port = free_port()
            strangers = ("nice", "-n", "10", *engine[:4], port, *engine[5:])
            stack.enter_context(process(*strangers, port=port))
            self._urls.insert(0, f"http://127.0.0.1:{port}")
        for name in ("ours", "elsewhere") if elsewhere else ("ours",):
            self._start(name, sys.executable, "proxy_node.py")
        for name in PEERS if peers else ():
            requirement, program, version = PEERS[name]
            if (python := peer_python(name, requirement, version)) is not None:
                self._start(name, python, f"peers/{program}")

    def _start(self, name: str, python: str | Path, program: str) -> None:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gangline-bench-"))
        port = self.ports[name] = free_port()
        urls = ",".join(self._urls)
        started = process(python, program, urls, port, folder, self._num_sessions, port=port)
        self.pids[name] = self._stack.enter_context(started).pid

    def load(self, system: str, concurrency: int, num_calls: int, *, stream: bool = False) -> Load:
        return self.loads([system], concurrency, num_calls, stream=stream)[0]

    def loads(self, systems: Sequence[str], concurrency: int, num_calls: int, *, stream: bool = False) -> list[Load]:
        """Of each system, all at the same time."""

        async def drive_all() -> list[Load]:
            return await asyncio.gather(
                *(
                    drive(self.ports[system], concurrency, num_calls, self._requests(system, concurrency, stream))
                    for system in systems
                )
            )

        return asyncio.run(drive_all())

    def _requests(self, system: str, concurrency: int, stream: bool) -> Callable[[int, int], tuple[bytes, ...]]:
        fields = {"model": "mock", "stream": stream, "max_tokens": SIZES[self.size][1]}
        content = f"{os.urandom(4).hex()} ######## " + "word" * SIZES[self.size][0]
        body = json.dumps(fields | {"messages": [{"role": "user", "content": content}]}, separators=(",", ":"))
        heads, tails = zip(
            *(
                post(PATHS[system].format(session), body.encode(), f"gls-bench-s{session}").split(b"########")
                for session in range(min(concurrency, NUM_SESSIONS))
            ),
            strict=True,
        )

        def request(worker: int, number: int) -> tuple[bytes, ...]:
            session = worker % NUM_SESSIONS
            return heads[session], b"%08d" % number, tails[session]

        return request

    def cpu_ms(self, system: str, concurrency: int, num_calls: int) -> float:
        """Processor time of a node of ours for a call, under load."""
        before = self.stats(system)["cpu_s"]
        self.load(system, concurrency, num_calls)
        time.sleep(0.5)  # for what it does behind the last answer
        return 1000 * (self.stats(system)["cpu_s"] - before) / num_calls

    def stats(self, system: str = "ours") -> dict[str, float]:
        async def ask() -> bytes:
            client = await HttpClient.connect(self.ports[system])
            answer = await client.send(get("/bench/stats"))
            client.close()
            return answer

        return json.loads(asyncio.run(ask()))


# -- measurements ------------------------------------------------------------------------------------------------


def rates(
    stand: Stand, systems: Sequence[str], concurrency: int, *, stream: bool = False, rounds: int = ROUNDS
) -> dict[str, float]:
    """Calls per second of each system, the median of the rounds."""
    num_calls: dict[str, int] = {}
    for system in systems:
        guess = stand.load(system, concurrency, max(concurrency, 8), stream=stream).rate  # warms up too
        num_calls[system] = max(concurrency, int(guess * ROUND_S))
    found: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system in systems:
            found[system].append(stand.load(system, concurrency, num_calls[system], stream=stream).rate)
    return {system: statistics.median(values) for system, values in found.items()}


def rate_figures(size: str) -> Figures:
    """Calls per second at every concurrency, and by how much we lead the best peer at 32."""
    figures: Figures = {}
    with ExitStack() as stack:
        stand = Stand(stack, size)
        everyone = list(stand.ports)
        peers = [name for name in PEERS if name in stand.ports]
        alone = ["direct", "ours"]
        missing = f"; not measured: {', '.join(set(PEERS) - set(peers))}" if len(peers) < len(PEERS) else ""
        for concurrency, stream in itertools.product((1, 32, 256), (False, True)):
            # Agent Lightning refuses streams; 256 streams of the other peers take minutes.
            streaming = [*alone, *(peer for peer in peers if peer != "agentlightning")]
            systems = everyone if not stream else streaming if concurrency == 32 else alone
            found = rates(stand, systems, concurrency, stream=stream, rounds=ROUNDS if concurrency < 256 else 1)
            name = f"proxy.{size}.c{concurrency}{'.stream' if stream else ''}"
            for system, rate in found.items():
                figures[f"{name}.{system}_rps"] = _figure(rate, "calls/s", _about(size, concurrency, stream))
            rivals = {peer: found[peer] for peer in peers if peer in found}
            if concurrency == 32 and rivals:
                best = max(rivals, key=lambda peer: rivals[peer])
                note = f"ours {found['ours']:.0f}/s, {_list(rivals)}, direct {found['direct']:.0f}/s{missing}"
                figures[f"{name}.ratio_best_peer"] = _figure(found["ours"] / rivals[best], f"x {best}", note)
        figures |= _added(stand, size)
    return figures


def _added(stand: Stand, size: str) -> Figures:
    added_ms: list[float] = []
    for _ in range(ROUNDS):
        ours, direct = (stand.load(system, 1, 150).percentile_ms(0.5) for system in ("ours", "direct"))
        added_ms.append(ours - direct)
    note = "median latency through the proxy, less that of the engine alone; one call at a time, journal on disk"
    return {f"proxy.{size}.c1.added_p50_ms": _figure(statistics.median(added_ms), "ms", note)}


def small_figures() -> Figures:
    with ExitStack() as stack:
        stand = Stand(stack, "small", peers=False)
        stand.load("ours", 32, 500)
        found: list[float] = []
        for _ in range(ROUNDS):
            before = stand.stats()["cpu_s"]
            num_calls = len(stand.load("ours", 32, 2_000).latencies_s)
            found.append(num_calls / (stand.stats()["cpu_s"] - before))
        wall = stand.load("ours", 32, 2_000).rate
    note = f"300 prompt and 50 sampled tokens; calls over CPU seconds of the proxy's process; {wall:.0f}/s by the wall"
    return {"proxy.small.rps_per_core": _figure(statistics.median(found), "calls/s", note)}


def two_nodes_figures() -> Figures:
    """What a second node on the machine adds. Each has a quarter of a core, so that load and engine find room."""
    with ExitStack() as stack:
        stand = Stand(stack, "2k_200", peers=False, elsewhere=True)
        both = ("ours", "elsewhere")
        if not all(stack.enter_context(quota(stand.pids[name], QUOTA)) for name in both):
            print("  proxy.two_processes_ratio is not measured: it needs root and control groups", file=sys.stderr)
            return {}
        stand.loads(both, 32, 200)
        alone: list[float] = []
        together: list[float] = []
        for _ in range(ROUNDS):
            alone += [stand.load(name, 32, 500).rate for name in both]
            together.append(sum(load.rate for load in stand.loads(both, 32, 500)))
    one, two = statistics.median(alone), statistics.median(together)
    note = f"two nodes {two:.0f} calls/s, one {one:.0f}, of 2,000 prompt and 200 sampled tokens; each has {QUOTA} core"
    return {"proxy.two_processes_ratio": _figure(two / one, "x", note)}


def lag_figures() -> Figures:
    """How long the event loop keeps others waiting while 256 streams are open, 20 tokens a second each."""
    with ExitStack() as stack:
        stand = Stand(stack, "2k_200", events_per_s=20, peers=False)
        seen = asyncio.run(_lag_of_open_streams(stand))
    note = (
        "256 open streams of 2,000 prompt tokens, 20 tokens/s each, all at the same instants as a batch gives them; "
        f"p50 {seen['lag_p50_ms']:.1f} ms, most {seen['lag_max_ms']:.0f} ms in 6 s"
    )
    return {"proxy.loop_lag_p99_ms": _figure(seen["lag_p99_ms"], "ms", note)}


async def _lag_of_open_streams(stand: Stand) -> dict[str, float]:
    """Streams open over two seconds; measured from then until before the first one ends."""
    clients = [await HttpClient.connect(stand.ports["ours"]) for _ in range(256)]

    async def stream(number: int, client: HttpClient) -> None:
        await asyncio.sleep(2.0 * number / len(clients))
        message = [{"role": "user", "content": f"{number} " + "word" * 2_000}]
        body = json.dumps({"model": "mock", "stream": True, "messages": message}).encode()
        await client.send(post(PATHS["ours"].format(number), body, f"gls-bench-s{number}"))
        client.close()

    async with asyncio.TaskGroup() as streams:
        for number, client in enumerate(clients):
            streams.create_task(stream(number, client))
        await asyncio.sleep(3.0)
        await asyncio.to_thread(stand.stats)
        await asyncio.sleep(6.0)
        return await asyncio.to_thread(stand.stats)


def memory_figures() -> Figures:
    with ExitStack() as stack:
        stand = Stand(stack, "20k_500", peers=False, renders=True)
        begin = stand.stats()
        asyncio.run(_converse(stand.ports["ours"], 600))
        first = stand.stats()
        asyncio.run(_converse(stand.ports["ours"], 600))
        second = stand.stats()
    turn_ms = 1000 * (second["cpu_s"] - first["cpu_s"]) / 600
    stitched = (second["num_stitched"] - first["num_stitched"]) / 600
    assert stitched > 0.9, f"{stitched:.0%} of the turns were stitched"
    with ExitStack() as stack:
        stand = Stand(stack, "20k_500", peers=False)
        stand.load("ours", 32, 600)
        kept = stand.stats()["rss_mb"]
    begin_mb, first_mb, second_mb = begin["rss_mb"], first["rss_mb"], second["rss_mb"]
    note = f"32 live sessions of 20 turns, then new ones; {begin_mb:.0f} MB at first, {second_mb:.0f} MB after 1,200"
    turns = f"a turn of such a conversation, {stitched:.0%} of them stitched: two requests that render, then the call"
    harsh = "600 first turns of 20,000 tokens each that share nothing, in sessions that never end: the node keeps them"
    return {
        "proxy.20k_500.turn_cpu_ms": _figure(turn_ms, "ms", turns),
        "proxy.rss_after_600_mb": _figure(first_mb, "MB", note),
        "proxy.rss_growth_600_to_1200_mb": _figure(second_mb - first_mb, "MB", note),
        "proxy.rss_600_unrelated_kept_mb": _figure(kept, "MB", harsh),
    }


async def _converse(port: int, num_calls: int, *, concurrency: int = 32, turns: int = 20) -> None:
    """Conversations that start with 20k tokens; each turn echoes what was answered and asks on."""
    left = iter(range(num_calls))

    async def work(number: int) -> None:
        client = await HttpClient.connect(port)
        path, key = PATHS["ours"].format(number), f"gls-bench-s{number}"
        messages: list[dict[str, str]] = []
        for _ in left:
            if len(messages) >= 2 * turns:
                await client.send(post(f"/bench/renew/s{number}", b"", key))
                messages = []
            text = f"continue with step {len(messages)}" if messages else f"{os.urandom(4).hex()} " + "word " * 20_000
            messages.append({"role": "user", "content": text})
            answer = await client.send(post(path, json.dumps({"model": "mock", "messages": messages}).encode(), key))
            messages.append({"role": "assistant", "content": json.loads(answer)["choices"][0]["message"]["content"]})
        await client.send(post(f"/bench/renew/s{number}", b"", key))
        client.close()

    await asyncio.gather(*(work(number) for number in range(concurrency)))


def _about(size: str, concurrency: int, stream: bool) -> str:
    num_prompt, num_sampled = SIZES[size]
    mode = "streamed" if stream else "in one piece"
    return f"{num_prompt:,} prompt and {num_sampled} sampled tokens, {concurrency} at a time, {mode}"


def _list(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {rate:.0f}/s" for name, rate in found.items())


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 2), "unit": unit, "note": note}


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. Three to four minutes."""
    figures = small_figures() | two_nodes_figures() | lag_figures() | memory_figures()
    for size in ("2k_200", "20k_500"):
        figures |= rate_figures(size)
    return figures


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
