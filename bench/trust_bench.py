"""What one session's worst request costs another session on the same node.

A neighbour makes ordinary calls (2,000 prompt and 200 sampled tokens), one after the other, while another session sends
one hostile request after the other, from its own process: each as large as the node accepts, or larger. Each of
the two has its own engine, so that only the node, which they share, is measured. Quiet and attacked rounds take
turns. All attacks are made once; those that cost most are then measured over several rounds, and the figure is the
largest of their medians: the neighbour's p99 under attack, relative to its p99 in the quiet round before.

In each of those rounds the same attack is also made on a second node of the machine, which shares nothing with the
neighbour's node but processors, disk and kernel. That is the machine's part of the figure.

    python bench/trust_bench.py [ATTACK ...]    measures these alone
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from load_client import HttpClient, get, post
from proxy_bench import PATHS, Stand

from gangline.settings.node import CallLimits

NUM_WORST, ROUNDS = 6, 5
QUIET_S, ATTACKED_S = 1.0, 2.0
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


def _json(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


_ASKED, _RESULT = {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c", "content": "x"}
_MANY, _PARTS = LIMITS.max_messages, LIMITS.max_parts
_SCHEMA = LIMITS.max_definition_bytes - 1024
_WORDS = "word " * (ROOM // _MANY // 5 - 20)
_CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_RESULT_ITEM = {"type": "function_call_output", "call_id": "c", "output": _WORDS}
_USED: dict[str, Any] = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
_ANSWERED: dict[str, Any] = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "c", "content": _WORDS}],
}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (ROOM - 4096)}}

CHAT: dict[str, Callable[[], bytes]] = {
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
    "an image": lambda: _body({"role": "user", "content": [_IMAGE]}),
    "references": lambda: _body(undeclared=[f"{index:016x}" for index in range(25_000)]),
}
MESSAGES: dict[str, Callable[[], bytes]] = {
    "Anthropic blocks": lambda: _body(
        {"role": "user", "content": [{"type": "text", "text": "x"}] * (_PARTS - 1)}, max_tokens=9
    ),
    "Anthropic tool results": lambda: _body(_ASKED, *[_USED, _ANSWERED] * (_MANY // 2 - 1), max_tokens=9),
}
RESPONSES: dict[str, Callable[[], bytes]] = {
    "Responses items": lambda: _json(model="mock", input=[_ASKED, *[_CALL_ITEM, _RESULT_ITEM] * (_MANY // 2 - 1)]),
}
GOOGLE: dict[str, Callable[[], bytes]] = {
    "Google parts": lambda: _json(contents=[{"role": "user", "parts": [{"text": "x"}] * (_PARTS - 1)}]),
}
_ROUTES = {
    "chat/completions": CHAT,
    "messages": MESSAGES,
    "responses": RESPONSES,
    "../v1beta/models/mock:generateContent": GOOGLE,
}
ATTACKS = {name: (route, make) for route, attacks in _ROUTES.items() for name, make in attacks.items()}
NUM_AT_ONCE = {"messages, four at once": ("messages, to the limit", 4), "parts, four at once": ("parts", 4)}
"""Attacks that several requests of one session make together."""


class Round(NamedTuple):
    quiet_s: float
    attacked_s: float
    elsewhere_s: float | None
    """The neighbour's p99; last, while another node is attacked."""


class Ports(NamedTuple):
    ours: int
    """Of the node that the neighbour calls."""
    elsewhere: int


class Attacker:
    """One request after the other, or several at once, whatever is answered."""

    def __init__(self, port: int, name: str) -> None:
        name, self._num_at_once = NUM_AT_ONCE.get(name, (name, 1))
        route, make = ATTACKS[name]
        body, key = make(), f"gls-bench-s{ATTACKER}"
        path = f"/s/s{ATTACKER}/v1/{route}".replace("/v1/..", "")
        self._request = post(path, body, key).replace(b"\r\n", f"\r\nx-goog-api-key: {key}\r\n".encode(), 1)
        if body[:2] == b"\x1f\x8b":
            self._request = self._request.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)
        self._port = port
        self.answers: list[str] = []

    async def attack(self) -> None:
        await asyncio.gather(*(self._send_on() for _ in range(self._num_at_once)))

    async def _send_on(self) -> None:
        while True:
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


async def _attack_when_told(port: int, name: str) -> None:
    """In its own process: each line of the standard input begins an attack, or ends it and prints the answers."""
    attacker = Attacker(port, name)
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        attacking = asyncio.create_task(attacker.attack())
        await asyncio.to_thread(sys.stdin.readline)
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
        print(json.dumps(attacker.answers), flush=True)
        attacker.answers = []


@contextmanager
def attacking(port: int, name: str) -> Generator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, "--attack", str(port), name]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Its own work is no part of the figure: an agent has its sandbox's processors.
        preexec_fn=lambda: os.nice(10),
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


