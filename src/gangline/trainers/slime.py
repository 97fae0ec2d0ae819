"""slime: groups as its `Sample` objects, and a rollout function that is called back as groups end.

    # my_rollout.py, for slime's --rollout-function-path my_rollout.generate_rollout
    generate_rollout = SlimeRollout(server_url, task_of, folder)

A sample is one trace, and the samples of one session share its `rollout_id`: slime counts steps and averages losses by
it. slime's own normalisation cuts a batch into groups by counting samples, which is wrong as soon as a session has two:
`post_process_rewards` compares sessions, independent of their traces (--custom-reward-post-process-path
gangline.trainers.slime.post_process_rewards).

Source: slime, github.com/THUDM/slime at 624b824, `slime/utils/types.py` (Sample), `slime/ray/rollout.py` (the fate of
samples), `slime/rollout/base_types.py` (the rollout function); Polar, figure 5a and A.3 (the callback flow).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gangline.client.server import ServerClient
from gangline.domain.conversation import Message, Text
from gangline.domain.errors import InvalidRequest, NodeError
from gangline.domain.lifecycle import STOPPED_BY_LIMIT
from gangline.evaluators.transcript import chat_messages
from gangline.settings import read_secret
from gangline.trainers.callbacks import CallbackClient, receiving
from gangline.trainers.contract import TrainerRow, rows_of
from gangline.training.collecting.admission import version_spans
from gangline.training.collecting.collector import Admit, ReplenishingCollector
from gangline.training.collecting.groups import Group, ValiditySettings
from gangline.training.learning.advantages import AdvantageSettings, group_advantages
from gangline.training.learning.credit.traces import CreditSettings, spread_advantage

__all__ = ["CONTRACT", "DataSource", "SlimeRollout", "post_process_rewards", "to_samples"]

CONTRACT = 3
"""Version of the contract with trainers that this keeps."""

_OWN = CreditSettings(scheme="own")
_CUT_SHORT = ("agent_timeout", *STOPPED_BY_LIMIT)
_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_DIVIDED = ("grpo", "gspo", "cispo")
_NOT_COMPARED = ("reinforce_plus_plus", "ppo")
"""Estimators that take rewards as they are."""
_POST_PROCESS = "gangline.trainers.slime.post_process_rewards"


def to_samples(
    groups: Sequence[Group],
    num_samples: int,
    *,
    sample_type: Any = None,
    first_group: int = 0,
    temperature: float = 1.0,
) -> list[list[list[Any]]]:
    """For each group the samples of each session, as slime nests compact rollouts: [group][session][trace].

    Those of a session share `rollout_id` and `index`, which no other session of these groups has. `reward` is the
    trace's own where the evaluator rewards traces separately; `metadata["session_reward"]` is the session's.

    num_samples: sessions of each group. sample_type: slime's `Sample`, which is imported where None. first_group:
    `group_index` of the first. temperature: slime's `rollout_temperature`. `weight_versions` has one entry a turn, or
    more where weights changed within it; `metadata` says which trace it is, and from where to where each version goes.

    Raises: InvalidGroup when a group is not whole or of another temperature, InvalidRequest when slime's type lacks a
    field.
    """
    make = _maker(_slime_sample() if sample_type is None else sample_type)
    rows = [rows_of(group, num_samples, temperature=temperature) for group in groups]
    return [
        [
            [make(row, number, number * num_samples + place) for row in session]
            for place, session in enumerate(_by_session(group))
        ]
        for number, group in enumerate(rows, first_group)
    ]


def _slime_sample() -> Any:
    try:
        return importlib.import_module("slime.utils.types").Sample
    except ImportError as error:
        raise ImportError(
            "slime is not here: run this where slime trains (the `slime` on PyPI is another package), or give its "
            "Sample as sample_type."
        ) from error


def _by_session(rows: Sequence[TrainerRow]) -> list[list[TrainerRow]]:
    """The rows of each session, in the order of the group."""
    sessions: dict[str, list[TrainerRow]] = {}
    for row in rows:
        sessions.setdefault(row.session_id, []).append(row)
    return list(sessions.values())


def _maker(sample_type: Any) -> Callable[[TrainerRow, int, int], Any]:
    known = {field.name for field in dataclasses.fields(sample_type)}

    def make(row: TrainerRow, group_index: int, index: int) -> Any:
        numbers = {"group_index": group_index, "index": index, "rollout_id": index}
        fields = _fields(row, sample_type.Status) | numbers
        if missing := fields.keys() - known:
            raise InvalidRequest(
                f"this version of slime has no {', '.join(sorted(missing))} in its Sample: without it what was "
                "sampled cannot be handed over whole."
            )
        if "session_id" in known:  # newer versions route by it
            fields["session_id"] = row.session_id
        return sample_type(**fields)

    return make


def _fields(row: TrainerRow, status: Any) -> dict[str, Any]:
    spans = version_spans(row.versions)
    return {
        "prompt": chat_messages(row.trace.prompt_messages),
        "tokens": [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
        "response": _text(row.trace.response_messages),
        "response_length": len(row.response_ids),
        "reward": row.reward,
        "loss_mask": row.loss_mask.tolist(),
        "rollout_log_probs": row.logprobs.tolist(),
        "weight_versions": [str(span.version) for span in spans],
        "status": status.TRUNCATED if _is_cut_short(row) else status.COMPLETED,
        "metadata": {
            "task_id": row.task_id,
            "session_id": row.session_id,
            "trace_id": row.trace_id,
            "session_reward": row.session_reward,
            "version_spans": [(span.version, span.start, span.end) for span in spans],
        },
    }


def _is_cut_short(row: TrainerRow) -> bool:
    return row.outcome in _CUT_SHORT or row.trace.finish_reason == "length"


def _text(messages: Sequence[Message]) -> str:
    """The model's own text; slime shows it, and trains on tokens."""
    said = [message for message in messages if message.role == "assistant"]
    return "\n".join(part.text for message in said for part in message.parts if isinstance(part, Text))


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """slime's normalisation, in which each session weighs one: (rewards, compared rewards), by sample.

    The same numbers as slime's own where every session has one trace. Where the evaluator rewards traces separately,
    the best trace takes all of a good outcome and the worst all of a bad one (scheme `own` of
    `training/learning/credit/traces`).
    Raises: InvalidRequest for an estimator whose baseline is not known here.
    """
    _require_known(args.advantage_estimator)
    raw = np.array([float(sample.get_reward_value(args)) for sample in samples])
    if args.advantage_estimator not in _NORMALISED or not args.rewards_normalization:
        return raw.tolist(), raw.tolist()
    divided = args.advantage_estimator in _DIVIDED and args.grpo_std_normalization
    settings = AdvantageSettings(scale="deviation" if divided else "none", deviation="sample")
    groups = np.array([sample.group_index for sample in samples])
    sessions = np.array([sample.metadata["session_id"] for sample in samples])
    outcomes = np.array([sample.metadata["session_reward"] for sample in samples])
    compared = np.zeros(len(raw))
    for group in np.unique(groups):
        mine = np.flatnonzero(groups == group)
        first, numbers = np.unique(sessions[mine], return_index=True, return_inverse=True)[1:]
        advantages = group_advantages(outcomes[mine][first], settings)
        own_range = float(np.ptp(raw[mine]))
        for number, advantage in enumerate(advantages):
            traces = mine[numbers == number]
            compared[traces] = spread_advantage(
                float(advantage), len(traces), _OWN, own=raw[traces], own_range=own_range
            )
    return raw.tolist(), compared.tolist()


