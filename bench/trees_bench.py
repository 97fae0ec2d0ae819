"""What trees are worth: the same model learns the same game from whole sessions, and from sessions and their forks.

The game and the model are those of `letters.py`, and every arm samples as many tokens a step, as far as whole forks
allow. Groups of `chains` have eight sessions. Those of trees have four, and forks behind their turns for the rest of
the tokens, by `chosen_states` as in a real run: two rounds, each turn forked once.

    chains             GRPO
    tree_grpo          Tree-GRPO; turns of the largest surprise are sampled again
    tree_grpo_evenly   the same; turns spread over the session
    tree_adv           TreeAdv; turns of the largest surprise

All of it twice: `every_turn` counts in the reward alike, or the `last_turn` alone does.

Measured, for each of these ways: `learn.trees.WAY.tokens_to_learn.*`, sampled tokens until the reward of games that
nothing is trained on is `LEARNED`, over three evaluations; all of the run where that never comes; median of the seeds.
`learn.trees.WAY.last_reward.*`, mean of the last five evaluations. `learn.trees.WAY.token_share.*`, the tokens to learn
by the chains' of the same seed: geometric mean, with 95 % of a bootstrap over the seeds. The bar is 0.6.

Drawn in docs/images/trees.png.
"""

from __future__ import annotations

import copy
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import torch
from fidelity_bench import LEARNING_RATE, NUM_PASSES, batches_of, logprobs_of, session_of
from letters import END, Game, Rewarded, new_games, play, taught_model
from matplotlib.figure import Figure
from numpy.typing import NDArray
from transformers import PreTrainedModel

from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.train.collecting.beside.trees import TreeSettings, chosen_states, num_own_sampled
from gangline.train.collecting.groups import Fork, Group
from gangline.train.learning.algorithms import Algorithm, algorithm
from gangline.train.learning.forward import loss_inputs
from gangline.train.learning.loss import policy_loss
from gangline.train.learning.samples import make_samples

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "trees.png"
NUM_GROUPS = 8
NUM_STEPS: dict[Rewarded, int] = {"every_turn": 50, "last_turn": 120}
"""The last turn alone tells less."""
SEEDS = (0, 1, 2, 3, 4)
NUM_CHAINS, NUM_STEMS, NUM_ROUNDS = 8, 4, 2
EVERY, NUM_EVALUATED = 2, 128
LEARNED = 0.8
BUILDER = PrefixMergingBuilder(PrefixMergingConfig(end_of_turn_ids=(END,)))

Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Arm:
    settings: Algorithm
    choose: Literal["entropy", "evenly"] | None
    """None forks nothing."""
    colour: str


ARMS = {
    "chains": Arm(algorithm("grpo"), None, "#1f3b73"),
    "tree_grpo": Arm(algorithm("tree_grpo"), "entropy", "#c2185b"),
    "tree_grpo_evenly": Arm(algorithm("tree_grpo"), "evenly", "#e0a100"),
    "tree_adv": Arm(algorithm("tree_adv"), "entropy", "#4d8f6f"),
}


class Run(NamedTuple):
    arm: str
    rewarded: Rewarded
    seed: int


class Seen(msgspec.Struct, frozen=True):
    """An evaluation."""

    num_sampled: int
    """Tokens that were sampled for training so far."""
    reward: float


