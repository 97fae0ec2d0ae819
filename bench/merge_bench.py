"""Speed of `prefix_merging`, alongside the published rule, as its description reads.

A session of one conversation: T turns, N tokens at its end, of which a quarter were sampled. Completions are as the
journal gives them, prefix-shared. The published rule (Polar, 3.4.2) needs each call's whole prompt as a list, which is
how a gateway that logs calls has them; they are made before the clock starts. Both build the same row: that is checked.

Best of several rounds: what else the machine does makes a round slower, never faster.
"""

from __future__ import annotations

import gc
import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gangline.domain.completion import Certificate, Completion, CompletionTree, VersionSpan
from gangline.domain.conversation import Message, Text
from gangline.domain.tokens import logprobs, token_ids
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from gangline.rows.builders.tree import TreeBuilder

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.merging.published import LoggedCall, published_rows

END_OF_TURN = 2
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
TOKENS_A_TURN = 500
ROUNDS = 7


def run() -> dict[str, dict[str, Any]]:
    """Measure; returns figure name -> {value, unit, note}. Under a minute."""
    session = _session(num_turns=200, num_tokens=100_000)
    calls = _calls(session)
    ours_s, tree_s, published_s = _best_s(
        lambda: _merge(session), lambda: _tree(session), lambda: published_rows(calls)
    )
    times_s = {size: _best_s(_merging(size))[0] for size in SIZES}
    return {
        "merge.200x100k_ms": {
            "value": round(ours_s * 1e3, 2),
            "unit": "ms",
            "note": f"one row of 200 turns, 100,000 tokens, from its completions; best of {ROUNDS}",
        },
        "merge.tree_200x100k_ms": {
            "value": round(tree_s * 1e3, 2),
            "unit": "ms",
            "note": "the same with the builder `tree`",
        },
        "merge.ratio_published": {
            "value": round(published_s / ours_s, 1),
            "unit": "ratio",
            "note": f"time of the published formulas over lists ({published_s * 1e3:.0f} ms) over ours, the same row",
        },
        "merge.exponent": {
            "value": round(_exponent(times_s), 3),
            "unit": "exponent",
            "note": f"time ~ tokens^x from 10,000 to 1,000,000 tokens, {TOKENS_A_TURN} a turn; least squares of logs: "
            + ", ".join(f"{size // 1000}k {seconds * 1e3:.2f} ms" for size, seconds in times_s.items()),
        },
    }


def _merge(session: CompletionTree) -> Any:
    return PrefixMergingBuilder().build(session, session_id="session", task_id="task")


def _tree(session: CompletionTree) -> Any:
    return TreeBuilder().build(session, session_id="session", task_id="task")


def _merging(size: int) -> Callable[[], Any]:
    session = _session(num_turns=size // TOKENS_A_TURN, num_tokens=size)
    return lambda: _merge(session)


def _best_s(*works: Callable[[], Any]) -> list[float]:
    """Seconds of each; they take turns."""
    best = [math.inf] * len(works)
    for _ in range(ROUNDS):
        for index, work in enumerate(works):
            gc.collect()
            started_s = time.perf_counter()
            work()
            best[index] = min(best[index], time.perf_counter() - started_s)
    return best


def _exponent(times_s: dict[int, float]) -> float:
    """Slope of log(time) over log(size)."""
    points = [(math.log(size), math.log(seconds)) for size, seconds in times_s.items()]
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def _session(*, num_turns: int, num_tokens: int) -> CompletionTree:
    """One conversation; the system prompt is as long as a turn."""
    ids = random.Random(0)
    num_each = num_tokens // num_turns
    num_sampled = num_each // 4
    tree = CompletionTree()
    before: Completion | None = None
    for index in range(num_turns):
        sampled = [*(ids.randrange(3, 150_000) for _ in range(num_sampled - 1)), END_OF_TURN]
        completion = Completion(
            completion_id=f"c{index:06d}",
            session_id="session",
            attempt=1,
            status="complete",
            parent_id=None if before is None else before.completion_id,
            branch_key="key",
            dialect="openai_chat",
            model="model",
            prompt_shared=0 if before is None else tree.num_context_ids(before.completion_id),
            prompt_suffix_ids=token_ids(ids.randrange(3, 150_000) for _ in range(num_each - num_sampled)),
            sampled_ids=token_ids(sampled),
            logprobs=logprobs(-ids.random() for _ in range(num_sampled)),
            messages_shared=2 * index,
            new_messages=(Message("user", (Text(f"output {index}"),)),),
            response=Message("assistant", (Text(f"reply {index}"),)),
            certificate=Certificate(
                prompt_source="stitched",
                context="first" if before is None else "exact",
                logprobs="processed",
                finish_reason="stop",
                version_spans=(VersionSpan(1, 0, num_sampled),),
            ),
            started_at=float(index),
            finished_at=index + 0.5,
        )
        tree.add(completion)
        before = completion
    return tree


def _calls(session: CompletionTree) -> list[LoggedCall]:
    """What a gateway that logs calls has, with a canonical rendering: here the sampled ids themselves."""
    calls = [
        LoggedCall(session.prompt_ids(c).tolist(), c.sampled_ids.tolist(), c.logprobs.tolist(), ended=True)
        for c in session
    ]
    (row,) = published_rows(calls)
    (trace,) = _merge(session).traces
    same = (row.prompt_ids, row.response_ids, row.loss_mask) == (
        trace.prompt_ids.tolist(),
        trace.response_ids.tolist(),
        trace.loss_mask.tolist(),
    )
    if not same or row.logprobs != trace.response_logprobs.tolist():
        raise RuntimeError("the two merges differ: the figures would compare different work")
    return calls


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
