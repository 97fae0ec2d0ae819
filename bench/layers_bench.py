"""Checkpoints and forks of a sandbox over 10,000 files, as a root node makes them.

`checkpoint_ms`: alongside a living agent process, 1 MB changed since the prepared files were frozen. `fork_32_ms`:
until 32 sandboxes over one checkpoint have each run a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gangline.domain.sandbox import RuntimeStart
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.testing.runtime_conformance.bench import until_present

_FOLDERS = 100
_FILES = 100
_FORKS = 32
_ROUNDS = 15
_BASE = f"""
import os
for folder in range({_FOLDERS}):
    os.mkdir(f"d{{folder}}")
    for file in range({_FILES}):
        with open(f"d{{folder}}/f{{file}}", "w") as made: made.write("x" * 1000)
"""
_DELTA = """
for number in range(20):
    with open(f"d{number}/f{number}", "wb") as file: file.write(bytes([number]) * 50_000)
"""


def run() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        return asyncio.run(_measured(Path(name)))


async def _measured(root: Path) -> dict[str, dict[str, Any]]:
    runtime = BubblewrapRuntime()
    spec = RuntimeSpec(network="none")

    def start(number: int, **more: Any) -> RuntimeStart:
        runtime_id = f"bench{number}"
        return RuntimeStart(runtime_id=runtime_id, owner="layers-bench", spec=spec, folder=root / runtime_id, **more)

    parent = await runtime.start(start(0))
    await parent.exec(["python3", "-c", _BASE])
    began = time.perf_counter()
    base = await parent.checkpoint("base")
    base_ms = 1000 * (time.perf_counter() - began)
    agent = asyncio.create_task(parent.exec("touch ready; sleep 100000"))
    await until_present(parent, "ready")
    taken_ms: list[float] = []
    for _round in range(_ROUNDS):
        await parent.exec(["python3", "-c", _DELTA])
        began = time.perf_counter()
        last = await parent.checkpoint()
        taken_ms.append(1000 * (time.perf_counter() - began))
        assert last.is_frozen, last
        await runtime.release(last)
    last = await parent.checkpoint()
    began = time.perf_counter()
    forks = await asyncio.gather(*(runtime.start(start(1 + number, base=last)) for number in range(_FORKS)))
    started_ms = 1000 * (time.perf_counter() - began)
    results = await asyncio.gather(*(fork.exec("test -s d99/f99 && echo mine > d99/f99") for fork in forks))
    forked_ms = 1000 * (time.perf_counter() - began)
    assert all(result.ok for result in results), results
    await asyncio.gather(*(fork.stop() for fork in forks))
    await parent.stop()
    with contextlib.suppress(asyncio.CancelledError):
        await agent
    for checkpoint in (base, last):
        await runtime.release(checkpoint)
    return {
        "layers.base_ms": _figure(base_ms, "10,000 files frozen where no process lives, mounted again"),
        "layers.checkpoint_ms": _figure(
            statistics.median(taken_ms),
            f"agent alive, 1 MB in 20 files; median of {_ROUNDS}; load {os.getloadavg()[0]:.1f}",
        ),
        "layers.fork_32_started_ms": _figure(started_ms, "32 sandboxes over one checkpoint have started"),
        "layers.fork_32_ms": _figure(forked_ms, f"and each has run a command; load {os.getloadavg()[0]:.1f}"),
    }


def _figure(value: float, note: str) -> dict[str, Any]:
    return {"value": round(value, 1), "unit": "ms", "note": note}
