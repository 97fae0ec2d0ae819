"""NeMo RL: a collector that fills the replay buffer of its asynchronous GRPO, in the place of its own.

    collector = ray.remote(NemoActor).remote(ServerClient(url), [NodeClient(node)], push, settings, tasks_of)

NeMo RL keeps the trainer, the buffer, the importance correction and the transfer of weights; here tasks are run, and
groups handed over for the step that will train on them. Groups that its batches cannot represent are rejected: a row is
a session, so each has one trace; rows are compared by their prompts' tokens, so those of a group are the same.

Laws: every step gets just as many groups as it trains on, of which no token is older than `max_age` versions; no more
tasks are started than steps within that age need. Source: NeMo RL, github.com/NVIDIA-NeMo/RL at 0a27b1f,
`nemo_rl/algorithms/async_utils.py` and `grpo.py`; the account of Polar driving NeMo RL.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from gangline.domain.errors import InvalidGroup, OutOfTasks
from gangline.domain.lifecycle import STOPPED_BY_LIMIT
from gangline.trainers.contract import Gate, TrainerRow, close_gates, open_gates, rows_of
from gangline.training.collecting.admission import lag_of, version_spans
from gangline.training.collecting.collector import Admit, CollectionCounts, ReplenishingCollector
from gangline.training.collecting.degenerates import num_turns
from gangline.training.collecting.groups import Group, ValiditySettings, trainable_traces
from gangline.training.collecting.service import RolloutClient
from gangline.training.options import TrainingOptions

__all__ = ["CONTRACT", "NemoActor", "NemoCollector", "NemoSettings", "Push", "to_batch"]

_log = logging.getLogger(__name__)

CONTRACT = 3
"""Version of the contract with trainers that this keeps."""

_FULL_S = 0.2
"""Between questions to a buffer that is full."""
_CUT_SHORT = ("agent_timeout", *STOPPED_BY_LIMIT)

Push = Callable[[dict[str, Any], int, int], Awaitable[str]]
"""(group, weight version, target weight version) -> `success` or `full`: `buffer.push_with_wait_signal.remote`."""


def to_batch(group: Group, num_samples: int, *, temperature: float = 1.0) -> dict[str, Any]:
    """A group's rows in the order of its sessions, as NeMo RL's rollouts end: fields of its `BatchedDataDict`.

    `message_log`: for each row the prompt as one `user` message, then `assistant` messages of trained tokens, with
    `generation_logprobs`, and `tool` messages of the others; by `token_ids`, for text was never tokenised again.
    `length` [B]: ids of the prompt. `total_reward`, `loss_multiplier`, `truncated` [B]. `extra_env_info` has ids, and
    from where to where in the response each policy version goes.

    temperature: NeMo RL's `policy.generation.temperature`.

    Raises: InvalidGroup when the group is not whole, a session has several traces, prompts differ, or log-probs are of
    another temperature.
    """
    rows = rows_of(group, num_samples, temperature=temperature)
    _require_one_trace(group, rows)
    return {
        "message_log": [_messages(row) for row in rows],
        "length": torch.tensor([len(row.prompt_ids) for row in rows]),
        "total_reward": torch.tensor([row.reward for row in rows], dtype=torch.float32),
        "loss_multiplier": torch.ones(len(rows)),
        "truncated": torch.tensor([_is_cut_short(row) for row in rows]),
        "idx": list(range(len(rows))),
        "task_name": ["gangline"] * len(rows),
        "extra_env_info": [_about(row) for row in rows],
    }


def _require_one_trace(group: Group, rows: Sequence[TrainerRow]) -> None:
    if len(rows) != len(group.sessions):
        raise InvalidGroup(
            f"{group.task_id} has {len(rows)} traces of {len(group.sessions)} sessions, and NeMo RL takes one row a "
            "session: choose the builder prefix_merging, and a harness setting without sub-agents or compaction."
        )
    if any(not np.array_equal(row.prompt_ids, rows[0].prompt_ids) for row in rows):
        raise InvalidGroup(
            f"the prompts of {group.task_id} differ, and NeMo RL compares only rows of equal prompts, so that these "
            "would teach nothing: take times, ids and paths of the session out of what the harness sends."
        )


def _messages(row: TrainerRow) -> list[dict[str, Any]]:
    """Cut where the mask changes, for NeMo RL makes its own mask of roles."""
    messages = [_message("user", row.prompt_ids, False)]
    cuts = [0, *(np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist(), len(row.response_ids)]
    for start, end in itertools.pairwise(cuts):
        is_trained = bool(row.loss_mask[start])
        message = _message("assistant" if is_trained else "tool", row.response_ids[start:end], is_trained)
        if is_trained:  # newer versions train on what has them
            message["generation_logprobs"] = torch.from_numpy(row.logprobs[start:end].copy())
        messages.append(message)
    return messages


def _message(role: str, ids: Any, is_trained: bool) -> dict[str, Any]:
    token_ids: Tensor = torch.from_numpy(ids.astype(np.int64))
    mask = torch.full_like(token_ids, int(is_trained))
    return {"role": role, "content": "", "token_ids": token_ids, "token_loss_mask": mask}


def _is_cut_short(row: TrainerRow) -> bool:
    return row.outcome in _CUT_SHORT or row.trace.finish_reason == "length"


def _about(row: TrainerRow) -> dict[str, Any]:
    spans = [(span.version, span.start, span.end) for span in version_spans(row.versions)]
    return {
        "task_id": row.task_id,
        "session_id": row.session_id,
        "trace_id": row.trace_id,
        "session_reward": row.session_reward,
        "version_spans": spans,
    }


class NemoSettings(TrainingOptions):
    num_samples: int = Field(ge=2)
    """Sessions of each group: NeMo RL's `grpo.num_generations_per_prompt`."""
    groups_per_step: int = Field(ge=1)
    """`grpo.num_prompts_per_step`."""
    max_age: int = Field(default=1, ge=1)
    """`grpo.async_grpo.max_trajectory_age_steps`."""
    num_in_flight: int = Field(default=32, ge=1)
    """Groups at most, and no more than steps within `max_age` need."""
    start_version: int = Field(default=0, ge=0)
    """The step that training begins with."""
    temperature: float = Field(default=1.0, gt=0)
    """`policy.generation.temperature`."""
    lease_s: float = Field(default=1800.0, gt=0)
    """Longest refit: then gates open by themselves, for the trainer is dead."""
    validity: ValiditySettings = ValiditySettings()

    @model_validator(mode="after")
    def _has_whole_groups(self) -> NemoSettings:
        if self.validity.on_invalid == "shrink":
            raise ValueError("NeMo RL trains on groups of one size: set on_invalid to refuse or resubmit.")
        return self