def collected(
    arm: Arm, rewarded: Rewarded, model: PreTrainedModel, draws: np.random.Generator, chance: torch.Generator
) -> list[Group]:
    """The groups of one step."""
    made = new_games(NUM_GROUPS, NUM_CHAINS if arm.choose is None else NUM_STEMS, draws, rewarded)
    games = {game.session_id: game for mine in made for game in mine}
    play(model, list(games.values()), "stitched", chance)
    groups = [
        Group(f"g{number}", tuple(session_of(game, BUILDER) for game in mine)) for number, mine in enumerate(made)
    ]
    if arm.choose is None:
        return groups
    budgets = [sum(map(num_own_sampled, group.sessions)) * NUM_CHAINS // NUM_STEMS for group in groups]
    for _ in range(NUM_ROUNDS):
        groups = grown(arm.choose, groups, budgets, games, model, chance)
    return groups


def grown(
    choose: Literal["entropy", "evenly"],
    groups: list[Group],
    budgets: list[int],
    games: dict[str, Game],
    model: PreTrainedModel,
    chance: torch.Generator,
) -> list[Group]:
    """One round of forks, played together; as `TreeOfTask` makes them through a service."""
    found: list[tuple[int, Game, Fork]] = []
    for number, (group, budget) in enumerate(zip(groups, budgets, strict=True)):
        settings = TreeSettings(branches=1, turns=2, choose=choose, max_sampled_tokens=budget)
        done = {(fork.parent_id, fork.num_turns) for fork in group.forks.values()}
        for state in chosen_states(group, settings, done):
            forks = (
                games[state.session_id].forked(f"{state.session_id}.t{state.turn}.{sample}", state.turn)
                for sample in range(state.samples)
            )
            found += [(number, fork, Fork(state.session_id, state.num_turns)) for fork in forks]
    play(model, [game for _, game, _ in found], "stitched", chance)
    for number, game, fork in found:
        games[game.session_id], group = game, groups[number]
        groups[number] = replace(
            group, sessions=(*group.sessions, session_of(game, BUILDER)), forks={**group.forks, game.session_id: fork}
        )
    return groups


def evaluated(model: PreTrainedModel, rewarded: Rewarded, seed: int) -> float:
    """The mean reward of games that start with each letter alike."""
    games = [Game(f"e{number}", number % 4, rewarded=rewarded) for number in range(NUM_EVALUATED)]
    play(model, games, "stitched", torch.Generator().manual_seed(seed))
    return float(np.mean([game.reward for game in games]))


def train(run: Run) -> list[Seen]:
    torch.set_num_threads(1)
    arm, seed, model = ARMS[run.arm], run.seed, copy.deepcopy(taught_model(run.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    draws, chance = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    num_sampled, seen = 0, [Seen(0, evaluated(model, run.rewarded, 0))]
    for step in range(1, NUM_STEPS[run.rewarded] + 1):
        groups = collected(arm, run.rewarded, model, draws, chance)
        num_sampled += sum(num_own_sampled(one) for group in groups for one in group.sessions)
        batches = batches_of([one for group in groups for one in make_samples(group, arm.settings)])
        for batch in batches * NUM_PASSES:
            optimizer.zero_grad()
            policy_loss(loss_inputs(batch, logprobs_of(model, batch)), arm.settings.loss).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if step % EVERY == 0:
            seen.append(Seen(num_sampled, evaluated(model, run.rewarded, step)))
    return seen


Found = dict[Rewarded, dict[str, list[list[Seen]]]]
"""Way of rewarding -> arm -> of each seed."""


def measured() -> Found:
    runs = [Run(arm, rewarded, seed) for rewarded in get_args(Rewarded) for arm in ARMS for seed in SEEDS]
    with ProcessPoolExecutor(2) as pool:
        seen = dict(zip(runs, pool.map(train, runs), strict=True))
    found: Found = {
        rewarded: {arm: [seen[Run(arm, rewarded, seed)] for seed in SEEDS] for arm in ARMS}
        for rewarded in get_args(Rewarded)
    }
    for rewarded, by_arm in found.items():
        for name, mine in by_arm.items():
            rewards = ", ".join(f"{last_reward(one):.3f}" for one in mine)
            print(f"  {rewarded}, {name}: last rewards {rewards}", file=sys.stderr)
    return found


def last_reward(seen: list[Seen]) -> float:
    return float(np.mean([one.reward for one in seen[-5:]]))


def tokens_to_learn(seen: list[Seen]) -> int:
    for at in range(2, len(seen)):
        if np.mean([one.reward for one in seen[at - 2 : at + 1]]) >= LEARNED:
            return seen[at].num_sampled
    return seen[-1].num_sampled


def interval(ratios: NDArray[np.float64]) -> tuple[float, float, float]:
    """Geometric mean, and 95 % of a bootstrap over the seeds."""
    logs = np.log(ratios)
    means = np.exp(np.random.default_rng(0).choice(logs, (10_000, len(logs))).mean(1))
    return float(np.exp(logs.mean())), float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def draw(found: Found) -> None:
    figure = Figure(figsize=(10, 4), dpi=140, layout="constrained")
    for axes, (rewarded, by_arm) in zip(figure.subplots(1, 2, sharey=True), found.items(), strict=True):
        for name, mine in by_arm.items():
            tokens = np.mean([[one.num_sampled for one in seen] for seen in mine], axis=0)
            rewards = np.array([[one.reward for one in seen] for seen in mine])
            axes.plot(tokens, rewards.mean(0), color=ARMS[name].colour, label=name)
            axes.fill_between(tokens, rewards.min(0), rewards.max(0), color=ARMS[name].colour, alpha=0.1, linewidth=0)
        axes.axhline(LEARNED, color="grey", linewidth=0.8, linestyle=":")
        axes.set_title(f"reward: {rewarded.replace('_', ' ')}", fontsize=9)
        axes.set_xlabel("sampled tokens")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel(f"reward, mean and range of {len(SEEDS)} seeds")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(PICTURE)


def run() -> Figures:
    """Measure and draw; figure name -> {value, unit, note}. A quarter of an hour."""
    found = measured()
    draw(found)
    figures: Figures = {}
    for rewarded, by_arm in found.items():
        figures |= figures_of(rewarded, by_arm)
    return figures


def figures_of(rewarded: Rewarded, by_arm: dict[str, list[list[Seen]]]) -> Figures:
    prefix = f"learn.trees.{rewarded}"
    game = f"{NUM_STEPS[rewarded]} steps of {NUM_GROUPS} groups, {len(SEEDS)} seeds; reward {LEARNED} is learned"
    needed = {name: np.array([tokens_to_learn(seen) for seen in mine], np.float64) for name, mine in by_arm.items()}
    figures: Figures = {}
    for name, mine in by_arm.items():
        rewards = [last_reward(seen) for seen in mine]
        by_seed = ", ".join(f"{one:.2f}" for one in rewards)
        figures[f"{prefix}.last_reward.{name}"] = {
            "value": round(float(np.mean(rewards)), 3),
            "unit": "reward",
            "note": f"{game}; by seed: {by_seed}; {mine[0][0].reward:.2f} before",
        }
        by_seed = ", ".join(f"{one:.0f}" for one in needed[name])
        figures[f"{prefix}.tokens_to_learn.{name}"] = {
            "value": float(np.median(needed[name])),
            "unit": "tokens",
            "note": f"{game}; by seed: {by_seed}; of {mine[0][-1].num_sampled} tokens in all",
        }
        if name != "chains":
            mean, low, high = interval(needed[name] / needed["chains"])
            figures[f"{prefix}.token_share.{name}"] = {
                "value": round(mean, 3),
                "unit": "ratio",
                "note": f"{game}; 95 % of a bootstrap over the seeds: {low:.2f} to {high:.2f}; the bar is 0.6",
            }
    return figures


if __name__ == "__main__":
    print(datetime.now(UTC).date(), json.dumps(run(), indent=2))
