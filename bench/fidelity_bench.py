"""What exact rows are worth: the same model learns the same game from exact and from spliced rows.

The game and the model are those of `letters.py`: four turns, in which what was said before matters, and a tokenizer
with many spellings of every text. Everything but the rows is the same: the weights to begin with, seeds, groups, the
algorithm (GRPO, two passes over a batch in two updates each).

    exact      the engine reads the ids that were sampled (stitched); rows of `prefix_merging`
    split      it reads the text, tokenized anew; rows end where the ids changed: more rows, each of them exact
    spliced    as split, but joined by the published rule: rows say that the engine read what was sampled
    corrected  spliced rows, the trainer's own log-probs as the old policy's, truncated importance sampling by token

Measured before each step's first update, when the trainer's model is the one that sampled, so that each ratio ought to
be 1: `learn.fidelity.mean_abs_log_ratio.*`, `learn.fidelity.max_ratio.*`, `learn.fidelity.effective_sample_share.*`,
`learn.fidelity.clipped_share.*` (tokens outside of the clip range, which PPO's clipping may silence).
Then `learn.fidelity.last_reward.*`, mean over the last ten steps and all seeds, and `learn.fidelity.steps_to_learn.*`:
steps until the mean of three steps' rewards is 0.9, all of the run where that never comes; median of the seeds.

Drawn in docs/images/fidelity.png.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from letters import END, Game, Play, new_games, play, taught_model
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from transformers import PreTrainedModel

from gangline.domain.session import SessionResult
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import Algorithm, algorithm
from gangline.train.learning.forward import loss_inputs, token_logprobs
from gangline.train.learning.loss import policy_loss
from gangline.train.learning.packing import Batch, pack
from gangline.train.learning.samples import Sample, make_samples

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "fidelity.png"
NUM_STEPS, NUM_GROUPS, SAMPLES = 40, 8, 8
SEEDS = (0, 1, 2)
LEARNING_RATE = 2e-3
NUM_PASSES, NUM_UPDATES = 2, 2
LAST = 10
LEARNED = 0.9

Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Arm:
    engine_reads: Play
    on_divergence: Literal["split", "splice"]
    settings: Algorithm
    recomputes: bool
    """Whether the trainer's own log-probs are the old policy's; else the engine's are."""
    colour: str


BY_ROW = {"loss.aggregation": "sequence_mean"}
"""As it was measured: each row weighs one."""
PLAIN = algorithm("grpo", BY_ROW)
ARMS = {
    "exact": Arm("stitched", "split", PLAIN, recomputes=False, colour="#1f3b73"),
    "split": Arm("rendered", "split", PLAIN, recomputes=False, colour="#4d8f6f"),
    "spliced": Arm("rendered", "splice", PLAIN, recomputes=False, colour="#c2185b"),
    "corrected": Arm("rendered", "splice", algorithm("grpo", BY_ROW), recomputes=True, colour="#e0a100"),
}


@dataclass(frozen=True)
class StepSeen:
    """Of one step, before its first update; tokens of all rows."""

    reward: float
    mean_abs_log_ratio: float
    max_ratio: float
    effective_sample_share: float
    clipped_share: float


def groups_of(games: list[list[Game]], arm: Arm) -> list[Group]:
    builder = PrefixMergingBuilder(PrefixMergingConfig(on_divergence=arm.on_divergence, end_of_turn_ids=(END,)))
    return [
        Group(f"g{number}", tuple(session_of(game, builder) for game in group)) for number, group in enumerate(games)
    ]


def session_of(game: Game, builder: PrefixMergingBuilder) -> SessionResult:
    trajectory = builder.build(game.tree, session_id=game.session_id, task_id="letters")
    return SessionResult(
        session_id=game.session_id,
        task_id="letters",
        node_id="bench",
        attempt=1,
        fence=1,
        outcome="completed",
        reward=game.reward,
        completions=tuple(game.tree),
        trajectory=trajectory,
    )


def batches_of(samples: Sequence[Sample]) -> list[Batch]:
    """The step's samples in `NUM_UPDATES` parts, sessions whole."""
    sessions = list(dict.fromkeys(sample.session_id for sample in samples))
    parts = [set(sessions[number::NUM_UPDATES]) for number in range(NUM_UPDATES)]
    return [pack([sample for sample in samples if sample.session_id in part], "padded") for part in parts]


def logprobs_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    return token_logprobs(model, batch)  # pyright: ignore[reportArgumentType]


def seen(reward: float, batches: list[Batch], found: list[torch.Tensor], settings: Algorithm) -> StepSeen:
    recorded = np.concatenate([batch.behaviour_logprobs for batch in batches])
    log_ratio = np.concatenate([one.numpy() for one in found]).astype(np.float64) - recorded
    ratio = np.exp(np.clip(log_ratio, -20, 20))
    outside = (ratio < 1 - settings.loss.clip_low) | (ratio > 1 + settings.loss.clip_high)
    return StepSeen(
        reward=reward,
        mean_abs_log_ratio=float(np.abs(log_ratio).mean()),
        max_ratio=float(ratio.max()),
        effective_sample_share=float(ratio.sum() ** 2 / (np.square(ratio).sum() * len(ratio))),
        clipped_share=float(outside.mean()),
    )


