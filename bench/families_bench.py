"""Whether reinforcement on five families of shell work carries over to three others, and to two other agents.

A policy of 2 million parameters is taught (`examples/families/policy.py`). For each seed, four arms train it through a
service with real sandboxes, first by imitation of sessions that earned 1, then by GRPO: the experiment itself, and
three controls, each of which lacks one thing. All arms are evaluated on the same held-out tasks. What is in the folder
is not done again, so a measurement that was stopped continues: remove the folder to begin anew. Drawn in
docs/images/families.png.

`families_135m_bench.py` does the same with SmolLM2 of 135 million parameters, with the experiment and the frozen
weights alone.

    usage: families_bench.py [--seeds N] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import yaml
from matplotlib.figure import Figure

from gangline.train.runs.log import read_evaluations, read_records
from programs import PROGRAM, printed_by

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "families"
PICTURE = ROOT / "docs" / "images" / "families.png"
TRAINED, HELD_OUT = ("read", "count", "edit", "rename", "fix"), ("find", "sort", "log")
NUM_TRAINED, FIRST_HELD_OUT = 400, 90_000
HELD_OUT_TASKS = {"plain": 18, "fenced": 9, "react": 9}
"""Style of the agent -> tasks; the policy is reinforced in style `plain` only."""
NUM_SAMPLES = 8
PHASES = ("imitation", "experiment")
ARMS = ("none", "shuffled_rewards", "random_mask", "frozen")
"""Controls; none is the experiment itself."""
QUANTILE = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> of Student's t, for an interval of 95 % on both sides."""

Figures = dict[str, dict[str, Any]]


class Tier(NamedTuple):
    """A policy, and what is done with it."""

    name: str
    taught: tuple[tuple[str, ...], ...] = ((),)
    """Options of policy.py, each time for the model of the time before."""
    phases: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """Phase -> section of the experiment -> what differs from the example's file."""
    arms: tuple[str, ...] = ARMS
    seeds: int = 5

    @property
    def folder(self) -> Path:
        return ROOT / ".gangline" / ("families" if self.name == "small" else f"families-{self.name}")


_IN_BFLOAT16 = {"dtype": "bfloat16", "reference_metric": False}
SMALL = Tier("small")
LARGE = Tier(
    "135m",
    taught=(
        ("--model", "smollm2", "--steps", "90", "--batch", "24"),
        ("--careless", "--steps", "24", "--batch", "24", "--seed", "1"),
    ),
    phases={
        "imitation": {"learner": {"learning_rate": 5e-5, **_IN_BFLOAT16}},
        "experiment": {"learner": {"learning_rate": 2e-5, **_IN_BFLOAT16}, "schedule": {"groups_per_step": 12}},
    },
    arms=("none", "frozen"),
    seeds=1,
)


class Arm(NamedTuple):
    """What one seed's run of one arm came to."""

    measured: dict[str, list[list[float]]]
    """Style -> of each evaluation, the share of each held-out task's sessions that earned 1."""
    minutes: float
    """From the beginning of its first phase to its last evaluation."""


