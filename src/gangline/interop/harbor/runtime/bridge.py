"""Runs Harbor in a separate process: see `in_sandbox.bridge`. One process serves all sandboxes of a runtime."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from gangline.domain.errors import InvalidRequest, RuntimeFailed, RuntimeUnavailable
from gangline.interop.harbor.runtime import in_sandbox
from gangline.machine.event_loop import to_end
from gangline.sandbox.shared.leftovers import LABEL

log = logging.getLogger("gangline.runtimes")

INSTALL = (
    "runtime `harbor` needs the Python of an environment that has Harbor. Run: python3.12 -m venv /opt/harbor && "
    "/opt/harbor/bin/pip install harbor, and set GANGLINE_HARBOR_PYTHON=/opt/harbor/bin/python"
)

_PROGRAM = Path(in_sandbox.__file__).with_name("bridge.py")
_BEGIN_S = 120.0
_END_S = 120.0
"""Seconds to stop the environments that are still running when a bridge ends."""
_LINE_BYTES = 64 << 20
_NOT_HARBOR_S = (LABEL, "GANGLINE_TOKEN", "PYTHONHOME", "VIRTUAL_ENV")


class Bridge:
    """A running bridge process."""

    def __init__(self, process: Process) -> None:
        self.num_users = 0
        self._process = process
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {0: asyncio.get_running_loop().create_future()}
        self._on_part: dict[int, Callable[[str], None]] = {}
        self._hearing = asyncio.create_task(self._hear())

    @classmethod
    async def begin(cls, python: Path) -> Bridge:
        """Raises: RuntimeUnavailable if Harbor is not installed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-P", _PROGRAM),
                stdin=PIPE,
                stdout=PIPE,
                stderr=None,
                env={name: value for name, value in os.environ.items() if name not in _NOT_HARBOR_S},
                limit=_LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeUnavailable(
                f"{python} cannot be started ({error.strerror}). Name a Python 3.12 or newer with the package `harbor` "
                "in GANGLINE_HARBOR_PYTHON."
            ) from error
        bridge = cls(process)
        try:
            async with asyncio.timeout(_BEGIN_S):
                answer = await bridge._waiting[0]
        except TimeoutError:
            answer = {"error": f"it did not answer within {_BEGIN_S:.0f} s"}
        except BaseException:
            await bridge.close()
            raise
        if "error" in answer:
            await bridge.close()
            raise RuntimeUnavailable(
                f"Harbor cannot be used by {python}: {answer['error']}. Run: {python} -m pip install harbor"
            )
        return bridge

    @property
    def is_alive(self) -> bool:
        return not self._hearing.done()

    async def ask(
        self, do: str, name: str, *, on_part: Callable[[str], None] | None = None, **arguments: object
    ) -> Any:
        """name: the environment's. on_part: called with output that precedes the answer.

        Raises: InvalidRequest if Harbor rejects the request, RuntimeFailed.
        """
        number = next(self._ids)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        if on_part is not None:
            self._on_part[number] = on_part
        line = json.dumps({"id": number, "do": do, "name": name, **arguments})
        stdin = self._process.stdin
        assert stdin is not None
        try:
            if not self.is_alive:
                raise ConnectionError
            stdin.write(line.encode() + b"\n")
            await stdin.drain()
            answer = await answered
        except ConnectionError:
            raise RuntimeFailed("the bridge to Harbor has ended.") from None
        finally:
            self._waiting.pop(number, None)
            self._on_part.pop(number, None)
            del answered  # its error's traceback refers to this frame
        if "error" in answer:
            kind = InvalidRequest if answer.get("kind") == "invalid" else RuntimeFailed
            raise kind(f"Harbor, asked to {do}: {answer['error']}")
        return answer.get("value")

    async def _hear(self) -> None:
        why = "its bridge has ended"
        try:
            await self._answers()
        except Exception as error:  # a line that is too long or not JSON, or an error of a caller's `on_part`
            log.exception("harbor.bridge_not_understood")
            why = f"its bridge was not understood: {error}"
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result({"error": why, "kind": "failed"})

    async def _answers(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        while line := await stdout.readline():
            answer = json.loads(line)
            if "part" in answer:
                if (on_part := self._on_part.get(answer["id"])) is not None:
                    on_part(answer["part"])
                continue
            waiting = self._waiting.get(answer["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

    async def close(self) -> None:
        """End the process, which stops the environments that are still running."""
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(ConnectionError):
            stdin.close()
            await stdin.wait_closed()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._hearing


class Bridges:
    """The bridge of a runtime: started with the first sandbox, stopped after the last, and replaced if it dies."""

    def __init__(self, python: Path | None) -> None:
        self._python = python
        self._lock = asyncio.Lock()
        self._current: Bridge | None = None

    async def take(self) -> Bridge:
        """Raises: RuntimeUnavailable."""
        if self._python is None:
            raise RuntimeUnavailable(INSTALL)
        async with self._lock:
            if self._current is None or not self._current.is_alive:
                self._current = await Bridge.begin(self._python)
            self._current.num_users += 1
            return self._current

    async def give_back(self, bridge: Bridge) -> None:
        async with self._lock:
            bridge.num_users -= 1
            if bridge.num_users == 0:
                self._current = None if self._current is bridge else self._current
                await bridge.close()

    @asynccontextmanager
    async def bridge(self) -> AsyncGenerator[Bridge]:
        """Take the bridge for the duration of a block. Raises: RuntimeUnavailable."""
        bridge = await to_end(self.take(), self.give_back)
        try:
            yield bridge
        finally:
            await to_end(self.give_back(bridge))
