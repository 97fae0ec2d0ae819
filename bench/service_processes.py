"""The processes of the service's benchmark, each one event loop: what they use is what the service costs.

    python bench/service_processes.py server FOLDER [DATABASE_URL RESULTS_FOLDER]
    python bench/service_processes.py node|sandboxes FOLDER SERVER_URL ENGINE_URL

Both are the real ones, on a disk. The runtimes of `node` start nothing: a session passes through all stages, and what a
sandbox costs is not in it; those of `sandboxes` are real. Each prints its URL when it is
ready, and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from no_runtime import NoRuntime

from gangline.node.node import serve as serve_node
from gangline.server.run import ONE_MACHINE, Storage
from gangline.server.run import serve as serve_server
from gangline.settings import plugins
from gangline.settings.node import NodeSettings

SIZES: dict[str, Any] = {"init_workers": 16, "ready_slots": 32, "run_slots": 64, "postrun_workers": 16}


async def _serve(role: str, folder: Path, urls: Sequence[str]) -> None:
    def ready(url: str) -> None:
        print(url, flush=True)

    if role == "server":
        storage = Storage(database_url=urls[0], results_url=urls[1]) if urls else ONE_MACHINE
        serving = serve_server(data_dir=folder, control_token=None, on_ready=ready, storage=storage)
    else:
        if role == "node":
            plugins.make_runtime = lambda name: NoRuntime()
        serving = serve_node(
            NodeSettings(engines=tuple(urls[1:]), **SIZES),
            data_dir=folder,
            node_id="n1",
            server_url=urls[0],
            control_token=None,
            on_ready=ready,
        )
    task = asyncio.create_task(serving)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.gather(task, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