def prepare(folder: Path, tier: Tier = SMALL) -> None:
    """Policy and tasks in the folder; a policy that is there is taken."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "policy").exists():
        options: tuple[str, ...] = ("--threads", str(os.cpu_count() or 1))
        for number, more in enumerate(tier.taught, 1):
            made = folder / ("policy" if number == len(tier.taught) else f"taught-{number}")
            printed_by(sys.executable, str(EXAMPLE / "policy.py"), str(made), *options, *more)
            options = (*options, "--model", str(made))
    (folder / "tasks.jsonl").write_text(_tasks(TRAINED, "--tasks", str(NUM_TRAINED)))
    held_out = [
        _tasks(HELD_OUT, "--tasks", str(number), "--first", str(FIRST_HELD_OUT), "--style", style)
        for style, number in HELD_OUT_TASKS.items()
    ]
    (folder / "held_out.jsonl").write_text("".join(held_out))


def _tasks(families: Sequence[str], *options: str) -> str:
    return printed_by(sys.executable, str(EXAMPLE / "tasks.py"), "--families", ",".join(families), *options)


def train(folder: Path, control: str, seed: int, tier: Tier = SMALL) -> Arm:
    """All phases of an arm, as far as they are not done."""
    home = folder / f"{control}-{seed}"
    home.mkdir(exist_ok=True)
    model, seconds, means = folder / "policy", 0.0, list[tuple[float | None, ...]]()
    # The weights of a frozen arm stay, so one phase of one step says all.
    for phase in PHASES[1:] if control == "frozen" else PHASES:
        document = yaml.safe_load((EXAMPLE / f"{phase}.yaml").read_text())
        document |= {"seed": seed, "control": control, "model": str(model)}
        for part, settings in tier.phases.get(phase, {}).items():
            document[part] |= settings
        document["data"]["tasks"] = str(folder / "tasks.jsonl")
        if "evaluation" in document:
            document["evaluation"]["tasks"] = str(folder / "held_out.jsonl")
        if control == "frozen":
            document["schedule"]["steps"] = 1
        if control == "random_mask":
            # Tokens that no engine sampled have no log-prob to correct by.
            document["algorithm"]["overrides"] = {"loss.correction.level": "none"}
        (home / f"{phase}.yaml").write_text(yaml.safe_dump(document))
        if not list((home / phase).glob("runs/*/results.json")):
            printed_by(PROGRAM, "train", "run", str(home / f"{phase}.yaml"), "--data", str(home / phase), "--json")
        (run,) = (home / phase / "runs").iterdir()
        evaluations = read_evaluations(run / "evaluations.jsonl")
        means += [one.task_means for one in evaluations]
        assert all(len(one) == sum(HELD_OUT_TASKS.values()) for one in means), f"{run} is of other tasks: remove it"
        seconds += max(one.wall_s for one in (*evaluations, *read_records(run / "metrics.jsonl")))
        model = run / "model"
    measured = {
        style: [[mean for mean in one[part] if mean is not None] for one in means] for style, part in _parts().items()
    }
    return Arm(measured, seconds / 60)


def drift(folder: Path, tier: Tier) -> Figures:
    """How often it matters how rows are built: the engine renders every prompt anew from the text."""
    home = folder / "observed"
    home.mkdir(exist_ok=True)
    for name in ("tasks.jsonl", "held_out.jsonl"):
        tasks = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        lines = [json.dumps(task | {"capture": {"tier": "observe"}}) for task in tasks]
        (home / name).write_text("\n".join(lines) + "\n")
    if not (home / "policy").exists():
        (home / "policy").symlink_to(folder / "policy")
    train(home, "frozen", 0, tier)
    data = str(home / "frozen-0" / PHASES[-1])
    printed_by(PROGRAM, "export", "*", "--data", data, "--format", "jsonl", "--name", "rows", "--out", str(home))
    rows = Counter(json.loads(line)["session_id"] for line in (home / "rows.jsonl").open())
    several = sum(number > 1 for number in rows.values())
    return {
        f"learn.families.{tier.name}_drift_share": {
            "value": round(several / len(rows), 4),
            "unit": "share",
            "note": f"{several} of {len(rows)} sessions have a turn whose context has other ids than were sampled, "
            "where the engine renders each prompt anew; policy as taught",
        }
    }


def _parts() -> dict[str, slice]:
    """Style -> its tasks' places among the held-out ones."""
    ends = np.cumsum([0, *HELD_OUT_TASKS.values()]).tolist()
    return {style: slice(ends[at], ends[at + 1]) for at, style in enumerate(HELD_OUT_TASKS)}


def figures(arms: dict[str, list[Arm]], tier: Tier = SMALL) -> Figures:
    """arms: control -> of each seed. Each figure over seeds, with the interval of 95 % where there are several."""
    learned, frozen, prefix = arms["none"], arms["frozen"], f"learn.families.{tier.name}"
    found = {
        f"{prefix}_{name}": _over_seeds([np.mean(one.measured["plain"][which]) for one in group], what)
        for name, group, which, what in (
            ("before", frozen, 0, "as it was taught"),
            ("imitated", learned, 0, "after imitation"),
            ("after", learned, -1, "after imitation and GRPO"),
        )
    }
    for control in tier.arms[1:]:
        after = [np.mean(one.measured["plain"][-1]) for one in arms[control]]
        found[f"{prefix}_after_{control}"] = _over_seeds(after, f"control {control}")
    for name, group, which in (("before", frozen, 0), ("after", learned, -1)):
        # Of a task's eight sessions, one at least earned 1; the mean of all sessions is pass@1.
        passed = [np.mean([mean > 0 for mean in one.measured["plain"][which]]) for one in group]
        found[f"{prefix}_{name}_pass_at_{NUM_SAMPLES}"] = _over_seeds(passed, f"pass@{NUM_SAMPLES}")
    found |= _carried_over(learned, frozen, tier)
    found[f"{prefix}_minutes"] = {
        "value": round(float(np.mean([one.minutes for one in learned])), 1),
        "unit": "min",
        "note": "of a seed's training, its evaluations included; the policy's teaching is not",
    }
    return found


