"""SkyRL: a generator whose trajectories are sessions of the service, replacing its own.

    class Exp(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return SkyRLGenerator(connect, task_of, cfg, inference_engine_client)

It implements SkyRL's `GeneratorInterface`, whose only method turns prompts into a `GeneratorOutput` with rows in the
prompts' order. A row is a trace. A session with several needs `generator.step_wise_trajectories`, where SkyRL gives the
advantage of a trajectory's last row to all its rows. SkyRL keeps its engines, its weight sync, advantages and loss;
before each batch, the nodes receive the version of its engines' weights.

Laws, in addition to the contract (`gangline.train.trainers.contract`): SkyRL compares trajectories by the reward of
their last row, so that reward is the session's. No session runs while weights change: a trainer that generates during
updates is refused, because the weights of a token would be unknown.

Source: SkyRL, github.com/NovaSky-AI/SkyRL at a956457 and its wheel 0.4.0, `skyrl/train/generators/base.py`,
`skyrl/train/trainer.py`, `skyrl/train/utils/trainer_utils.py` (`validate_generator_output`). Imports nothing of SkyRL.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.lifecycle import STOPPED_BY_LIMIT
from gangline.train.collecting.admission import version_spans
from gangline.train.collecting.collector import PlainCollector
from gangline.train.collecting.giving_up import Patience
from gangline.train.collecting.groups import Group, ValiditySettings
from gangline.train.trainers.contract import Gate, TrainerRow, rows_of, updating
from gangline.wire.client.rollouts import RolloutClient

CONTRACT = 3
"""Version of the contract with trainers that this adapter fulfils."""

TraceRewards = Literal["refuse", "session"]
"""If a session's traces have their own rewards, which SkyRL cannot represent: refuse the group, or train only on the
session's reward.
"""

_CUT_SHORT = ("agent_timeout", *STOPPED_BY_LIMIT)


@dataclass(frozen=True)
class Connection:
    """The generator's connection to the service."""

    service: RolloutClient
    """`gangline.wire.client.ServerClient`."""
    gates: Sequence[Gate]
    """Gates of all nodes: `gangline.wire.client.NodeClient`."""


@dataclass(frozen=True)
class SkyRLPrompt:
    """A prompt of SkyRL's dataset, one object for all of its samples."""

    uid: str
    prompt: Sequence[Mapping[str, Any]]
    """Messages."""
    env_class: str
    env_extras: Mapping[str, Any]
    """The dataset's other columns."""


def to_generator_output(
    groups: Sequence[Group],
    trajectory_ids: Sequence[Any],
    *,
    step_wise: bool = False,
    temperature: float = 1.0,
    trace_rewards: TraceRewards = "refuse",
) -> dict[str, Any]:
    """SkyRL's `GeneratorOutput`: a row per trace, in the order of `trajectory_ids`.

    groups: one per `instance_id`, in the order of its first `TrajectoryID`. The n-th session of a group is the n-th
    trajectory of its instance. step_wise: SkyRL's `step_wise_trajectories`. temperature: its
    `trainer.algorithm.temperature`. `env_metrics` contains ids and versions, which have no other place in SkyRL.

    Raises: InvalidGroup if a group is incomplete or of another temperature, or SkyRL cannot represent its content.
    """
    places = _places(trajectory_ids)
    if len(groups) != len(places):
        raise InvalidGroup(f"there are {len(groups)} groups for {len(places)} prompts.")
    sessions = dict[int, list[TrainerRow]]()
    for group, mine in zip(groups, places.values(), strict=True):
        rows = rows_of(group, len(mine), temperature=temperature)
        by_session = [list(found) for _, found in itertools.groupby(rows, key=lambda row: row.session_id)]
        sessions |= zip(mine, by_session, strict=True)
    rows = list[TrainerRow]()
    rewards, ids, is_last = list[float](), list[Any](), list[bool]()
    for place, trajectory_id in enumerate(trajectory_ids):
        session = sessions[place]
        rows += session
        rewards += _rewards(session, step_wise, trace_rewards)
        ids += [trajectory_id] * len(session)
        is_last += [*[False] * (len(session) - 1), True]
    return {
        "prompt_token_ids": [row.prompt_ids.tolist() for row in rows],
        "response_ids": [row.response_ids.tolist() for row in rows],
        "rewards": rewards,
        "loss_masks": [row.loss_mask.tolist() for row in rows],
        "stop_reasons": ["length" if _is_cut_short(row) else "stop" for row in rows],
        "rollout_metrics": _metrics(rows, len(trajectory_ids)),
        "rollout_logprobs": [row.logprobs.tolist() for row in rows],
        "trajectory_ids": ids,
        "is_last_step": is_last if step_wise else None,
        "env_metrics": [_about(row) for row in rows],
        "trajectory_generation_times": None,
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "pixel_values": None,
        "image_grid_thw": None,
    }


