"""Combines the two objects that TRL's `AsyncGRPOTrainer` accepts: rollout worker and weight transfer.

As the rollout worker it puts a `RolloutSample` for each trace into the queue that TRL drains. As the weight transfer it
writes the tensors that TRL streams into a folder and pushes that to the engines: the gates close, the engines load, the
gates receive the version and open.

Laws: TRL judges each row by the version of its oldest trained token (`max_staleness`). A group with tokens of unknown
version is left out and logged.

Source: trl 1.16.0, experimental/async_grpo/async_grpo_trainer.py (`RolloutWorkerProtocol`, `WeightTransferProtocol`,
`_TrainBeginCallback`, `_sync_weight_merged`: order of the calls), which is experimental in TRL.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import queue
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from gangline.domain.errors import InvalidRequest
from gangline.train.collecting.admission import lag_of
from gangline.train.collecting.groups import Group, trainable_traces
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.masks import all_sampled
from gangline.train.learning.samples import Mask
from gangline.train.trainers.pushing import push_folder
from gangline.train.trainers.trl import Connection
from gangline.train.trainers.trl_async.samples import LongRows, to_rollout_samples
from gangline.wire.client.background import InBackground

_log = logging.getLogger(__name__)

_FULL_S = 0.05
"""Delay between checks of a full queue."""
_SHARD_BYTES = 5 * 1024**3


class AsyncServiceRollouts:
    """The `rollout_worker` and the `weight_transfer` of one `AsyncGRPOTrainer`, for one call of `train`.

    connect: opens the connection, on an event loop in its own thread. Its collector continues while TRL trains, so make
    it a `ReplenishingCollector`. args: the trainer's `AsyncGRPOConfig`. max_queued: queued rows at which collection
    pauses; None: as many as one optimiser step uses. staging_dir: where tensors are written before they are pushed,
    preferably on the disk of the engines' weights. Default: the temporary folder. engine_patience_s: how long engines,
    nodes and server may be unreachable when weights are pushed.

    Raises: InvalidRequest if the trainer's configuration would lose rows.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        args: Any,
        algorithm: Algorithm,
        *,
        mask: Mask = all_sampled,
        long_rows: LongRows = "refuse",
        max_queued: int | None = None,
        staging_dir: Path | str | None = None,
        engine_patience_s: float = 600.0,
    ) -> None:
        if args.token_budget is None:
            raise InvalidRequest(
                "token_budget is not set, and TRL would ask a vLLM server for it: set it to the longest row in tokens, "
                "or to -1 to batch by number."
            )
        algorithm.require_group_advantages("TRL", one_by_one=True)
        self._service = InBackground(connect)
        self._is_open = False
        self._args = args
        self._algorithm = algorithm
        self._mask: Mask = mask
        self._long_rows: LongRows = long_rows
        self._max_queued = max_queued or (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        self._staging_dir = staging_dir
        self._engine_patience_s = engine_patience_s
        self._version = 0
        self._producing: asyncio.Task[None] | None = None
        self.rollout_buffer = queue.Queue[Any]()
        self.metrics_queue = queue.Queue[dict[str, Any]]()

    # TRL's weight transfer: called by the trainer's thread.

    def init_weight_transfer(self) -> None:
        """Open the connection. Raises: the errors of `connect`."""
        self._service.__enter__()
        self._is_open = True

    def pause(self) -> None:
        """Does nothing: sampling continues while the tensors are written, and `send_weights` closes the gates."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Load these weights into the engines under the next version. Raises: as `WeightUpdater.push`."""
        with tempfile.TemporaryDirectory(prefix="gangline-trl-", dir=self._staging_dir) as folder:
            _write(iterator, Path(folder))
            self._service.run(lambda service: self._push(service, Path(folder)))

    def resume(self) -> None:
        """Does nothing: the gates are already open."""

    def destroy(self) -> None:
        """Close the connection; idempotent. Raises: errors of closing."""
        if self._is_open:
            self._is_open = False
            self._service.__exit__()

    # TRL's rollout worker.

    def start(self) -> None:
        """Start collection."""
        self._producing = self._service.run(self._begin)

    def stop(self) -> None:
        """Stop collection; idempotent. Groups in flight are cancelled when the connection closes."""
        producing, self._producing = self._producing, None
        if producing is not None:
            self._service.run(lambda _service: _end(producing))

    def update_model_version(self, model_version: int) -> None:
        """Called by TRL after each push; TRL counts from 1."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises: the error that ended collection. Slow sessions are not an error: the collector waits for the
        service.
        """
        if self._producing is not None and self._producing.done():
            self._producing.result()

    async def _push(self, service: Connection, folder: Path) -> None:
        version = service.first_version + self._version
        await push_folder(service.weights, folder, version, patience_s=self._engine_patience_s)

    async def _begin(self, service: Connection) -> asyncio.Task[None]:
        return asyncio.create_task(self._produce(service))

    async def _produce(self, service: Connection) -> None:
        group_ids = itertools.count()
        while True:
            if self.rollout_buffer.qsize() >= self._max_queued:
                await asyncio.sleep(_FULL_S)
                continue
            for group in await service.collector.collect(1):
                if any(lag_of(trainable_traces(session), self._version) is None for session in group.sessions):
                    _log.warning("trl.group_left_out task_id=%s reason=unknown_version", group.task_id)
                else:
                    self._put(service, group, next(group_ids))

    def _put(self, service: Connection, group: Group, group_id: int) -> None:
        samples = to_rollout_samples(
            group,
            self._args.num_generations,
            self._algorithm,
            group_id=group_id,
            first_version=service.first_version,
            temperature=self._args.temperature,
            token_budget=self._args.token_budget,
            long_rows=self._long_rows,
            mask=self._mask,
        )
        for sample in samples:
            self.rollout_buffer.put_nowait(sample)


async def _end(producing: asyncio.Task[None]) -> None:
    producing.cancel()
    with suppress(BaseException):  # `check_health` has reported it
        await producing


def _write(iterator: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Safetensors, in parts that fit into memory, with their index."""
    part, size, number = dict[str, Tensor](), 0, itertools.count(1)
    places = dict[str, str]()

    def flush() -> None:
        name = f"model-{next(number):05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, name))
        part.clear()

    for name, tensor in iterator:
        if part and size + tensor.nbytes > _SHARD_BYTES:
            flush()
            size = 0
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()  # training continues and changes the model
        size += tensor.nbytes
    flush()
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
