"""Runs one of verl's prompts, from its task to the rows in the transfer queue.

The order is prescribed by verl: `running`, all rows, then `finished` or `failure`, and nothing after it. A prompt with
sessions that cannot be trained on ends as `failure`, never with an invented reward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol

from tensordict import TensorDict

from gangline.domain.errors import GanglineError, InvalidGroup
from gangline.domain.session import SessionResult
from gangline.machine.event_loop import call_all
from gangline.rows.measured import why_not_measured
from gangline.train.collecting.giving_up import Patience
from gangline.train.collecting.group_judge import GroupJudgeSettings, judged
from gangline.train.collecting.groups import ValiditySettings, judge_group
from gangline.train.trainers.own_engine import Sampling
from gangline.train.trainers.verl.prompts import Prompt, TaskMaker
from gangline.train.trainers.verl.rows import QueueRows, training_rows, validation_rows
from gangline.wire.client.rollouts import MOST_RUNS, OpenTasks, RolloutClient

_log = logging.getLogger("gangline.train.trainers.verl")
_RETRY_S = 1.0

Status = Literal["finished", "failure"]


Teach = Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
"""Fields of a training row -> the same with `teacher_ids` and `teacher_logprobs` [P + R, 1 or k]."""


class Queue(Protocol):
    """The calls of the package `transfer_queue` that this module uses."""

    async def async_kv_put(self, key: str, partition_id: str, *, tag: dict[str, Any]) -> Any: ...

    async def async_kv_batch_put(
        self, keys: list[str], partition_id: str, fields: TensorDict, tags: list[dict[str, Any]]
    ) -> Any: ...


class PromptRunner:
    def __init__(
        self,
        service: RolloutClient,
        queue: Queue,
        tasks: TaskMaker,
        *,
        sampling: Mapping[Literal["train", "val"], Sampling],
        num_samples: Mapping[Literal["train", "val"], int],
        validity: ValiditySettings,
        compares_sessions: bool,
        group_judge: GroupJudgeSettings | None = None,
        teach: Teach | None = None,
        retry_s: float = _RETRY_S,
    ) -> None:
        """sampling, num_samples: by partition. compares_sessions: see `rows.training_rows`. group_judge: of
        training alone. teach: if verl distils.
        """
        self._open = {
            "train": OpenTasks(judged(service, group_judge), retry_s),
            "val": OpenTasks(service, retry_s),
        }
        self._queue = queue
        self._tasks = tasks
        self._sampling = sampling
        self._num_samples = num_samples
        self._validity = validity
        self._compares_sessions = compares_sessions
        self._teach = teach
        self._patience = Patience()
        self._given_up: InvalidGroup | None = None

    def check(self) -> None:
        """Call before starting more prompts: verl replaces failed prompts forever. Raises: InvalidGroup."""
        if self._given_up is not None:
            raise self._given_up

    async def run(self, prompt: Prompt) -> None:
        """Never raises: verl waits for a status, and only for that."""
        await self._tag(prompt, "running")
        status: Status = "failure"
        try:
            rows, status = await (self._validation(prompt) if prompt.partition == "val" else self._training(prompt))
            if rows.keys:
                await self._put(prompt, rows)
        except GanglineError as error:
            status = "failure"
            _log.error("verl.prompt_failed uid=%s code=%s message=%s", prompt.uid, error.code, error)
        except Exception:  # the boundary: verl must not wait forever for this prompt
            status = "failure"
            _log.exception("verl.prompt_crashed uid=%s", prompt.uid)
        await self._tag(prompt, status)

    async def _tag(self, prompt: Prompt, status: str) -> None:
        """Sets only the status: a prompt's other tags belong to the trainer."""
        await self._queue.async_kv_put(prompt.uid, prompt.partition, tag={"status": status})

    async def _put(self, prompt: Prompt, rows: QueueRows) -> None:
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # noqa: PLC0415 - imports Ray, and seconds

        fields = list_of_dict_to_tensordict(rows.fields)
        await self._queue.async_kv_batch_put(rows.keys, prompt.partition, fields=fields, tags=rows.tags)

    async def _training(self, prompt: Prompt) -> tuple[QueueRows, Status]:
        """Raises: InvalidGroup if not all sessions, or with `shrink` too few, can be trained on."""
        for run in range(1, MOST_RUNS + 1):
            results = await self._results(prompt, run)
            num_samples = self._num_sessions(prompt)
            verdict = judge_group(prompt.uid, results, num_samples, self._validity)
            if verdict.action == "keep":
                order = [result.session_id for result in results]
                rows = training_rows(
                    prompt,
                    verdict.group,
                    order,
                    temperature=self._sampling["train"].temperature,
                    compares_sessions=self._compares_sessions,
                )
                for session_id, reason in verdict.reasons.items():
                    _log.warning("verl.session_left_out uid=%s session=%s reason=%s", prompt.uid, session_id, reason)
                if self._teach is not None:
                    rows.fields = await call_all([self._teach(fields) for fields in rows.fields])
                return rows, "failure" if verdict.reasons else "finished"
            _log.warning("verl.group_invalid uid=%s run=%d reasons=%s", prompt.uid, run, verdict.reasons)
            if verdict.action == "drop":
                break
        raise InvalidGroup(f"prompt {prompt.uid} has too few sessions that can be trained on.")

    async def _validation(self, prompt: Prompt) -> tuple[QueueRows, Status]:
        """Rows of the sessions with a reward. verl knows how many to expect."""
        results = await self._results(prompt, 1)
        rows = validation_rows(prompt, results, [result.session_id for result in results])
        missing = {result.session_id: why for result in results if (why := why_not_measured(result)) is not None}
        for session_id, reason in missing.items():
            _log.warning("verl.session_left_out uid=%s session=%s reason=%s", prompt.uid, session_id, reason)
        return rows, "failure" if missing or len(results) < self._num_sessions(prompt) else "finished"

    async def _results(self, prompt: Prompt, run: int) -> Sequence[SessionResult]:
        """The sessions of one run of the prompt's task, by sample index. A restarted trainer gives the same prompt the
        same uid, so it finds the task that it had started.
        """
        task_id = prompt.uid if run == 1 else f"{prompt.uid}-run{run}"
        sampling = self._sampling[prompt.partition]
        task = self._tasks.task(prompt, task_id, self._num_sessions(prompt), sampling)
        results = await self._open[prompt.partition].run(task)
        try:
            self._patience.note(prompt.uid, results)
        except InvalidGroup as why:
            self._given_up = why
            raise
        return results

    def _num_sessions(self, prompt: Prompt) -> int:
        return self._num_samples[prompt.partition] if prompt.num_samples is None else prompt.num_samples
