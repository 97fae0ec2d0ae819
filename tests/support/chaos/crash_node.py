"""A node that kills itself: `python crash_node.py DATA_FOLDER ENGINE_URL`, then one plan a line on stdin (JSON).

Each plan is one life of the same node, forked from a process that has imported everything, so that a life begins in
milliseconds. Stdout tells `ready PID URL`, and `dead STATUS NUM_STEPS` once it is.

A step is a call or a return of a Python function, or a call of a C function, in the package.
Plans (`at` counts from 0):
{"kind": "step", "at": n}     `kill -9` at the n-th step after the node is ready
{"kind": "commit", "at": n}   the same, of the steps of journal and ledger only
{"kind": "restart", "at": n}  at the n-th step of starting
{"kind": "torn", "at": n, "part": f}   in the n-th write of the journal, after the fraction f of its bytes
{"kind": "none"}              live until SIGTERM, or until somebody else does it
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import signal
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gangline
from gangline.node.node import serve
from gangline.settings import plugins
from gangline.settings.node import NodeSettings
from gangline.store.journal import entries

PACKAGE = str(Path(gangline.__file__).parent)
COMMIT = tuple(f"{PACKAGE}/{name}.py" for name in ("store/journal/log", "store/journal/entries", "node/capture/ledger"))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # of a thread that is not the first, the signal may take a moment


class Steps:
    """Counts the steps of the package's code in `counter`, which outlives the process, and dies at one of them."""

    def __init__(self, counter: mmap.mmap, only: tuple[str, ...], at: int | None) -> None:
        self._counter = counter
        self._only = only
        self._at = at
        self._num = 0
        self._counted: dict[CodeType, bool] = {}

    def start(self) -> None:
        threading.setprofile(self._step)
        sys.setprofile(self._step)

    def restart(self) -> None:
        self._num = 0

    def _step(self, frame: FrameType, event: str, _: Any) -> None:
        counted = self._counted.get(frame.f_code)
        if counted is None:
            counted = self._counted[frame.f_code] = frame.f_code.co_filename.startswith(self._only)
        if not counted or event == "c_return":
            return
        if self._num == self._at:
            die()
        self._num += 1
        struct.pack_into("<q", self._counter, 0, self._num)


def tear(at: int, part: float) -> None:
    """Die in the middle of a write."""
    write, num_writes = os.write, 0

    def torn_write(file: int, data: memoryview) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes > at:
            write(file, data[: int(part * len(data))])
            die()
        return write(file, data)

    entries.os = type("TornOs", (), {**vars(os), "write": staticmethod(torn_write)})  # type: ignore[assignment]


async def live(folder: Path, engine_url: str, plan: dict[str, Any], counter: mmap.mmap) -> None:
    kind, at = plan["kind"], plan.get("at")
    steps = Steps(counter, COMMIT if kind == "commit" else (PACKAGE,), at if kind != "torn" else None)
    if kind == "torn":
        tear(at, plan["part"])
    if kind == "restart":
        steps.start()

    def ready(url: str) -> None:
        os.write(1, f"ready {os.getpid()} {url}\n".encode())
        if kind == "restart":
            steps.restart()
        else:
            steps.start()

    task = asyncio.create_task(
        serve(
            NodeSettings(engines=(engine_url,)),
            data_dir=folder,
            node_id="n1",
            server_url="http://127.0.0.1:9",
            control_token="token",
            on_ready=ready,
        )
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with suppress(asyncio.CancelledError):
        await task


def main(folder: str, engine_url: str) -> None:
    logging.basicConfig(level=logging.ERROR)
    for kind in ("dialect", "engine", "builder", "runtime"):  # imported once, not in every life
        for name in plugins.names(kind):  # type: ignore[arg-type]
            plugins.load(kind, name)
    counter = mmap.mmap(-1, 8)
    for line in sys.stdin:
        counter[:] = bytes(8)
        pid = os.fork()
        if pid == 0:
            asyncio.run(live(Path(folder), engine_url, json.loads(line), counter))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print("dead", os.waitstatus_to_exitcode(status), struct.unpack("<q", counter[:])[0], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
