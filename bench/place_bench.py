"""What a long conversation costs the node, in CPU time: finding a call's place in it, and stitching its prompt.

- `place.200_turns_ms`: placing the call after 200 turns of tool use, with what the node knows from the calls before.
- `stitch.50k_cpu_ms`: CPU time of the node for a call whose prompt of 50,000 ids is stitched, over one of the same
  messages that the engine renders. The whole node takes part: proxy, capture, journal on disk.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from load_client import HttpClient, get, post
from proxy_bench import free_port, process

from gangline.domain.completion import Certificate, Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.tokens import logprobs, token_ids
from gangline.node.capture.placing import Place, PlaceIndex
from gangline.store.journal.log import AttemptKey, Journal

NUM_TURNS = 200
NUM_TOOLS = 20
NUM_PROMPT, NUM_SAMPLED = 50_000, 200
ROUNDS = 20
NUM_COLD = 2
"""First rounds, which find code and connections cold."""

Figures = dict[str, dict[str, Any]]


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. About half a minute."""
    return {**place_figures(), **asyncio.run(stitch_figures())}


# -- placing -------------------------------------------------------------------------------------------------------


def place_figures() -> Figures:
    index, tree, call = _long_session()
    warm_ms = statistics.median(_placing_ms(index, call) for _ in range(ROUNDS))
    fresh = PlaceIndex(tree)
    for completion in tree:
        fresh.restore(completion)
    first_ms = _placing_ms(fresh, call, is_first=True)
    about = f"{NUM_TURNS} turns with a tool call each, {len(_wire(call)) / 1e6:.1f} MB of messages, {NUM_TOOLS} tools"
    note = f"{about}; median of {ROUNDS}; {first_ms:.1f} ms for the first call after a restart"
    return {"place.200_turns_ms": _figure(warm_ms, "ms", note)}


def _long_session() -> tuple[PlaceIndex, CompletionTree, ModelCall]:
    """Placed and recorded turn by turn; and the request that comes next."""
    tree = CompletionTree()
    index = PlaceIndex(tree)
    schema = {"type": "object", "properties": {f"argument_{n}": {"type": "string"} for n in range(8)}}
    tools = tuple(ToolDefinition(f"tool_{n}", "What the tool does. " * 30, schema) for n in range(NUM_TOOLS))
    messages: list[Message] = [_text("system", "You are an agent. " * 500), _text("user", "Fix the bug. " * 20)]
    for turn in range(NUM_TURNS):
        call = ModelCall(dialect="openai_chat", model="m", messages=tuple(messages), tools=tools)
        tool_call = ToolCall(f"call_{turn}", "tool_1", json.dumps({"command": f"sed -n {turn},+40p main.py"}))
        response = Message("assistant", (Thinking("hm " * 100), Text(f"Step {turn}. " * 10), tool_call))
        _record(index, tree, index.place(call), response, turn)
        messages += [response, Message("tool", (ToolResult(f"call_{turn}", (Text(f"{turn} line\n" * 200),)),))]
    return index, tree, ModelCall(dialect="openai_chat", model="m", messages=tuple(messages), tools=tools)


def _text(role: Any, text: str) -> Message:
    return Message(role, (Text(text),))


def _record(index: PlaceIndex, tree: CompletionTree, place: Place, response: Message, turn: int) -> None:
    completion = Completion(
        completion_id=f"c{turn}",
        session_id="s",
        attempt=1,
        status="complete",
        parent_id=place.parent_id,
        branch_key=place.branch_key,
        dialect="openai_chat",
        model="m",
        prompt_shared=0,
        prompt_suffix_ids=token_ids([1]),
        sampled_ids=token_ids([2]),
        logprobs=logprobs([-1.0]),
        messages_shared=place.num_shared,
        new_messages=place.new_messages,
        response=response,
        certificate=Certificate(prompt_source="engine", context="first", logprobs="raw", finish_reason="stop"),
        lineage=place.lineage,
        started_at=0.0,
        finished_at=0.0,
    )
    tree.add(completion)
    index.add(completion, place.digest)


def _wire(call: ModelCall) -> bytes:
    return msgspec.json.encode(call)


def _placing_ms(index: PlaceIndex, call: ModelCall, *, is_first: bool = False) -> float:
    """Of a call that has just been read off the wire, after the one before it: nothing is the same object."""
    if not is_first:
        before = msgspec.structs.replace(call, messages=call.messages[:-2])
        index.place(msgspec.json.decode(_wire(before), type=ModelCall))
    fresh = msgspec.json.decode(_wire(call), type=ModelCall)
    started_at_s = time.perf_counter()
    place = index.place(fresh)
    took_ms = 1000 * (time.perf_counter() - started_at_s)
    assert place.num_shared == len(call.messages) - 1
    return took_ms


# -- stitching -----------------------------------------------------------------------------------------------------


async def stitch_figures() -> Figures:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        pairs = await _pairs_ms(folder)
        await _check_stitched(Path(folder))
    over_ms = statistics.median(stitched - plain for plain, stitched in pairs)
    plain_ms, stitched_ms = (statistics.median(pair[which] for pair in pairs) for which in (0, 1))
    note = (
        f"{NUM_PROMPT:,} prompt ids, {NUM_SAMPLED} sampled, 200 KB of messages: {stitched_ms:.1f} ms stitched, "
        f"{plain_ms:.1f} ms plain; median of {ROUNDS} pairs"
    )
    return {"stitch.50k_cpu_ms": _figure(over_ms, "ms", note)}


async def _pairs_ms(folder: str) -> list[tuple[float, float]]:
    with ExitStack() as stack:
        engine_port, port = free_port(), free_port()
        engine = (sys.executable, "mock_engine.py", NUM_PROMPT, NUM_SAMPLED, engine_port, 0, 1)
        stack.enter_context(process(*engine, port=engine_port))
        node = (sys.executable, "proxy_node.py", f"http://127.0.0.1:{engine_port}", port, folder, 1)
        stack.enter_context(process(*node, port=port))
        client = await HttpClient.connect(port)
        pairs = [await _conversation_ms(client, number) for number in range(ROUNDS + NUM_COLD)]
        client.close()
    return pairs[NUM_COLD:]


async def _check_stitched(folder: Path) -> None:
    """What was measured is what it is called."""
    journal = Journal.open(folder)
    sources = [one.certificate.prompt_source for one in await journal.read(AttemptKey("s0", 1))]
    await journal.close()
    assert sources == ["engine", "stitched"] * (ROUNDS + NUM_COLD), sources


async def _conversation_ms(client: HttpClient, number: int) -> tuple[float, float]:
    """CPU time of a first call, and of the one that continues from it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"conversation {number}"}]
    for turn in range(50):
        messages.append({"role": "assistant", "content": f"Step {turn} of {number}. " + "word " * 100})
        messages.append({"role": "user", "content": "out " * 900})
    used_s = [await _cpu_s(client)]
    for _ in range(2):
        body = json.dumps({"model": "mock", "messages": messages}).encode()
        answer = json.loads(await client.send(post("/s/s0/v1/chat/completions", body, "gls-bench-s0")))
        used_s.append(await _cpu_s(client))
        messages += [answer["choices"][0]["message"], {"role": "tool", "tool_call_id": "call_1", "content": "output"}]
    plain_s, stitched_s = (after - before for before, after in pairwise(used_s))
    return 1000 * plain_s, 1000 * stitched_s


async def _cpu_s(client: HttpClient) -> float:
    return json.loads(await client.send(get("/bench/stats")))["cpu_s"]


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "note": note}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
