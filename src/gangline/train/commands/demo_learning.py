"""The second half of `gangline demo`: the small model learns the demo's task through the same unmodified agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gangline.train.commands.run import Ran, train_through

if TYPE_CHECKING:
    from gangline.wire.client.running import Running
    from gangline.wire.client.server import ServerClient

NUM_TASKS = 64
NUM_HELD_OUT_TASKS = 32
_GROUPS_PER_STEP = 4


class LearningReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the demo's training."""

    rewards: tuple[float, ...]
    """Mean reward of each step."""
    first_reward: float
    last_reward: float
    """Means on files never trained on, before the first step and after the last."""
    first_error: float | None
    last_error: float | None
    """Standard errors of these means; None if only one task's sessions count."""
    difference: float | None
    difference_error: float | None
    """Mean gain per file and its standard error. The mean is None if no file's sessions count in both evaluations; the
    error is None if fewer than two files do.
    """
    num_held_out_tasks: int
    minutes: float
    """Including both evaluations."""
    shuffled: bool
    """Whether this was the control, with rewards assigned at random."""
    chart: str
    run: str


async def learn(
    live: Running,
    client: ServerClient,
    *,
    name: str,
    model: str,
    tasks: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]],
    data_dir: Path,
    num_steps: int,
    num_samples: int,
    seed: int,
    shuffled: bool,
) -> Ran:
    """Train for `num_steps` and keep the useful part of the run's folder. Raises: the trainer's errors."""
    from gangline.train.run.experiment import Experiment

    experiment = Experiment.model_validate(
        {
            "name": f"{name}-learn",
            "model": model,
            "data": {"tasks": "examples/read_file", "num_samples": num_samples, "seeded": True},
            "evaluation": {"tasks": "examples/read_file", "num_samples": 1},
            "schedule": {
                "mode": "sync",
                "steps": num_steps,
                "groups_per_step": _GROUPS_PER_STEP,
                "checkpoint_every": num_steps,
            },
            # Small batches keep the tree's square mask small. Training only the last layers works as well, in half the
            # time.
            "learner": {"learning_rate": 1e-5, "last_layers": 10, "max_places": 600, "reference_metric": False},
            "control": "shuffled_rewards" if shuffled else "none",
            "seed": seed,
        }
    )
    return await train_through(client, live.control_token, experiment, tasks, data_dir, held_out)


def report_of(ran: Ran, *, shuffled: bool) -> LearningReport:
    first, last = ran.evaluations[0], ran.evaluations[-1]
    difference = ran.results.held_out_difference
    return LearningReport(
        rewards=tuple(record.reward_mean for record in ran.records),
        first_reward=first.reward_mean,
        last_reward=last.reward_mean,
        first_error=first.standard_error,
        last_error=last.standard_error,
        difference=None if difference is None else difference.mean,
        difference_error=None if difference is None else difference.standard_error,
        num_held_out_tasks=last.num_tasks,
        minutes=ran.results.wall_s / 60,
        shuffled=shuffled,
        chart=str(ran.chart),
        run=str(ran.folder),
    )