def train(arm: Arm, taught: PreTrainedModel, seed: int) -> list[StepSeen]:
    model = copy.deepcopy(taught)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    draws, chance = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    steps: list[StepSeen] = []
    for _ in range(NUM_STEPS):
        games = new_games(NUM_GROUPS, SAMPLES, draws)
        every = [game for group in games for game in group]
        play(model, every, arm.engine_reads, chance)
        samples = [one for group in groups_of(games, arm) for one in make_samples(group, arm.settings)]
        batches = batches_of(samples)
        with torch.no_grad():
            found = [logprobs_of(model, batch) for batch in batches]
        steps.append(seen(float(np.mean([game.reward for game in every])), batches, found, arm.settings))
        for batch, old in [*zip(batches, found, strict=True)] * NUM_PASSES:
            inputs = loss_inputs(batch, logprobs_of(model, batch), old_logprobs=old if arm.recomputes else None)
            optimizer.zero_grad()
            policy_loss(inputs, arm.settings.loss).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return steps


Found = dict[str, dict[str, NDArray[np.float64]]]
"""arm -> what -> [seeds, steps]"""

WHATS = tuple(StepSeen.__dataclass_fields__)


def measure() -> Found:
    torch.set_num_threads(1)
    found: Found = {}
    taught = taught_model(seed=0)
    for name, arm in ARMS.items():
        runs = [train(arm, taught, seed) for seed in SEEDS]
        found[name] = {what: np.array([[getattr(step, what) for step in run] for run in runs]) for what in WHATS}
        last = found[name]["reward"][:, -LAST:].mean(1)
        print(f"  {name}: last rewards {', '.join(f'{one:.3f}' for one in last)}", file=sys.stderr, flush=True)
    return found


def steps_to_learn(rewards: NDArray[np.float64]) -> int:
    """rewards: [steps]"""
    smooth = np.convolve(rewards, np.ones(3) / 3, mode="valid")
    return int(np.argmax(smooth >= LEARNED)) + 3 if (smooth >= LEARNED).any() else len(rewards)


def draw(found: Found) -> None:
    figure = Figure(figsize=(8, 5), dpi=140, layout="constrained")
    ratios, share, clipped, reward = figure.subplots(2, 2).flat
    _panel(ratios, found, "mean_abs_log_ratio", "mean |log ratio|, nats, before the first update")
    _panel(share, found, "effective_sample_share", "effective sample share")
    _panel(clipped, found, "clipped_share", "share of tokens outside of the clip range")
    _panel(reward, found, "reward", f"reward, mean and range of {len(SEEDS)} seeds")
    ratios.set_yscale("symlog", linthresh=1e-4)
    reward.set_ylim(0, 1)
    reward.legend(frameon=False, fontsize=8, loc="lower right")
    figure.supxlabel("step", fontsize=9)
    figure.savefig(PICTURE)


def _panel(axes: Axes, found: Found, what: str, title: str) -> None:
    for name, values in found.items():
        rows, colour = values[what], ARMS[name].colour
        axes.plot(rows.mean(0), color=colour, linewidth=1.5, label=name)
        axes.fill_between(range(rows.shape[1]), rows.min(0), rows.max(0), color=colour, alpha=0.12, linewidth=0)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def run() -> Figures:
    """Measure and draw; figure name -> {value, unit, note}. A quarter of an hour."""
    found = measure()
    draw(found)
    game = f"{NUM_GROUPS} groups of {SAMPLES} sessions of 4 turns a step, {NUM_STEPS} steps, {len(SEEDS)} seeds"
    units = {"mean_abs_log_ratio": "nats", "max_ratio": "ratio"}
    figures: Figures = {}
    for name, values in found.items():
        for what in WHATS[1:]:
            value = float(values[what].max() if what == "max_ratio" else values[what].mean())
            unit = units.get(what, "share")
            figures[f"learn.fidelity.{what}.{name}"] = {"value": float(f"{value:.3g}"), "unit": unit, "note": game}
        first, last = values["reward"][:, :3].mean(), values["reward"][:, -LAST:].mean(1)
        told = f"{game}; {', '.join(f'{one:.2f}' for one in last)} by seed, {first:.2f} in the first three steps"
        value = round(float(last.mean()), 3)
        figures[f"learn.fidelity.last_reward.{name}"] = {"value": value, "unit": "reward", "note": told}
        steps = [steps_to_learn(row) for row in values["reward"]]
        told = f"{game}; by seed: {', '.join(map(str, steps))}"
        value = float(np.median(steps))
        figures[f"learn.fidelity.steps_to_learn.{name}"] = {"value": value, "unit": "steps", "note": told}
    return figures


if __name__ == "__main__":
    print(datetime.now(UTC).date(), json.dumps(run(), indent=2))
