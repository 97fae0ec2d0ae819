"""A run's own records: a line of JSON per step, and one per evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from gangline.durable import append, write_whole
from gangline.private import make_private_folder
from gangline.training.collecting.sampling.sampler import SamplerMetrics
from gangline.training.weights.update import UpdateProfile

__all__ = [
    "EvaluationRecord",
    "PairedDifference",
    "RunLog",
    "StepRecord",
    "paired_difference",
    "read_evaluations",
    "read_records",
]

R = TypeVar("R", bound="StepRecord | EvaluationRecord")


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a trainer."""

    step: int
    """From 1."""
    version: int
    """Policy version that was trained, before the update."""
    wall_s: float
    """Since the run began, over all its lives; without the time between them."""
    reward_mean: float
    """Over the sessions that were trained on."""
    reward_deviation: float
    """Mean over the groups of each one's deviation."""
    collected_reward_mean: float | None
    """Over all whole groups that ended since the step before, those that were not admitted included."""
    num_groups: int
    num_one_reward: int
    """Groups in which no session did better than another: there is nothing to learn from them. 0 under a critic, which
    learns from these too."""
    num_sessions: int
    num_trained_tokens: int
    left_out: dict[str, int]
    """Reason why tokens must not be trained on -> their number: their log-probs are of another distribution."""
    degenerate: dict[str, int] = {}
    """Kind of reason -> sessions of whole groups that were left out since the step before, by a filter or as
    degenerates."""
    turn_score_mean: float | None = None
    """Mean score of the turns that were trained on; None where the evaluator gives none."""
    role_reward_mean: dict[str, float] = {}
    """Role -> its mean reward over the sessions that were trained on; empty where no client named a role."""
    shapley: dict[str, float] = {}
    """Player -> its Shapley value, mean over the groups that were trained on; empty without coalitions."""
    num_coalition_sessions: int = 0
    """Sessions that ran for these values alone; not in `num_sessions`."""
    reward_parts: dict[str, float] = {}
    """Part of evaluator `composite` -> its mean reward; gate of `staged` -> the share of sessions that passed it. Over
    the sessions that were trained on; names of nested parts are joined by dots."""
    sampler: SamplerMetrics | None = None
    """What `data.sampler` has done; None where there is none."""
    lag: dict[int, int]
    """versions behind -> trained tokens."""
    num_not_admitted: int
    num_invalid: int
    num_stale: int
    """Groups, since the step before."""
    waited_s: float
    """For groups."""
    trained_s: float
    checkpoint_s: float
    """Seconds that the checkpoint of the previous step took."""
    update: UpdateProfile | None
    """The weight update that followed; None where there was nothing to learn, and the policy kept its version."""
    learner: dict[str, float]

    def scalars(self) -> dict[str, float]:
        """Every number, by its name in trackers."""
        found = dict[str, float]()
        for name, value in msgspec.to_builtins(self).items():
            if name in ("update", "learner"):
                found |= {f"{name}/{inner}": float(one) for inner, one in dict[str, float](value or {}).items()}
            elif isinstance(value, int | float) and name not in ("step", "version"):
                found[f"rollout/{name}"] = float(value)
        found["rollout/num_left_out_tokens"] = float(sum(self.left_out.values()))
        found |= {f"rollout/role_reward_mean/{role}": mean for role, mean in self.role_reward_mean.items()}
        found |= {f"shapley/{player}": mean for player, mean in self.shapley.items()}
        found |= {f"rollout/reward_parts/{part}": mean for part, mean in self.reward_parts.items()}
        if self.sampler is not None:
            found |= {f"sampler/drawn/{pool}": float(num) for pool, num in self.sampler.drawn.items()}
            found |= {f"sampler/size/{pool}": float(num) for pool, num in self.sampler.sizes.items()}
            found["sampler/num_never_drawn"] = float(self.sampler.num_never_drawn)
            if self.sampler.stage is not None:
                found["sampler/stage"] = float(self.sampler.stage)
        found["rollout/num_degenerate"] = float(sum(self.degenerate.values()))
        total = sum(self.lag.values())
        if total:
            found["rollout/lag_mean"] = sum(lag * num for lag, num in self.lag.items()) / total
        return found


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement on held-out tasks."""

    step: int
    """Steps done; 0 is before the first."""
    version: int
    """Policy version that was measured."""
    wall_s: float
    """Since the run began, as a step's, when it ended."""
    reward_mean: float
    """Over the tasks, of the mean over each one's sessions."""
    standard_error: float | None
    """Standard error of that mean, over tasks: sessions of one task are no independent draws. None for a single
    task."""
    task_means: tuple[float | None, ...]
    """Mean of each task's sessions, in the order of the tasks; None where none counts."""
    num_tasks: int
    """With a session that counts."""
    num_sessions: int
    """That count."""
    num_invalid: int
    """Sessions without a reward, by faults of the infrastructure for example, and of other weights: not in the mean."""
    took_s: float

    def scalars(self) -> dict[str, float]:
        """Every number, by its name in trackers."""
        numbers = msgspec.structs.asdict(self)
        return {
            f"evaluation/{name}": float(value)
            for name, value in numbers.items()
            if name not in ("step", "version", "task_means") and value is not None
        }


class PairedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The improvement of one evaluation over another, task by task, free of the differences between tasks."""

    mean: float
    """Mean over the tasks of the gain in each one's mean reward."""
    standard_error: float | None
    """Standard error of that mean, over tasks: sessions of one task are no independent draws. None for a single
    task."""
    num_tasks: int
    """With a session that counts in both."""

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2f}"
        return f"{self.mean:+.2f}{error}"


def paired_difference(before: EvaluationRecord, after: EvaluationRecord) -> PairedDifference | None:
    """None where no task counts in both. Source: Miller, Adding error bars to evals (arXiv 2411.00640), 4."""
    both = zip(before.task_means, after.task_means, strict=True)
    gains = [last - first for first, last in both if first is not None and last is not None]
    if not gains:
        return None
    error = float(np.std(gains, ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else None
    return PairedDifference(mean=float(np.mean(gains)), standard_error=error, num_tasks=len(gains))


class RunLog:
    """`metrics.jsonl` and `evaluations.jsonl` in the run's folder."""

    def __init__(self, folder: Path, *, last_step: int = 0) -> None:
        """last_step: step of the checkpoint; records of later steps are removed, since those steps are repeated."""
        make_private_folder(folder)
        self._metrics, self._evaluations = folder / "metrics.jsonl", folder / "evaluations.jsonl"
        _keep(self._metrics, [record for record in read_records(self._metrics) if record.step <= last_step])
        evaluations = [record for record in read_evaluations(self._evaluations) if record.step <= last_step]
        _keep(self._evaluations, evaluations)
        self.evaluated_steps = {record.step for record in evaluations}

    def write(self, record: StepRecord) -> None:
        """Durable on return."""
        append(self._metrics, msgspec.json.encode(record) + b"\n")

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Durable on return."""
        append(self._evaluations, msgspec.json.encode(record) + b"\n")
        self.evaluated_steps.add(record.step)


def read_records(path: Path) -> list[StepRecord]:
    """Records of a `metrics.jsonl`; an incomplete last line is left out."""
    return _read(path, StepRecord)


def read_evaluations(path: Path) -> list[EvaluationRecord]:
    """Records of an `evaluations.jsonl`; an incomplete last line is left out."""
    return _read(path, EvaluationRecord)


def _read(path: Path, kind: type[R]) -> list[R]:
    if not path.exists():
        return []
    *lines, _cut_off = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=kind) for line in lines]


def _keep(path: Path, records: Sequence[StepRecord | EvaluationRecord]) -> None:
    """Reduce a file, where it exists, to these records."""
    if path.exists():
        write_whole(path, b"".join(msgspec.json.encode(record) + b"\n" for record in records))
