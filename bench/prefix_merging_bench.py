"""What prefix merging is worth to a trainer: one captured load, its rows built three ways, one step of each.

The load is real: three groups of sessions of an agent with 5 to 15 turns of tools, some with a sub-agent or a compacted
history, through server, node and proxy, captured and stitched. The engine is scripted, the tokenizer byte-level. Each
way of building trains the very same sampled tokens in the very same contexts, so the step is the same step: that is
checked, by the tokens and by the gradient. An update is one forward and backward pass, as the sources count it (Polar,
4.1): of one row, or, of the tree, of one session. The model is a small random one, on one core.

- `learn.prefix.updates.*`: updates of the step.
- `learn.prefix.tokens.*`: tokens that the model computes in it.
- `learn.prefix.step_s_ratio`, `learn.prefix.tree_step_s_ratio`: processor time of the step with `per_request`, over
  that with `prefix_merging` and with `tree`.

Drawn in docs/images/prefix-merging.png.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from agent_node import CONVERSE, script, task_of
from matplotlib.figure import Figure
from service_bench import served
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from gangline.domain.completion import CompletionTree
from gangline.domain.contracts import Builder
from gangline.domain.session import SessionResult
from gangline.serving.scripted.server import scripted_server
from gangline.settings.plugins import make_builder
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.forward import loss_inputs, token_logprobs
from gangline.train.learning.loss import LossTotals, policy_loss
from gangline.train.learning.packing import Batch, pack
from gangline.train.learning.samples import Sample, make_samples
from gangline.wire.client.server import ServerClient

NODE = Path(__file__).with_name("agent_node.py")
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "prefix-merging.png"
NUM_GROUPS, SAMPLES = 3, 4
BUILDERS = ("per_request", "prefix_merging", "tree")
SETTINGS = algorithm("grpo", {"loss.aggregation": "token_mean"})
MODEL = LlamaConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=16_384,
)

Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Step:
    """A step over the whole load."""

    num_rows: int
    num_updates: int
    num_tokens: int
    """That the model computed."""
    num_trained: int
    took_s: float
    """Processor time; there is one thread."""
    gradient: torch.Tensor


async def captured(folder: Path) -> list[Group]:
    """The load, as the service reports it."""
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(scripted_server(script()))
        server = await stack.enter_async_context(served("server", folder / "server"))
        await stack.enter_async_context(served("n1", folder / "node", server.url, engine_url, program=NODE))
        client = await stack.enter_async_context(ServerClient(server.url, None))
        names = [f"load-{number}" for number in range(NUM_GROUPS)]
        await client.submit_many([task_of(name, CONVERSE, SAMPLES) for name in names])
        groups: list[Group] = []
        for name in names:
            await client.wait(name)
            groups.append(Group(name, tuple(await client.result(name))))
    assert all(session.outcome == "completed" for group in groups for session in group.sessions)
    return groups


def built(groups: list[Group], builder: Builder) -> list[Group]:
    return [Group(group.task_id, tuple(_rebuilt(one, builder) for one in group.sessions)) for group in groups]


def _rebuilt(session: SessionResult, builder: Builder) -> SessionResult:
    trajectory = builder.build(
        CompletionTree(session.completions), session_id=session.session_id, task_id=session.task_id
    )
    # One success a group: every token has an advantage, and the same one whatever the rows.
    return msgspec.structs.replace(session, trajectory=trajectory, reward=float(session.session_id.endswith("0")))


def updates(samples: list[Sample], builder: str) -> Iterator[Batch]:
    if builder != "tree":
        yield from (pack([sample], "padded") for sample in samples)
        return
    for session_id in dict.fromkeys(sample.session_id for sample in samples):
        yield pack([sample for sample in samples if sample.session_id == session_id], "tree")


def step(model: PreTrainedModel, groups: list[Group], builder: str) -> Step:
    """Forward and backward of all rows; gradients add up, so the order of updates makes no difference."""
    model.zero_grad()
    rebuilt = built(groups, make_builder(builder, {}))
    started_s = time.process_time()
    samples = [sample for group in rebuilt for sample in make_samples(group, SETTINGS)]
    num_trained = sum(int(np.count_nonzero(sample.weights)) for sample in samples)
    totals = LossTotals(num_tokens=num_trained, num_traces=len(samples), num_sessions=NUM_GROUPS * SAMPLES)
    num_updates = num_tokens = 0
    for batch in updates(samples, builder):
        logprobs = token_logprobs(model, batch)  # pyright: ignore[reportArgumentType]
        # The scripted engine's log-probs are made up: on-policy, so that no token is clipped.
        inputs = loss_inputs(batch, logprobs, old_logprobs=logprobs.detach())
        policy_loss(inputs, SETTINGS.loss, totals).loss.backward()
        num_updates, num_tokens = num_updates + 1, num_tokens + batch.num_places
    took_s = time.process_time() - started_s
    gradient = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    return Step(len(samples), num_updates, num_tokens, num_trained, took_s, gradient)


def check_same(steps: dict[str, Step]) -> float:
    """What was compared is one step, three times. Returns the largest relative difference of gradients."""
    one, *others = steps.values()
    assert all(other.num_trained == one.num_trained for other in others), "the trained tokens differ"
    apart = max(float((other.gradient - one.gradient).norm() / one.gradient.norm()) for other in others)
    assert apart < 1e-3, f"the gradients differ by {apart:.1e}"
    return apart


def draw(steps: dict[str, Step]) -> None:
    figure = Figure(figsize=(8, 2.8), dpi=140, layout="constrained")
    shown = (
        ("updates a step", [one.num_updates for one in steps.values()]),
        ("thousand tokens computed", [round(one.num_tokens / 1000) for one in steps.values()]),
        ("processor seconds a step", [round(one.took_s, 1) for one in steps.values()]),
    )
    for axes, (title, values) in zip(figure.subplots(1, 3), shown, strict=True):
        bars = axes.bar(list(steps), values, color=("#c0762b", "#1f3b73", "#4d8f6f"), width=0.65)
        axes.bar_label(bars)
        axes.set_title(title, fontsize=10)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(PICTURE)


def measure() -> tuple[dict[str, Step], float]:
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        groups = asyncio.run(captured(Path(name)))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODEL).train()
    step(model, groups[:1], "prefix_merging")  # finds memory and code cold
    steps = {builder: step(model, groups, builder) for builder in BUILDERS}
    return steps, check_same(steps)


def run() -> Figures:
    """Measure and draw; figure name -> {value, unit, note}. A minute or two."""
    steps, apart = measure()
    draw(steps)
    merged, tree, single = steps["prefix_merging"], steps["tree"], steps["per_request"]
    load = (
        f"{NUM_GROUPS * SAMPLES} captured sessions of 5 to 15 turns, some with sub-agents or a compacted history; "
        f"{single.num_trained:,} trained tokens"
    )
    figures: Figures = {}
    for builder, one in steps.items():
        figures[f"learn.prefix.updates.{builder}"] = {"value": one.num_updates, "unit": "updates", "note": load}
        figures[f"learn.prefix.tokens.{builder}"] = {"value": one.num_tokens, "unit": "tokens", "note": "of that step"}
    times = ", ".join(f"{builder} {one.took_s:.1f} s" for builder, one in steps.items())
    note = f"{times} for forward and backward, small Llama, processor time of one core; gradients alike to {apart:.0e}"
    for name, one in (("step_s_ratio", merged), ("tree_step_s_ratio", tree)):
        value = round(single.took_s / one.took_s, 2)
        figures[f"learn.prefix.{name}"] = {"value": value, "unit": "ratio", "note": note}
    return figures


if __name__ == "__main__":
    print(datetime.now(UTC).date(), json.dumps(run(), indent=2))
