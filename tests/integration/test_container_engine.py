"""The command line of a container engine, as a process of the node's; a program that never answers stands for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from gangline.sandbox.containers.engine import Engine


async def test_a_question_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    """Not even one that nobody has waited for: Python complains of those, and they hold a number."""
    told = tmp_path / "pid"
    engine = Engine("docker", ["sh", "-c", f"echo $$ > {told}.new; mv {told}.new {told}; exec sleep 100000"])
    asking = asyncio.create_task(engine.containers(["label"]))
    async with asyncio.timeout(20):
        while not told.exists():
            await asyncio.sleep(0.01)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    assert not Path(f"/proc/{told.read_text().strip()}").exists()
