"""TRL: its own `GRPOTrainer` trains on groups that the service collects.

    with ServiceRollouts(connect) as rollouts:
        GRPOTrainer(..., rollout_func=rollouts, reward_funcs=session_reward).train()

TRL calls `rollout_func` whenever it needs a batch of completions. This one pushes the trainer's weights to the engines
if an optimiser step changed them, collects groups, and returns their exact tokens. TRL's prompts only determine the
number of sessions; the collector chooses the tasks.

Laws, in addition to the contract (`gangline.train.trainers.contract`): TRL compares `num_generations` consecutive rows,
so a group must have that many sessions of one trace each, or it is refused. Every session starts with the current
weights of the training, unless the collector starts more sessions than requested.

Source: trl 1.16.0, trainer/grpo_trainer.py (`rollout_func`, `_generate`, `_generate_and_score_completions`,
`_compute_loss`). `rollout_func` is experimental in TRL. This module imports neither TRL nor PyTorch.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace
from gangline.train.collecting.groups import Group, trainable_traces
from gangline.train.learning.masks import all_sampled
from gangline.train.learning.samples import Mask
from gangline.train.trainers.contract import GroupSource, TrainerRow, rows_of
from gangline.train.weights.update import Save, WeightUpdater
from gangline.wire.client.background import InBackground


@dataclass(frozen=True)
class Connection:
    """The adapter's connection to the service."""

    collector: GroupSource
    weights: WeightUpdater
    first_version: int = 1
    """Policy version of the weights that training starts or resumes with; must be above all versions that the service
    has had.
    """


class ServiceRollouts:
    """The `rollout_func` of one `GRPOTrainer`. Enter it before training, and train inside the block.

    connect: opens the connection, on an event loop in its own thread. mask: selects the tokens of a trace to train on,
    by weights of 0 and 1.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        *,
        mask: Mask = all_sampled,
    ) -> None:
        self._service = InBackground(connect)
        self._mask = mask
        self._version: int | None = None
        self._pushed_step: int | None = None

    @property
    def version(self) -> int | None:
        """The last pushed policy version; None before the first push."""
        return self._version

    def __enter__(self) -> Self:
        self._service.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._service.__exit__(*exc)

    def __call__(self, prompts: Sequence[object], trainer: Any) -> dict[str, Any]:
        """As many rows as there are prompts, group by group. trainer: a `GRPOTrainer`.

        Raises: InvalidGroup if a group does not fit the trainer, InvalidRequest if the trainer is not supported; errors
        of collector and weights.
        """
        _check_trainer(trainer)
        self.push(trainer)
        num_groups, left = divmod(len(prompts), trainer.args.num_generations)
        if left:
            raise InvalidRequest(f"{len(prompts)} rows are not whole groups of {trainer.args.num_generations}.")
        groups = self._service.run(lambda service: service.collector.collect(num_groups))
        return rollout_rows(groups, trainer.args.num_generations, temperature=trainer.args.temperature, mask=self._mask)

    def push(self, trainer: Any) -> None:
        """Push the trainer's weights to the engines unless they have them. Call it after training to push the last
        ones.
        """
        if trainer.state.global_step == self._pushed_step:
            return

        def save(folder: Path) -> None:
            _whole_model(trainer).save_pretrained(folder)

        self._version = self._service.run(lambda service: _push(service, save, self._version))
        self._pushed_step = trainer.state.global_step


async def _push(service: Connection, save: Save, last_version: int | None) -> int:
    """Push the weights and return their version."""
    version = service.first_version if last_version is None else last_version + 1
    await service.weights.push(save, version)
    return version


def rollout_rows(
    groups: Sequence[Group], num_generations: int, *, temperature: float = 1.0, mask: Mask = all_sampled
) -> dict[str, Any]:
    """The return value for TRL's `rollout_func`, a row per session, group by group. `session` and `versions` are
    columns for reward functions; versions: policy version of each token, -1 if not sampled.

    Raises: InvalidGroup if a group is incomplete or of another temperature, or a session has several traces;
    InvalidRequest if the mask has other weights than 0 and 1.
    """
    sessions = [session for group in groups for session in group.sessions]
    rows = [row for group in groups for row in _one_each(rows_of(group, num_generations, temperature=temperature))]
    return {
        "prompt_ids": [row.prompt_ids.tolist() for row in rows],
        "completion_ids": [row.response_ids.tolist() for row in rows],
        "logprobs": [row.logprobs.tolist() for row in rows],
        "env_mask": [_zeros_and_ones(row.trace, mask) for row in rows],
        "versions": [row.versions.tolist() for row in rows],
        "session": sessions,
    }


def session_reward(
    *, session: Sequence[SessionResult], log_extra: Callable[[str, list[str]], None] | None = None, **_: object
) -> list[float | None]:
    """A TRL reward function: the evaluator's reward of each session, or its single trace's own reward if there is one.

    Other reward functions can use the `session` column too.
    """
    if log_extra is not None:  # for TRL's table of completions, whose prompts mean nothing here
        log_extra("session_id", [one.session_id for one in session])
    return [_reward(one) for one in session]


def _reward(session: SessionResult) -> float | None:
    traces = trainable_traces(session)
    own = traces[0].reward if len(traces) == 1 else None
    return session.reward if own is None else own


def one_trace_each(group: Group) -> Group | None:
    """For a collector's `admit`: drops groups in which a session has several traces, which TRL does not support."""
    return group if all(len(trainable_traces(session)) == 1 for session in group.sessions) else None


def _check_trainer(trainer: Any) -> None:
    if not trainer.model.training:
        raise InvalidRequest(
            "TRL asks for rollouts to evaluate on, and a collector's groups are for training: set eval_strategy='no', "
            "and evaluate with `gangline eval`."
        )
    if trainer.accelerator.num_processes > 1:
        raise InvalidRequest(
            f"{trainer.accelerator.num_processes} processes train here, and each would collect and push by itself: "
            "train in one process, or with an adapter for many GPUs."
        )


def _one_each(rows: list[TrainerRow]) -> list[TrainerRow]:
    for session_id, num_traces in Counter(row.session_id for row in rows).items():
        if num_traces > 1:
            raise InvalidGroup(
                f"{session_id} has {num_traces} traces to train on, and TRL takes one completion a session. Build with "
                "prefix_merging, or leave such groups out: admit=one_trace_each."
            )
    return rows


def _zeros_and_ones(trace: Trace, mask: Mask) -> list[int]:
    weights = mask(trace)
    if not np.isin(weights, (0.0, 1.0)).all():
        raise InvalidRequest(
            f"the mask weighs tokens of {trace.trace_id} other than by 0 and 1, and TRL would count them in its means "
            "by that weight. Use another mask."
        )
    return weights.astype(int).tolist()


def _whole_model(trainer: Any) -> Any:
    """The model, with adapters merged into a copy: merging in place and undoing it would leave rounding errors."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return copy.deepcopy(model).merge_and_unload() if hasattr(model, "merge_and_unload") else model