def _require_known(estimator: str) -> None:
    """Raises: InvalidRequest."""
    if estimator not in (*_NORMALISED, *_NOT_COMPARED):
        raise InvalidRequest(
            f"slime's advantage estimator {estimator!r} is not known here, so its rewards would not be compared as it "
            f"needs them. Use one of {', '.join((*_NORMALISED, *_NOT_COMPARED))}, or a reward post-processing of your "
            "own (--custom-reward-post-process-path)."
        )


class DataSource(Protocol):
    """slime's: prompts as samples that are still empty."""

    def get_samples(self, num_samples: int) -> list[list[Any]]: ...


class SlimeRollout:
    """A rollout function for slime: call after call, groups go on while slime trains.

    It has a thread of its own, in which the collector runs and callbacks arrive, from the first call until `stop`.

    task_of: one of slime's empty samples -> the task, with an id of its own that is the same after a restart; its
    `num_samples` is slime's `n_samples_per_prompt`. folder: where groups are stored before their callback is
    acknowledged. token_env: names the environment variable with the server's control token. port, public_url: fixed
    ones, where tasks are to be known again after a restart. num_in_flight: groups; `rollout_batch_size` where None.
    Raises: InvalidRequest when the token is not there, or groups may shrink.
    """

    def __init__(
        self,
        server_url: str,
        task_of: Callable[[Any], Mapping[str, Any]],
        folder: Path | str,
        *,
        token_env: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        num_in_flight: int | None = None,
        validity: ValiditySettings | None = None,
        admit: Admit | None = None,
        sample_type: Any = None,
    ) -> None:
        if validity is not None and validity.on_invalid == "shrink":
            raise InvalidRequest("slime trains on groups of one size: set on_invalid to refuse or resubmit.")
        self._server_url = server_url
        self._task_of = task_of
        self._folder = Path(folder)
        self._token = None if token_env is None else read_secret(token_env)
        self._address: dict[str, Any] = {"host": host, "port": port, "public_url": public_url}
        self._num_in_flight = num_in_flight
        self._validity = validity
        self._admit = admit
        self._sample_type = sample_type
        self._num_groups = 0
        self._worker: _Worker | None = None

    def __call__(
        self, args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
    ) -> list[list[list[Any]]]:
        """`args.rollout_batch_size` groups.

        Raises: InvalidRequest when slime would train wrongly on them, InvalidGroup, OutOfTasks, the service's errors.
        """
        if evaluation:
            raise InvalidRequest("this rollout function is for training: give slime another --eval-function-path.")
        _require_fitting(args)
        if self._worker is None or self._worker.has_ended:
            self._worker = _Worker(lambda requests: self._collect(requests, args, data_source))
        groups = self._worker.collect(args.rollout_batch_size)
        samples = to_samples(
            groups,
            args.n_samples_per_prompt,
            sample_type=self._sample_type,
            first_group=self._num_groups,
            temperature=args.rollout_temperature,
        )
        self._num_groups += len(groups)
        _require_compared_by_session(args, samples)
        return samples

    def stop(self) -> None:
        """Cancel groups in flight, and end the thread; idempotent."""
        if self._worker is not None:
            self._worker.stop()
        self._worker = None

    async def _collect(self, requests: _Requests, args: Any, data_source: DataSource) -> None:
        async with (
            ServerClient(self._server_url, self._token) as service,
            receiving(service, self._folder, key=self._token, **self._address) as client,
            ReplenishingCollector(
                client,
                self._tasks(args, data_source),
                num_in_flight=self._num_in_flight or args.rollout_batch_size,
                validity=self._validity,
                admit=self._admit,
            ) as collector,
        ):
            while (request := await requests.get()) is not None:
                await _answer(request, collector, client)

    def _tasks(self, args: Any, data_source: DataSource) -> Iterator[Mapping[str, Any]]:
        while True:
            for group in data_source.get_samples(1):
                yield {**self._task_of(group[0]), "num_samples": args.n_samples_per_prompt}


