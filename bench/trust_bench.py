"""What one session's worst request costs another session on the same node.

A neighbour makes ordinary calls (2,000 prompt and 200 sampled tokens), one after the other, while another session sends
one hostile request after the other: each as large as the node accepts, or larger. Quiet and attacked rounds take turns;
the figure is the median of the rounds' ratios of the neighbour's p99, of the attack where it is largest.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from load_client import HttpClient, post
from proxy_bench import PATHS, Stand

from gangline.gateway.call_limits import CallLimits

ROUNDS, ROUND_S = 5, 3.0
LIMITS = CallLimits()
ROOM = LIMITS.max_body_bytes - 4096
ATTACKER, NEIGHBOUR = 0, 1

Figures = dict[str, dict[str, Any]]


def _messages(num: int, text: str, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role if index % 2 else "user", "content": text} for index in range(num)]


def _body(*messages: dict[str, Any], **fields: Any) -> bytes:
    said = list(messages) or _messages(1, "x")
    return json.dumps({"model": "mock", "messages": said} | fields, separators=(",", ":")).encode()


def _call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def _tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


_ASKED, _RESULT = {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c", "content": "x"}
_MANY, _PARTS = LIMITS.max_messages, LIMITS.max_parts
_SCHEMA = LIMITS.max_definition_bytes - 1024

ATTACKS: dict[str, Callable[[], bytes]] = {
    "200,000 messages": lambda: _body(*_messages(200_000, "x")),
    "messages, to the limit": lambda: _body(*_messages(_MANY, "word " * (ROOM // _MANY // 5 - 10), "assistant")),
    "messages, short ones": lambda: _body(*_messages(_MANY, "x")),
    "one string": lambda: _body({"role": "user", "content": "a" * ROOM}),
    "one string of words": lambda: _body(_ASKED, {"role": "assistant", "content": "a " * (ROOM // 2 - 99)}, _ASKED),
    "system text of dates": lambda: _body({"role": "system", "content": "2026-01-01 " * (ROOM // 11)}, _ASKED),
    "escapes": lambda: b'{"model":"mock","messages":[{"role":"user","content":"%b"}]}' % (b"\\ud83d" * (ROOM // 6)),
    "arguments of numbers": lambda: _body(_ASKED, _call("[" + "1.5," * (ROOM // 4 - 99) + "1]"), _RESULT),
    "arguments, nested": lambda: _body(_ASKED, _call("[" * (ROOM // 2)), _RESULT),
    "parts": lambda: _body({"role": "user", "content": [{"type": "text", "text": "x"}] * (_PARTS - 1)}),
    "250,000 parts": lambda: _body({"role": "user", "content": [{"type": "text", "text": "x"}] * 250_000}),
    "tools": lambda: _body(tools=[_tool(f"f{index}", {}) for index in range(LIMITS.max_tools)]),
    "100,000 tools": lambda: _body(tools=[_tool(f"f{index}", {}) for index in range(100_000)]),
    "a schema of numbers": lambda: _body(tools=[_tool("f", {"enum": [0] * (_SCHEMA // 2)})]),
    "nested schema": lambda: _body(tools=[_tool("f", {})]).replace(b"{}", b'{"a":' * 400_000 + b"1" + b"}" * 400_000),
    "a field of numbers": lambda: _body(metadata={"a": [0] * (ROOM // 2 - 99)}),
    "one long number": lambda: _body(metadata=0).replace(b":0", b":" + b"1" * (LIMITS.max_definition_bytes - 99)),
    "gzip bomb": lambda: gzip.compress(_body({"role": "user", "content": "a" * (256 << 20)})),
    "below what is read apart": lambda: _body(_ASKED, _call("[" + "1.5," * 900 + "1]"), _RESULT),
}


class Attacker:
    """One request after the other, whatever is answered."""

    def __init__(self, port: int, name: str) -> None:
        body = ATTACKS[name]()
        path, key = PATHS["ours"].format(ATTACKER), f"gls-bench-s{ATTACKER}"
        self._request = post(path, body, key)
        if body[:2] == b"\x1f\x8b":
            self._request = self._request.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)
        self._port = port
        self.answers: list[str] = []
        self.slowest_s = 0.0

    async def attack(self) -> None:
        while True:
            started_at_s = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(self._request)
                line = await reader.readline()
                self.answers.append(line.split(b" ")[1].decode() if line else "closed")
                await reader.read(4096)
            except ConnectionError:
                self.answers.append("closed")
            finally:
                writer.close()
            self.slowest_s = max(self.slowest_s, time.perf_counter() - started_at_s)


class Neighbour:
    def __init__(self, port: int) -> None:
        self._port = port
        self._number = 0
        fields = {"model": "mock", "stream": False, "max_tokens": 200}
        content = "######## " + "word" * 2_000
        body = json.dumps(fields | {"messages": [{"role": "user", "content": content}]}, separators=(",", ":"))
        self._request = post(PATHS["ours"].format(NEIGHBOUR), body.encode(), f"gls-bench-s{NEIGHBOUR}")

    async def p99_s(self, for_s: float) -> tuple[float, float]:
        """Its p99 and its median over so many seconds. Raises: RuntimeError when a call of it fails."""
        client = await HttpClient.connect(self._port)
        latencies_s: list[float] = []
        ends_at = time.perf_counter() + for_s
        while time.perf_counter() < ends_at:
            self._number += 1
            request = self._request.replace(b"########", b"%08d" % self._number)
            started_at_s = time.perf_counter()
            await client.send(request)
            latencies_s.append(time.perf_counter() - started_at_s)
        client.close()
        ordered = sorted(latencies_s)
        return ordered[int(0.99 * (len(ordered) - 1))], ordered[len(ordered) // 2]


async def measured(port: int, name: str) -> dict[str, Any]:
    """Ratios of one attack, round by round."""
    neighbour, attacker = Neighbour(port), Attacker(port, name)
    ratios: list[float] = []
    quiet, attacked = list[float](), list[float]()
    await neighbour.p99_s(0.5)
    for _ in range(ROUNDS):
        quiet.append((await neighbour.p99_s(ROUND_S))[0])
        attacking = asyncio.create_task(attacker.attack())
        attacked.append((await neighbour.p99_s(ROUND_S))[0])
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
        ratios.append(attacked[-1] / quiet[-1])
    return {
        "ratio": statistics.median(ratios),
        "quiet_ms": 1000 * statistics.median(quiet),
        "attacked_ms": 1000 * statistics.median(attacked),
        "answers": sorted(set(attacker.answers)),
        "num": len(attacker.answers),
        "slowest_s": attacker.slowest_s,
    }


def run(names: list[str] | None = None) -> Figures:
    found: dict[str, dict[str, Any]] = {}
    for name in names or list(ATTACKS):
        with ExitStack() as stack:
            stand = Stand(stack, "2k_200", peers=False)
            found[name] = one = asyncio.run(measured(stand.ports["ours"], name))
            lag = stand.stats()
        times = f"{one['quiet_ms']:.1f} -> {one['attacked_ms']:.1f} ms"
        answers = f"{one['num']} requests answered {'/'.join(one['answers'])}, the slowest in {one['slowest_s']:.2f} s"
        lags = f"loop lag p99 {lag['lag_p99_ms']:.1f}, max {lag['lag_max_ms']:.1f} ms; {lag['rss_mb']:.0f} MB"
        print(f"  {name}: x{one['ratio']:.2f} ({times}), {answers}; {lags}", file=sys.stderr, flush=True)
    worst = max(found, key=lambda name: found[name]["ratio"])
    one = found[worst]
    note = (
        f"the worst of {len(found)} attacks: {worst}; p99 {one['quiet_ms']:.1f} -> {one['attacked_ms']:.1f} ms, "
        f"median of {ROUNDS} rounds"
    )
    return {"trust.victim_p99_ratio": {"value": round(one["ratio"], 2), "unit": "ratio", "note": note}}


if __name__ == "__main__":
    print(run(sys.argv[1:]))
