"""The records of a training run: its steps, evaluations, starts and result."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np


class SamplerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """State of a sampler at one step."""

    drawn: dict[str, int]
    """Pool or label -> number of the step's groups drawn from it."""
    sizes: dict[str, int]
    """Pool or label -> current number of its tasks."""
    stage: int | None
    """Stage of the last draw, from 1; None without stages."""
    num_never_drawn: int
    """Tasks."""


class UpdateProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one update."""

    version: int
    transfer_s: float
    """Writing the weights while sampling continues. 0 if they were already there."""
    pause_s: float
    """Closing all gates."""
    drain_s: float
    """Until no call was in flight; 0 under `keep`."""
    load_s: float
    """Pausing the engines and loading, all at once."""
    resume_s: float
    """Setting the version, resuming the engines, opening the gates."""
    total_s: float
    num_engines: int
    num_nodes: int
    num_bytes: int
    folder: str = ""
    """Where the weights were written; empty if unknown."""

    @property
    def closed_s(self) -> float:
        """Longest time that model calls waited."""
        return self.pause_s + self.drain_s + self.load_s + self.resume_s

    @property
    def phases(self) -> dict[str, float]:
        """Phase -> seconds, in order."""
        return {
            "transfer": self.transfer_s,
            "pause": self.pause_s,
            "drain": self.drain_s,
            "load": self.load_s,
            "resume": self.resume_s,
        }


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a trainer."""

    step: int
    """From 1."""
    version: int
    """Policy version that was trained, before the update."""
    wall_s: float
    """Since the run began, over all its starts, without the time between them."""
    reward_mean: float
    """Over the sessions that were trained on."""
    reward_deviation: float
    """Mean over the groups of each group's deviation."""
    collected_reward_mean: float | None
    """Over all whole groups that ended since the previous step, including groups that were not admitted."""
    groups: tuple[str, ...] = ()
    """[num_groups] ids of the tasks whose sessions were trained on; empty in records of earlier versions."""
    num_groups: int
    early_ends: dict[str, int] = {}
    """Outcome other than `completed`, with its failure code -> number of trained sessions."""
    num_one_reward: int
    """Groups without any difference between sessions, which teach nothing. 0 with a critic, which learns from them
    too.
    """
    num_sessions: int
    num_trained_tokens: int
    num_sampled_tokens: int = 0
    """Tokens sampled by engines since the previous step for all groups, admitted or not, without extra tasks such as
    coalitions.
    """
    left_out: dict[str, int]
    """Reason why tokens must not be trained on -> number of tokens whose log-probs are from another distribution."""
    degenerate: dict[str, int] = {}
    """Kind of reason -> sessions of whole groups that were left out since the previous step, by a filter or as
    degenerates.
    """
    turn_score_mean: float | None = None
    """Mean score of the trained turns; None if the evaluator gives no scores."""
    role_reward_mean: dict[str, float] = {}
    """Role -> its mean reward over the trained sessions; empty if no client named a role."""
    shapley: dict[str, float] = {}
    """Player -> its Shapley value, averaged over the trained groups; empty without coalitions."""
    num_coalition_sessions: int = 0
    """Sessions run only for these values; not in `num_sessions`."""
    reward_parts: dict[str, float] = {}
    """Part of evaluator `composite` -> its mean reward; gate of `staged` -> the share of sessions that passed it. Over
    the trained sessions; names of nested parts are joined by dots.
    """
    sampler: SamplerMetrics | None = None
    """State of `data.sampler`; None without a sampler."""
    lag: dict[int, int]
    """Versions behind -> number of trained tokens."""
    num_not_admitted: int
    num_invalid: int
    num_stale: int
    """Groups since the previous step."""
    waited_s: float
    """Time spent waiting for groups."""
    trained_s: float
    checkpoint_s: float
    """Seconds that the checkpoint of the previous step took."""
    update: UpdateProfile | None
    """The weight update that followed; None if there was nothing to learn and the policy kept its version."""
    learner: dict[str, float]

    def scalars(self) -> dict[str, float]:
        """Every number, under its name in trackers."""
        found = dict[str, float]()
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float) and name not in ("step", "version"):
                found[f"rollout/{name}"] = float(value)
        update = {} if self.update is None else msgspec.structs.asdict(self.update)
        found |= {f"update/{name}": float(value) for name, value in update.items() if name != "folder"}
        found |= {f"learner/{name}": float(value) for name, value in self.learner.items()}
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
        if self.num_sessions:
            found["rollout/trained_tokens_per_session"] = self.num_trained_tokens / self.num_sessions
        found["rollout/num_sampled_tokens"] = float(self.num_sampled_tokens)
        found["rollout/num_early_ends"] = float(sum(self.early_ends.values()))
        found["rollout/num_degenerate"] = float(sum(self.degenerate.values()))
        total = sum(self.lag.values())
        if total:
            found["rollout/lag_mean"] = sum(lag * num for lag, num in self.lag.items()) / total
        return found


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement on held-out tasks."""

    step: int
    """Steps done; 0 means before the first."""
    version: int
    """Policy version that was measured."""
    wall_s: float
    """Since the run began, as for steps, at its end."""
    reward_mean: float
    """Mean over tasks of each task's mean reward."""
    standard_error: float | None
    """Standard error of that mean over tasks, since sessions of one task are not independent draws. None for a single
    task.
    """
    task_means: tuple[float | None, ...]
    """Mean of each task's sessions, in the order of the tasks; None if no session counts."""
    num_tasks: int
    """Tasks with a session that counts."""
    num_sessions: int
    """Sessions that count."""
    num_invalid: int
    """Sessions that are not in the mean: without a reward, for example after an infrastructure fault, or from other
    weights.
    """
    early_ends: dict[str, int] = {}
    """Outcome other than `completed`, with its failure code -> number of sessions, including sessions that count."""
    took_s: float

    def scalars(self) -> dict[str, float]:
        """Every number, under its name in trackers."""
        numbers = msgspec.structs.asdict(self)
        return {
            f"evaluation/{name}": float(value)
            for name, value in numbers.items()
            if name not in ("step", "version", "task_means", "early_ends") and value is not None
        }


class PairedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The improvement from one evaluation to another, task by task, unaffected by differences between tasks."""

    mean: float
    """Mean over tasks of the gain in each task's mean reward."""
    standard_error: float | None
    """Standard error of that mean over tasks, since sessions of one task are not independent draws. None for a single
    task.
    """
    num_tasks: int
    """Tasks with a session that counts in both."""

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2f}"
        return f"{self.mean:+.2f}{error}"


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint made by a run."""

    step: int
    """Steps done."""
    version: int
    digest: str
    """Digest of all its files."""
    weights_digest: str
    """Digest of the model after that step, as engines load it; empty if unknown."""


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose model or checkpoint another run started from."""

    run: str
    by: Literal["model", "checkpoint"]
    step: int
    """Steps done at that point."""
    digest: str
    """Digest of that model or checkpoint."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a run."""

    key: str
    """Key of the run, part of its task ids. The service may still have tasks of a run whose folder was removed, and
    would return results of other weights.
    """
    started_at: str
    """UTC, ISO 8601."""
    first_step: int
    """The next step; above 1 if the run resumes."""
    experiment_digest: str
    tasks_digest: str
    held_out_digest: str | None
    """Digest of the evaluation tasks."""
    model_digest: str
    """Digest of the initial weights' files and configuration."""
    checkpoint_digest: str = ""
    """Digest of the checkpoint that it resumes from; empty for a new run."""
    parents: tuple[Parent, ...] = ()
    """Other runs of the data folder that produced its model or its checkpoint."""
    gangline: str
    commit: str | None
    """Commit of the code's git checkout, followed by `+` if files were changed; None if it is not a checkout."""
    python: str
    machine: str
    packages: dict[str, str]
    hooks: dict[str, str] = {}
    """Hook's name -> distribution and version that provides it."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run that has completed all steps."""

    num_steps: int
    last_version: int
    first_reward: float
    last_reward: float
    """Means over the first and the last fifth of the steps."""
    first_evaluation: float | None
    last_evaluation: float | None
    """Mean rewards on held-out tasks; None without evaluations."""
    held_out_difference: PairedDifference | None
    """The last evaluation compared with the first, task by task: the result of the run."""
    wall_s: float
    """Including evaluations."""
    weights: str
    """Folder of the final weights."""
    weights_digest: str = ""
    """The same as `Life.model_digest` of a run that starts from them."""


def paired_difference(before: EvaluationRecord, after: EvaluationRecord) -> PairedDifference | None:
    """None if no task counts in both. Source: Miller, Adding error bars to evals (arXiv 2411.00640), 4."""
    both = zip(before.task_means, after.task_means, strict=True)
    gains = [last - first for first, last in both if first is not None and last is not None]
    if not gains:
        return None
    error = float(np.std(gains, ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else None
    return PairedDifference(mean=float(np.mean(gains)), standard_error=error, num_tasks=len(gains))