class Neighbour:
    def __init__(self, port: int) -> None:
        self._port = port
        self._number = 0
        self.num_failed = 0
        fields = {"model": "mock", "stream": False, "max_tokens": 200}
        content = "######## " + "word" * 2_000
        body = json.dumps(fields | {"messages": [{"role": "user", "content": content}]}, separators=(",", ":"))
        self._request = post(PATHS["ours"].format(NEIGHBOUR), body.encode(), f"gls-bench-s{NEIGHBOUR}")

    async def p99_s(self, for_s: float) -> float:
        client = await HttpClient.connect(self._port)
        latencies_s: list[float] = []
        ends_at = time.perf_counter() + for_s
        while time.perf_counter() < ends_at:
            self._number += 1
            request = self._request.replace(b"########", b"%08d" % self._number)
            started_at_s = time.perf_counter()
            try:
                await client.send(request)
            except RuntimeError as error:
                self.num_failed += 1
                print(f"  the neighbour's call failed: {error}", file=sys.stderr, flush=True)
                client = await HttpClient.connect(self._port)
            latencies_s.append(time.perf_counter() - started_at_s)
        client.close()
        return sorted(latencies_s)[int(0.99 * (len(latencies_s) - 1))]


async def rounds(ports: Ports, name: str, neighbour: Neighbour, num_rounds: int, *, elsewhere: bool) -> list[Round]:
    """Both sessions begin anew: what earlier attacks left in them is not measured."""
    for port in ports:
        client = await HttpClient.connect(port)
        for session in (ATTACKER, NEIGHBOUR):
            await client.send(post(f"/bench/renew/s{session}", b"", ""))
        await client.send(get("/bench/stats"))
        client.close()
    found: list[Round] = []
    answers: list[str] = []

    async def attacked(process: subprocess.Popen[str]) -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("begin\n")
        process.stdin.flush()
        p99_s = await neighbour.p99_s(ATTACKED_S)
        process.stdin.write("end\n")
        process.stdin.flush()
        answers.extend(json.loads(process.stdout.readline()))
        return p99_s

    with attacking(ports.ours, name) as process, attacking(ports.elsewhere, name) as other:
        for _ in range(num_rounds):
            quiet_s, attacked_s = await neighbour.p99_s(QUIET_S), await attacked(process)
            found.append(Round(quiet_s, attacked_s, await attacked(other) if elsewhere else None))
    client = await HttpClient.connect(ports.ours)
    stats = json.loads(await client.send(get("/bench/stats")))
    client.close()
    print(
        f"  {name}: {_about(found)}; {len(answers)} requests answered {'/'.join(sorted(set(answers)))}; "
        f"loop lag max {stats['lag_max_ms']:.1f} ms",
        file=sys.stderr,
        flush=True,
    )
    return found


def _ratio(found: list[Round]) -> float:
    return statistics.median(one.attacked_s / one.quiet_s for one in found)


def _ratio_elsewhere(found: list[Round]) -> float:
    return statistics.median(one.elsewhere_s / one.quiet_s for one in found if one.elsewhere_s is not None)


def _about(found: list[Round]) -> str:
    quiet_ms, attacked_ms = (1000 * statistics.median(times) for times in list(zip(*found, strict=True))[:2])
    elsewhere = "" if found[0].elsewhere_s is None else f" (x{_ratio_elsewhere(found):.2f} on another node)"
    return f"x{_ratio(found):.2f}{elsewhere}, p99 {quiet_ms:.1f} -> {attacked_ms:.1f} ms"


async def measured(ports: Ports, names: list[str]) -> Figures:
    neighbour = Neighbour(ports.ours)
    await neighbour.p99_s(1.0)  # connections, and whatever is made once
    once = {name: await rounds(ports, name, neighbour, 1, elsewhere=False) for name in names}
    worst = sorted(names, key=lambda name: _ratio(once[name]), reverse=True)[:NUM_WORST]
    found = {name: await rounds(ports, name, neighbour, ROUNDS, elsewhere=True) for name in worst}
    name = max(worst, key=lambda name: _ratio(found[name]))
    note = f"the worst of {len(names)} attacks: {name}; {_about(found[name])}, median of {ROUNDS} rounds"
    each = "; ".join(
        f"{name} x{_ratio(one):.2f}, elsewhere x{_ratio_elsewhere(one):.2f}" for name, one in found.items()
    )
    machine = f"the same attack on another node of the machine: what processors and disk cost without the node; {each}"
    failed = {"value": neighbour.num_failed, "unit": "calls", "note": f"of the neighbour, under {len(names)} attacks"}
    return {
        "trust.victim_p99_ratio": {"value": round(_ratio(found[name]), 2), "unit": "ratio", "note": note},
        "trust.elsewhere_p99_ratio": {
            "value": round(_ratio_elsewhere(found[name]), 2),
            "unit": "ratio",
            "note": machine,
        },
        "trust.victim_failed_calls": failed,
    }


def run(names: list[str] | None = None) -> Figures:
    """Measure; returns figure name -> {value, unit, note}. Four to five minutes."""
    with ExitStack() as stack:
        stand = Stand(stack, "2k_200", peers=False, of_strangers=True, elsewhere=True)
        ports = Ports(stand.ports["ours"], stand.ports["elsewhere"])
        return asyncio.run(measured(ports, names or [*ATTACKS, *NUM_AT_ONCE]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        asyncio.run(_attack_when_told(int(sys.argv[2]), sys.argv[3]))
    else:
        print(json.dumps(run(sys.argv[1:]), indent=2))