def _require_fitting(args: Any) -> None:
    """Options of slime under which it would leave sessions out, or train on incomparable log-probs.

    Raises: InvalidRequest.
    """
    if getattr(args, "custom_reward_post_process_path", None) is None:
        _require_known(args.advantage_estimator)
    num_sessions = args.rollout_batch_size * args.n_samples_per_prompt
    if cut := num_sessions % args.global_batch_size:
        raise InvalidRequest(
            f"slime trains on whole steps of --global-batch-size {args.global_batch_size} sessions and would drop "
            f"{cut} of the {num_sessions} of each rollout (--rollout-batch-size times --n-samples-per-prompt): choose "
            "a divisor of it."
        )
    if getattr(args, "rollout_top_p", 1.0) != 1.0:
        raise InvalidRequest(
            f"--rollout-top-p is {args.rollout_top_p:g}: slime would replay the tokens that top-p kept, which rows do "
            "not have. Sample with --rollout-top-p 1."
        )


def _require_compared_by_session(args: Any, samples: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Raises: InvalidRequest when a session has several samples and slime would compare samples."""
    is_compared = args.advantage_estimator in _NORMALISED and args.rewards_normalization
    if not is_compared or getattr(args, "custom_reward_post_process_path", None) is not None:
        return
    if several := [session[0] for group in samples for session in group if len(session) > 1]:
        raise InvalidRequest(
            f"session {several[0].session_id} has several samples, and slime would compare the whole batch as one "
            f"group. Give it --custom-reward-post-process-path {_POST_PROCESS}."
        )


@dataclasses.dataclass(frozen=True)
class _Request:
    num_groups: int
    groups: Future[list[Group]]


_Requests = asyncio.Queue[_Request | None]


async def _answer(request: _Request, collector: ReplenishingCollector, client: CallbackClient) -> None:
    """Errors of a call go to its caller: the collector continues."""
    try:
        groups = await collector.collect(request.num_groups)
    except Exception as error:
        request.groups.set_exception(error)
        return
    for group in groups:
        client.forget(group.task_id)
    request.groups.set_result(groups)


class _Worker:
    """An event loop in a thread, which answers requests one by one."""

    def __init__(self, serve: Callable[[_Requests], Coroutine[Any, Any, None]]) -> None:
        self._serve = serve
        self._loop = asyncio.new_event_loop()
        self._requests = _Requests()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="gangline-rollout", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def collect(self, num_groups: int) -> list[Group]:
        """Raises: errors of collecting, or the one that ended the thread."""
        request = _Request(num_groups, Future())
        self._send(request)
        waited_for: list[Future[Any]] = [request.groups, self._ended]
        wait(waited_for, return_when=FIRST_COMPLETED)
        if request.groups.done():
            return request.groups.result()
        self._ended.result()
        raise NodeError("the rollout was stopped while groups were waited for.")

    def stop(self) -> None:
        self._send(None)
        self._thread.join()

    def _send(self, request: _Request | None) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(self._requests))
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