def _carried_over(learned: Sequence[Arm], frozen: Sequence[Arm], tier: Tier) -> Figures:
    """To the agents that it was not trained through; of the tier 135m the gain itself, too."""
    shares: list[float] = []
    for style in HELD_OUT_TASKS:
        before = float(np.mean([np.mean(one.measured[style][0]) for one in frozen]))
        shares.append(float(np.mean([np.mean(one.measured[style][-1]) for one in learned])) - before)
    plain, *others = shares
    note = (
        f"gain through agents never trained on ({others[0]:.2f} fenced, {others[1]:.2f} react; the lesser one) "
        f"over that through the agent that was ({plain:.2f}); held-out families"
    )
    share = {"value": round(min(others) / plain, 2), "unit": "", "note": note}
    if tier.name == "small":
        return {"learn.families.transfer_share": share}
    gain = {"value": round(plain, 3), "unit": "", "note": "held-out families, temperature 1, over the policy as taught"}
    return {f"learn.families.gain_{tier.name}": gain, f"learn.families.transfer_share_{tier.name}": share}


def draw(arms: dict[str, list[Arm]]) -> None:
    """A panel for each style: every seed a point, their mean a bar."""
    figure = Figure(figsize=(8, 3.2), dpi=140, layout="constrained")
    shown = [("as taught", arms["frozen"], 0), ("imitation", arms["none"], 0), ("GRPO", arms["none"], -1)]
    shown += [(control.replace("_", " "), arms[control], -1) for control in ARMS[1:]]
    for axes, style in zip(figure.subplots(1, len(HELD_OUT_TASKS), sharey=True), HELD_OUT_TASKS, strict=True):
        for at, (_, group, which) in enumerate(shown):
            values = [float(np.mean(one.measured[style][which])) for one in group]
            axes.bar(at, np.mean(values), color="#4878a8" if at < 3 else "#b0b0b0", width=0.7)
            axes.plot([at] * len(values), values, "o", color="black", markersize=2.5)
        axes.set_title(f"agent in style {style}" + (", trained on" if style == "plain" else ""), fontsize=9)
        axes.set_xticks(range(len(shown)), [name for name, _, _ in shown], rotation=40, ha="right", fontsize=8)
        axes.set_ylim(0, 1)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("held-out families: share of sessions", fontsize=9)
    figure.savefig(PICTURE)


def _over_seeds(values: Sequence[Any], what: str) -> dict[str, Any]:
    number = len(values)
    note = f"{what}; held-out families, mean of {number} seeds"
    if number in QUANTILE:
        half = QUANTILE[number] * float(np.std(values, ddof=1)) / math.sqrt(number)
        note += f"; interval of 95 %: {np.mean(values) - half:.2f} to {np.mean(values) + half:.2f}"
    note += f"; by seed {', '.join(f'{value:.2f}' for value in values)}"
    return {"value": round(float(np.mean(values)), 3), "unit": "", "note": note}


def run(tier: Tier = SMALL, folder: Path | None = None, seeds: int | None = None) -> Figures:
    """Returns figure name -> {value, unit, note}."""
    folder = folder or tier.folder
    prepare(folder, tier)
    arms = dict[str, list[Arm]]()
    for seed in range(seeds or tier.seeds):
        for control in tier.arms:
            print(f"{control}, seed {seed} ...", file=sys.stderr, flush=True)
            arms.setdefault(control, []).append(train(folder, control, seed, tier))
            after = {style: round(float(np.mean(one[-1])), 3) for style, one in arms[control][-1].measured.items()}
            print(f"  {after} after {arms[control][-1].minutes:.1f} min", file=sys.stderr, flush=True)
    if tier.name == "small":
        draw(arms)
    return figures(arms, tier) | drift(folder, tier)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what reinforcement on five families carries over.")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--folder", type=Path, help="of policy and runs")
    given = parser.parse_args()
    print(json.dumps(run(SMALL, given.folder, given.seeds), indent=2))


if __name__ == "__main__":
    main()