class NemoCollector:
    """The work of NeMo RL's `AsyncTrajectoryCollector`, on one event loop.

    gates: of all nodes. tasks_of: an item of the data loader -> tasks. batch_type: NeMo RL's `BatchedDataDict`. The
    clients are entered by `start_collection`.
    """

    def __init__(
        self,
        service: RolloutClient,
        gates: Sequence[Gate],
        push: Push,
        settings: NemoSettings,
        tasks_of: Callable[[Any], Iterable[Mapping[str, Any]]],
        *,
        admit: Admit | None = None,
        batch_type: Callable[[dict[str, Any]], Any] = dict,
    ) -> None:
        self._service = service
        self._gates = gates
        self._push = push
        self._settings = settings
        self._tasks_of = tasks_of
        self._admit = admit
        self._batch_type = batch_type
        self._version = settings.start_version
        self._num_pushed = 0
        self.num_too_old = 0
        """Groups that were collected, and older than the next step may train on."""
        self._is_paused = False
        self._changed = asyncio.Event()
        self._clients = AsyncExitStack()

    # What NeMo RL calls.

    async def start_collection(self, dataloader: Iterable[Any]) -> None:
        """Collect until there are no more tasks. Raises: InvalidGroup, the service's errors."""
        for client in (self._service, *self._gates):
            if isinstance(client, AbstractAsyncContextManager):
                await self._clients.enter_async_context(cast("AbstractAsyncContextManager[Any]", client))
        await open_gates(self._gates, version=self._version)
        tasks = _WhileNeeded(self._tasks(dataloader), lambda: self._num_wanted > _num_under_way(collector.counts))
        collector = ReplenishingCollector(
            self._service,
            tasks,
            num_in_flight=self._settings.num_in_flight,
            validity=self._settings.validity,
            admit=self._admit,
        )
        try:
            async with collector:
                await self._collect(collector, tasks)
        except Exception as error:  # nobody may be waiting for this actor's answer
            _log.error("nemo_rl.stopped groups=%d error=%s", self._num_pushed, error)
            raise

    async def stop(self) -> None:
        """Close the clients, which weights still need when there are no more tasks; idempotent."""
        await self._clients.aclose()

    def set_weight_version(self, version: int) -> None:
        """The version that NeMo RL has loaded; nodes receive it when it is done (`resume_after_refit`)."""
        self._version = version
        self._changed.set()

    def get_weight_version(self) -> int:
        return self._version

    async def prepare_for_refit(self) -> None:
        """New model calls wait, and those in flight have ended. Raises: as `close_gates`."""
        await close_gates(self._gates, lease_s=self._settings.lease_s)

    async def resume_after_refit(self) -> None:
        """Raises: as `open_gates`."""
        await open_gates(self._gates, version=self._version)

    def pause(self) -> None:
        """Start no more tasks."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._changed.set()

    def get_dataloader_state(self) -> dict[str, int]:
        """For the checkpoint: how many groups were handed over."""
        return {"num_pushed": self._num_pushed}

    # How it collects.

    def _tasks(self, dataloader: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
        for item in dataloader:
            for task in self._tasks_of(item):
                yield {**task, "num_samples": self._settings.num_samples}

    @property
    def _num_missing(self) -> int:
        """Groups that steps within `max_age` still need."""
        num_steps = self._version - self._settings.start_version + self._settings.max_age + 1
        return num_steps * self._settings.groups_per_step - self._num_pushed

    @property
    def _num_wanted(self) -> int:
        return 0 if self._is_paused else self._num_missing

    async def _collect(self, collector: ReplenishingCollector, tasks: _WhileNeeded) -> None:
        while True:
            await self._until(lambda: self._num_missing > 0)
            try:
                group = await self._next_group(collector)
            except OutOfTasks:
                if tasks.are_over:
                    _log.info("nemo_rl.out_of_tasks groups=%d", self._num_pushed)
                    return
                await self._until(lambda: not self._is_paused)
                continue
            await self._hand_over(group)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    async def _next_group(self, collector: ReplenishingCollector) -> Group:
        """The next one; when more are needed meanwhile, their tasks start beside those under way."""
        while True:
            self._changed.clear()
            collecting = asyncio.create_task(collector.collect(1))
            changed = asyncio.create_task(self._changed.wait())
            try:
                await asyncio.wait([collecting, changed], return_when=asyncio.FIRST_COMPLETED)
                if collecting.done():
                    return collecting.result()[0]
            finally:
                collecting.cancel()
                changed.cancel()
                await asyncio.gather(collecting, changed, return_exceptions=True)

    async def _hand_over(self, group: Group) -> None:
        target = self._settings.start_version + self._num_pushed // self._settings.groups_per_step
        traces = [trace for session in group.sessions for trace in trainable_traces(session)]
        age = lag_of(traces, target)
        if age is None or age > self._settings.max_age:
            _log.warning("nemo_rl.too_old task_id=%s age=%s target=%d", group.task_id, age, target)
            self.num_too_old += 1
            return
        batch = to_batch(group, self._settings.num_samples, temperature=self._settings.temperature)
        handed_over = {
            "batch": self._batch_type(batch),
            "rollout_metrics": _metrics(group),
            "timestamp": time.time(),
        }
        while True:
            if await self._push(handed_over, target - age, target) == "success":
                break
            await asyncio.sleep(_FULL_S)
        self._num_pushed += 1


class NemoActor:
    """Has the methods that NeMo RL's trainer calls on its own `AsyncTrajectoryCollector`, as a Ray actor.

    They block, and run one after the other as they were called, for the trainer does not wait between telling the
    version and opening the gates; an actor with methods of asyncio keeps no order. Arguments: of `NemoCollector`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._collector = NemoCollector(*arguments, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gangline-collector", daemon=True)
        self._thread.start()
        self._collecting: asyncio.Task[None] | None = None

    def start_collection(self, dataloader: Iterable[Any]) -> None:
        """Returns at once; collecting goes on. Raises: RuntimeError when it does already."""
        if self._collecting is not None:
            raise RuntimeError("collecting was started before.")
        self._run(self._start(dataloader))

    async def _start(self, dataloader: Iterable[Any]) -> None:
        self._collecting = asyncio.create_task(self._collector.start_collection(dataloader))

    def prepare_for_refit(self) -> None:
        """Raises: as `close_gates`, and what ended collecting: NeMo RL waits for this call."""
        if self._collecting is not None and self._collecting.done():
            self._collecting.result()
        self._run(self._collector.prepare_for_refit())

    def resume_after_refit(self) -> None:
        self._run(self._collector.resume_after_refit())

    def set_weight_version(self, version: int) -> None:
        self._loop.call_soon_threadsafe(self._collector.set_weight_version, version)

    def get_weight_version(self) -> int:
        return self._collector.get_weight_version()

    def pause(self) -> None:
        self._loop.call_soon_threadsafe(self._collector.pause)

    def resume(self) -> None:
        self._loop.call_soon_threadsafe(self._collector.resume)

    def get_dataloader_state(self) -> dict[str, int]:
        return self._collector.get_dataloader_state()

    def stop(self) -> None:
        """Cancel groups in flight, close the clients, end the thread."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.gather(self._collecting, return_exceptions=True)
        await self._collector.stop()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _metrics(group: Group) -> dict[str, float]:
    return {
        "gangline/reward_mean": float(np.mean(group.rewards)),
        "gangline/turns_mean": float(np.mean([num_turns(session) for session in group.sessions])),
    }


def _num_under_way(counts: CollectionCounts) -> int:
    """Groups that are in flight, or were found and wait."""
    return counts.submitted - counts.handed_out - counts.not_admitted - counts.invalid


class _WhileNeeded(Iterator[Mapping[str, Any]]):
    """Tasks, one by one as long as one is needed: it may end, and go on later."""

    def __init__(self, tasks: Iterator[Mapping[str, Any]], is_needed: Callable[[], bool]) -> None:
        self._tasks = tasks
        self._is_needed = is_needed
        self.are_over = False

    def __next__(self) -> Mapping[str, Any]:
        if not self._is_needed():
            raise StopIteration
        try:
            return next(self._tasks)
        except StopIteration:
            self.are_over = True
            raise