class SkyRLGenerator:
    """For the synchronous `RayPPOTrainer`, colocated or not.

    connect: opens a new connection for each batch, on the trainer's loop. task_of: a prompt -> its task, without id and
    number of samples. cfg: SkyRL's whole configuration. engine_client: SkyRL's, which counts its weight syncs.
    first_version: policy version of the weights of the first sync; must be above all versions that the service has had.

    Raises: InvalidRequest if SkyRL's configuration is not supported here, or groups may shrink.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        task_of: Callable[[SkyRLPrompt], Mapping[str, Any]],
        cfg: Any,
        engine_client: Any,
        *,
        first_version: int = 1,
        validity: ValiditySettings | None = None,
        trace_rewards: TraceRewards = "refuse",
    ) -> None:
        if cfg.trainer.fully_async.enabled:
            raise InvalidRequest(
                "SkyRL's fully asynchronous trainer changes weights while sessions run, and tells nobody: set "
                "trainer.fully_async.enabled=false."
            )
        if validity is not None and validity.on_invalid == "shrink":
            raise InvalidRequest("SkyRL trains on groups of one size: set on_invalid to refuse or resubmit.")
        self._connect = connect
        self._task_of = task_of
        self._cfg = cfg
        self._engine_client = engine_client
        self._first_version = first_version
        self._validity = validity
        self._trace_rewards: TraceRewards = trace_rewards
        self._patience = Patience()

    @property
    def version(self) -> int:
        """Policy version of the weights that SkyRL's engines have."""
        return self._first_version - 1 + int(self._engine_client.weight_version)

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """A `GeneratorInput` -> a `GeneratorOutput`, as `to_generator_output`.

        Raises: InvalidRequest for an evaluation batch, or if weights changed meanwhile. InvalidGroup. Errors of the
        service and its nodes.
        """
        prompts = _prompts(input_batch)
        trajectory_ids: Sequence[Any] = input_batch["trajectory_ids"]
        places = _places(trajectory_ids)
        version = self.version
        tasks = [
            {**self._task_of(prompt), "num_samples": len(mine)}
            for prompt, mine in zip(prompts, places.values(), strict=True)
        ]
        async with self._connect() as connection:
            async with updating(connection.gates, version):
                pass  # SkyRL loaded the weights before this call
            async with PlainCollector(
                connection.service, iter(tasks), validity=self._validity, patience=self._patience
            ) as collector:
                groups = await collector.collect(len(tasks))
        if self.version != version:
            raise InvalidRequest(
                f"SkyRL gave its engines version {self.version} while sessions of version {version} ran, so nobody "
                "knows which weights drew their tokens: use a trainer that syncs weights between batches."
            )
        return to_generator_output(
            groups,
            trajectory_ids,
            step_wise=self._cfg.generator.step_wise_trajectories,
            temperature=self._cfg.trainer.algorithm.temperature,
            trace_rewards=self._trace_rewards,
        )


def _places(trajectory_ids: Sequence[Any]) -> dict[str, list[int]]:
    """instance -> places of its trajectories; instances in the order of their first trajectory."""
    places = dict[str, list[int]]()
    for place, trajectory_id in enumerate(trajectory_ids):
        places.setdefault(trajectory_id.instance_id, []).append(place)
    return places


def _prompts(batch: Mapping[str, Any]) -> list[SkyRLPrompt]:
    """Each prompt once, in order. Raises: InvalidRequest."""
    metadata = batch.get("batch_metadata")
    if metadata is not None and metadata.training_phase != "train":
        raise InvalidRequest(
            "SkyRL asks for trajectories to evaluate on, and these are for training: set trainer.eval_interval=-1, and "
            "evaluate with `gangline eval`."
        )
    if not batch.get("trajectory_ids"):
        raise InvalidRequest("SkyRL's batch has no trajectory_ids, so nobody knows which prompts make a group.")
    extras: Sequence[Mapping[str, Any]] = batch.get("env_extras") or [{} for _ in batch["prompts"]]
    return [
        SkyRLPrompt(uid, batch["prompts"][first], batch["env_classes"][first], extras[first])
        for uid, (first, *_) in _places(batch["trajectory_ids"]).items()
    ]


def _rewards(session: Sequence[TrainerRow], step_wise: bool, trace_rewards: TraceRewards) -> list[float]:
    """One reward per row. Raises: InvalidGroup."""
    first = session[0]
    if len(session) == 1:
        return [first.session_reward if trace_rewards == "session" else first.reward]
    if not step_wise:
        raise InvalidGroup(
            f"{first.session_id} has {len(session)} traces to train on, and SkyRL takes one row a trajectory: set "
            "generator.step_wise_trajectories=true, or build with prefix_merging."
        )
    if trace_rewards == "refuse" and any(row.reward != row.session_reward for row in session):
        raise InvalidGroup(
            f"the traces of {first.session_id} have their own rewards, and SkyRL compares trajectories by their "
            "last row's alone: take an evaluator that scores sessions, or set trace_rewards to session."
        )
    return [first.session_reward] * len(session)


def _is_cut_short(row: TrainerRow) -> bool:
    return row.outcome in _CUT_SHORT or row.trace.finish_reason == "length"


def _about(row: TrainerRow) -> dict[str, Any]:
    return {
        "task_id": row.task_id,
        "session_id": row.session_id,
        "trace_id": row.trace_id,
        "session_reward": row.session_reward,
        "outcome": row.outcome,
        "version_spans": [(span.version, span.start, span.end) for span in version_spans(row.versions)],
    }


def _metrics(rows: Sequence[TrainerRow], num_sessions: int) -> dict[str, float]:
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    return {
        "generate/traces_per_session": len(rows) / num_sessions,
        "generate/trained_tokens_per_session": trained / num_sessions,
        "generate/turns_per_session": sum(len(row.trace.spans) for row in rows) / num_sessions,
    }
