"""slime's rollout function: runs tasks at our service and returns groups of samples.

Uses a thread with its own event loop, because slime calls a rollout function from synchronous code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any, Protocol

from gangline.domain.errors import InvalidRequest, NodeError
from gangline.models.language.vision import ImageReader
from gangline.settings.machine import read_secret
from gangline.train.collecting.collector import Admit, PlainCollector, ReplenishingCollector
from gangline.train.collecting.group_judge import GroupJudgeSettings, judged
from gangline.train.collecting.groups import Group, ValiditySettings
from gangline.train.trainers.callbacks import CallbackClient, receiving
from gangline.train.trainers.slime import arguments
from gangline.train.trainers.slime.router import router_of
from gangline.train.trainers.slime.samples import to_samples
from gangline.train.trainers.slime.supply import EngineSupply, SupplySettings
from gangline.wire.client.server import ServerClient

CONTRACT = 3
"""Version of the contract with trainers that this adapter fulfils."""


@dataclasses.dataclass(frozen=True)
class Request:
    num_groups: int
    version: int | None
    """Policy version of the engines as reported by the trainer; None if it does not report one."""
    groups: Future[list[Group]]


Requests = asyncio.Queue[Request | None]
"""None stops the worker."""


class Worker:
    """Answers requests one by one."""

    def __init__(self, serve: Callable[[Requests], Coroutine[Any, Any, None]]) -> None:
        self._serve = serve
        self._loop = asyncio.new_event_loop()
        self._requests = Requests()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="gangline-rollout", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def collect(self, num_groups: int, version: int | None = None) -> list[Group]:
        """Raises: errors of the collection, or the error that ended the thread."""
        request = Request(num_groups, version, Future())
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

    def _send(self, request: Request | None) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended and its loop is closed
            self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(self._requests))
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


class DataSource(Protocol):
    """The trainer's data source, which returns prompts as empty samples."""

    def get_samples(self, num_samples: int) -> list[list[Any]]: ...


