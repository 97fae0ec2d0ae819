"""The journal on this machine's disk: the time of a durable append, the bytes of a token, growth with turns, opening.

The sessions are an agent's: a prompt of 2,000 tokens, then turns of 300 new prompt tokens (a tool's result) and 200
sampled ones, text of four bytes a token alongside the ids. Each call stores what its parent does not have.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from gangline.domain.completion import Certificate, Completion, VersionSpan
from gangline.domain.conversation import Message, Text, ToolCall, ToolResult
from gangline.domain.tokens import encode_json
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal

NUM_SESSIONS = 32
NUM_TURNS = 40
ROUNDS = 3
NUM_FIRST, NUM_NEW, NUM_SAMPLED = 2_000, 300, 200
TURNS = (50, 100, 200)

Figures = dict[str, dict[str, Any]]


def session(session_id: str, num_turns: int, seed: int = 0) -> list[Completion]:
    """One conversation's records, as capture makes them: exact from the second turn on."""
    numbers = np.random.default_rng(seed)
    completions: list[Completion] = []
    context = 0
    for turn in range(num_turns):
        num_new = NUM_NEW if turn else NUM_FIRST
        completions.append(
            Completion(
                completion_id=f"c1-{turn + 1:06d}",
                session_id=session_id,
                attempt=1,
                status="complete",
                parent_id=completions[-1].completion_id if turn else None,
                branch_key="0123456789abcdef01234567",
                dialect="openai_chat",
                model="Qwen/Qwen3-8B",
                prompt_shared=context,
                prompt_suffix_ids=numbers.integers(0, 150_000, num_new, dtype=np.int32),
                sampled_ids=numbers.integers(0, 150_000, NUM_SAMPLED, dtype=np.int32),
                logprobs=-numbers.exponential(0.5, NUM_SAMPLED).astype(np.float32),
                messages_shared=2 * turn,
                new_messages=(_result(turn, num_new),) if turn else (Message("user", (Text("word" * num_new),)),),
                response=Message("assistant", (ToolCall(f"call_{turn:020d}", "bash", "word" * NUM_SAMPLED),)),
                certificate=Certificate(
                    prompt_source="stitched" if turn else "engine",
                    context="exact" if turn else "first",
                    logprobs="processed",
                    finish_reason="tool_calls",
                    version_spans=(VersionSpan(3, 0, NUM_SAMPLED),),
                    engine="vllm",
                    engine_version="0.11.0",
                ),
                started_at=1_790_000_000.25,
                finished_at=1_790_000_004.75,
                metadata={"reply_id": f"{turn:016x}"},
            )
        )
        context += num_new + NUM_SAMPLED
    return completions


def _result(turn: int, num_tokens: int) -> Message:
    return Message("tool", (ToolResult(f"call_{turn - 1:020d}", (Text("word" * num_tokens),)),))


def num_tokens(completions: list[Completion]) -> int:
    return sum(len(call.prompt_suffix_ids) + len(call.sampled_ids) for call in completions)


async def _write(folder: Path, sessions: list[list[Completion]]) -> float:
    """Seconds until every call of all sessions is durable; a session appends its next one when it has the last."""
    journal = Journal.open(folder)

    async def converse(completions: list[Completion]) -> None:
        for completion in completions:
            await journal.append_all([completion])

    for completions in sessions:
        await journal.open_attempt(AttemptOpened(completions[0].session_id, 1, "task", 1))
    begun = time.perf_counter()
    await asyncio.gather(*(converse(completions) for completions in sessions))
    took_s = time.perf_counter() - begun
    await journal.close()
    return took_s


def _written(sessions: list[list[Completion]]) -> tuple[float, int]:
    """Seconds, and the journal's bytes."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        took_s = asyncio.run(_write(Path(folder), sessions))
        return took_s, sum(path.stat().st_size for path in Path(folder).glob("*.log"))


def append_figures() -> Figures:
    sessions = [session(f"s{number}", NUM_TURNS, number) for number in range(NUM_SESSIONS)]
    num_calls = NUM_SESSIONS * NUM_TURNS
    shared = statistics.median(_written(sessions)[0] for _ in range(ROUNDS)) / num_calls
    alone = statistics.median(_written(sessions[:1])[0] for _ in range(ROUNDS)) / NUM_TURNS
    note = (
        f"on the disk on return; wall time over calls of {NUM_SESSIONS} sessions at once; {1000 * alone:.1f} ms alone"
    )
    return {"journal.append_ms": _figure(1000 * shared, "ms", note)}


def size_figures() -> Figures:
    completions = session("s0", 50)
    _, num_bytes = _written([completions])
    as_json = sum(len(encode_json(completion)) for completion in completions)
    tokens = num_tokens(completions)
    kept = {turns: _written([session("s0", turns)])[1] for turns in TURNS}
    slope = float(np.polyfit(np.log(TURNS), np.log([kept[turns] for turns in TURNS]), 1)[0])
    whole = sum(call.prompt_shared + len(call.prompt_suffix_ids) + NUM_SAMPLED for call in session("s0", 200))
    return {
        "journal.bytes_per_token": _figure(num_bytes / tokens, "bytes", "ids, log-probs, text and certificates"),
        "journal.bytes_per_token_ratio_json": _figure(
            num_bytes / as_json, "ratio", f"the same records as JSON take {as_json / tokens:.1f} bytes a token"
        ),
        "journal.bytes_exponent": _figure(
            slope,
            "exponent",
            f"of turns, from 50 to 200: {kept[50] / 1e6:.2f} to {kept[200] / 1e6:.2f} MB; with whole prompts, the ids "
            f"alone would be {4 * whole / 1e6:.0f} MB at 200",
        ),
    }


_OPEN = """
import asyncio, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from journal_bench import opened
print(asyncio.run(opened(Path(sys.argv[1]))))
"""


async def opened(folder: Path) -> str:
    """JSON: seconds to open, seconds to read one session, and how much the process grew meanwhile, bytes."""
    before_bytes = _rss_bytes()
    begun = time.perf_counter()
    journal = Journal.open(folder)
    open_s = time.perf_counter() - begun
    grew_bytes = _rss_bytes() - before_bytes
    begun = time.perf_counter()
    found = await journal.read(AttemptKey("s7", 1))
    read_s = time.perf_counter() - begun
    await journal.close()
    assert len(found) == 195
    return json.dumps([open_s, read_s, grew_bytes])


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_figures() -> Figures:
    """100 sessions of 100,000 tokens each, opened by another process, as after a crash."""
    sessions = [session(f"s{number}", 195, number) for number in range(100)]
    num_tokens_each = num_tokens(sessions[0])
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        asyncio.run(_write(Path(folder), sessions))
        num_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.log"))
        command = [sys.executable, "-c", _OPEN, folder, str(Path(__file__).parent)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    open_s, read_s, grew_bytes = json.loads(told)
    note = (
        f"100 sessions of {num_tokens_each:,} tokens, {num_bytes / 1e6:.0f} MB, every checksum checked; one session is "
        f"then read in {1000 * read_s:.0f} ms"
    )
    return {
        "journal.open_s": _figure(open_s, "s", note),
        "journal.open_rss_mb": _figure(grew_bytes / 1e6, "MB", "what the process grows by while it opens that journal"),
    }


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "note": note}


def run() -> Figures:
    """Measure; returns figure name -> {value, unit, note}. Half a minute."""
    return append_figures() | size_figures() | open_figures()


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
