"""The methods of a Ray actor that NeMo RL's loop calls on its collector."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from gangline.train.trainers.nemo_rl.collector import NemoCollector

_NEXT_TASK = "next_ng_task_index"
"""NeMo RL's name for it in a checkpoint, which it reads back and passes to the next collector."""


class NemoActor:
    """Replaces NeMo RL's `AsyncTrajectoryCollector`.

    Methods block and run one after another in call order, because an actor with asyncio methods does not keep the
    order.

    make: creates the collector, called on the actor's event loop. next_task_index: from `get_rollouts_state` before a
    restart.
    """

    def __init__(self, make: Callable[[], NemoCollector], *, next_task_index: int = 0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gangline-collector", daemon=True)
        self._thread.start()
        self._collector = make()
        self._first_task_index = next_task_index
        self._dataloader: Any = None
        self._collecting: asyncio.Task[None] | None = None

    def start_collection(self, dataloader: Iterable[Any]) -> None:
        """Start collection and return at once. Raises: RuntimeError if it is already running."""
        if self._collecting is not None:
            raise RuntimeError("collecting was started before.")
        self._dataloader = dataloader
        self._run(self._start(dataloader))

    async def _start(self, dataloader: Iterable[Any]) -> None:
        self._collecting = asyncio.create_task(self._collector.start_collection(dataloader))

    # Methods around weight updates and validation.

    def prepare_for_refit(self) -> None:
        """Raises: as `close_gates`, and the error that ended collection."""
        self.check_health()
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

    # Methods that report state.

    def check_health(self) -> None:
        """Raises: the error that ended collection."""
        if (error := self._error()) is not None:
            raise error

    def get_status(self) -> dict[str, Any]:
        """`running`, `data_exhausted`, `errored`, `error` (None or its text), `inflight_workers` (groups)."""
        error = self._error()
        running = self._collecting is not None and not self._collecting.done()
        return {
            "running": running,
            "data_exhausted": self._collecting is not None and not running and error is None,
            "errored": error is not None,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "inflight_workers": self._collector.num_under_way if running else 0,
        }

    def get_dataloader_state(self) -> dict[str, Any]:
        """The data loader's state, which NeMo RL passes to the next one."""
        return {} if self._dataloader is None else self._dataloader.state_dict()

    def get_rollouts_state(self) -> dict[str, int]:
        """For the checkpoint: number of groups pushed, over all restarts."""
        return {_NEXT_TASK: self._first_task_index + self._collector.num_pushed}

    def get_efficiency_metrics(self) -> dict[str, float]:
        """Seconds so far, by category."""
        return {"gangline/gates_closed": self._collector.closed_s}

    def drain_payload_metrics(self) -> dict[str, float]:
        """Sizes of images and sounds exchanged by workers; always empty here."""
        return {}

    def stop(self) -> None:
        """Cancel groups in flight, close the clients and end the thread."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.gather(self._collecting, return_exceptions=True)
        await self._collector.stop()

    def _error(self) -> BaseException | None:
        if self._collecting is None or not self._collecting.done() or self._collecting.cancelled():
            return None
        return self._collecting.exception()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()