class GroupRollouts:
    """Groups for rollout calls of a trainer whose engines our nodes use. Shared by slime's and miles's functions.

    From the first call until `stop`, the collector runs and callbacks arrive in its own thread.

    Each call begins with the engines' addresses and version and ends with closed gates (`supply`). Unfinished groups
    are then cancelled, or continue in the next call under its weights, as set by `--partial-rollout`.

    task_of: one of the trainer's empty samples -> the task, with a unique id that is the same after a restart; its
    `num_samples` is `n_samples_per_prompt`. folder: where groups are stored before their callback is acknowledged.
    token_env: name of the environment variable with the server's control token. port, public_url: set fixed values if
    tasks must be recognised after a restart. num_in_flight: groups; `over_sampling_batch_size` if None. supply: None
    does not touch engines and gates of the nodes. Raises: InvalidRequest if the token is missing, or groups may shrink.
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
        group_judge: GroupJudgeSettings | None = None,
        supply: SupplySettings | None = SupplySettings(),  # noqa: B008 (frozen)
    ) -> None:
        if validity is not None and validity.on_invalid == "shrink":
            raise InvalidRequest("the trainer takes groups of one size: set on_invalid to refuse or resubmit.")
        self._server_url = server_url
        self._task_of = task_of
        self._folder = Path(folder)
        self._token = None if token_env is None else read_secret(token_env)
        self._address: dict[str, Any] = {"host": host, "port": port, "public_url": public_url}
        self._num_in_flight = num_in_flight
        self._validity = validity
        self._admit = admit
        self._group_judge = group_judge
        self._supply = supply
        self._worker: Worker | None = None

    def collect(self, args: Any, data_source: DataSource, version: int | None = None) -> list[Group]:
        """`args.rollout_batch_size` groups. version: version of the engines' weights, if the trainer reports it.

        Raises: InvalidRequest if training on them would be wrong, InvalidGroup, OutOfTasks, errors of the service and
        the engines.
        """
        arguments.refuse_options(args, arguments.IGNORED_BY_ROLLOUTS)
        arguments.require_fitting(args)
        if arguments.carries_over(args):
            arguments.require_correction(args)
        if self._worker is None or self._worker.has_ended:
            self._worker = Worker(lambda requests: self._serve(requests, args, data_source))
        return self._worker.collect(args.rollout_batch_size, version)

    def stop(self) -> None:
        """Cancel groups in flight and end the thread; idempotent."""
        if self._worker is not None:
            self._worker.stop()
        self._worker = None

    async def _serve(self, requests: Requests, args: Any, data_source: DataSource) -> None:
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(ServerClient(self._server_url, self._token))
            supply = await self._enter_supply(stack, service, args)
            receiver = receiving(service, self._folder, key=self._token, **self._address)
            client = await stack.enter_async_context(receiver)
            collector = await stack.enter_async_context(self._collector(client, args, data_source))
            while (request := await requests.get()) is not None:
                await _answer(request, supply, collector, client)

    async def _enter_supply(self, stack: AsyncExitStack, service: ServerClient, args: Any) -> EngineSupply | None:
        if self._supply is None:
            return None
        supply = EngineSupply(service, router_of(args, self._supply.model), self._token, self._supply)
        return await stack.enter_async_context(supply)

    def _collector(
        self, received: CallbackClient, args: Any, data_source: DataSource
    ) -> PlainCollector | ReplenishingCollector:
        client = judged(received, self._group_judge)
        tasks = self._tasks(args, data_source)
        rules: dict[str, Any] = {"validity": self._validity, "admit": self._admit}
        num_in_flight = self._num_in_flight or arguments.num_groups_in_flight(args)
        if arguments.carries_over(args):
            return ReplenishingCollector(client, tasks, num_in_flight=num_in_flight, **rules)
        if num_in_flight == args.rollout_batch_size:  # only the batch is in flight: nothing to cancel
            return PlainCollector(client, tasks, **rules)
        return ReplenishingCollector(client, tasks, num_in_flight=num_in_flight, unfinished="cancel", **rules)

    def _tasks(self, args: Any, data_source: DataSource) -> Iterator[Mapping[str, Any]]:
        while True:
            for group in data_source.get_samples(1):
                yield {**self._task_of(group[0]), "num_samples": args.n_samples_per_prompt}


class SlimeRollout:
    """A rollout function for slime.

    Arguments: see `GroupRollouts`. sample_type: slime's `Sample`, imported if None. reader: image processor of the
    trained model, without which rows with images are refused.
    """

    def __init__(self, *given: Any, sample_type: Any = None, reader: ImageReader | None = None, **options: Any) -> None:
        self._rollouts = GroupRollouts(*given, **options)
        self._reader = reader
        self._sample_type = sample_type
        self._num_groups = 0

    def __call__(
        self, args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
    ) -> list[list[list[Any]]]:
        """`args.rollout_batch_size` groups: [group][session][trace]. Raises: as `GroupRollouts.collect`."""
        if evaluation:
            raise InvalidRequest("this rollout function is for training: give slime another --eval-function-path.")
        groups = self._rollouts.collect(args, data_source)
        samples = to_samples(
            groups,
            args.n_samples_per_prompt,
            sample_type=self._sample_type,
            first_group=self._num_groups,
            temperature=args.rollout_temperature,
            reader=self._reader,
            replays_experts=arguments.replays_experts(args),
            replays_masks=arguments.replays_masks(args),
        )
        self._num_groups += len(groups)
        arguments.require_compared_by_session(args, samples)
        return samples

    def stop(self) -> None:
        """Cancel groups in flight and end the thread; idempotent."""
        self._rollouts.stop()


async def _answer(
    request: Request,
    supply: EngineSupply | None,
    collector: PlainCollector | ReplenishingCollector,
    client: CallbackClient,
) -> None:
    """Errors of a call are raised to its caller, and the collector continues."""
    try:
        async with nullcontext() if supply is None else supply.opened(request.version):
            groups = await collector.collect(request.num_groups)
    except Exception as error:
        request.groups.set_exception(error)
        return
    for group in groups:
        client.forget(group.task_id)
    request.groups.set_result(groups)
