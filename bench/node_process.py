"""A real node as this process, for benchmarks that replace its agents or sandboxes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from gangline.node.node import serve
from gangline.settings.node import NodeSettings


def run_node(settings: NodeSettings, *, node_id: str, folder: Path, server_url: str) -> None:
    """Print its URL when it is ready, and serve until SIGTERM. The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_until_terminated(settings, node_id, folder, server_url))


async def _until_terminated(settings: NodeSettings, node_id: str, folder: Path, server_url: str) -> None:
    serving = serve(
        settings,
        data_dir=folder,
        node_id=node_id,
        server_url=server_url,
        control_token=None,
        on_ready=lambda url: print(url, flush=True),
    )
    task = asyncio.create_task(serving)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.gather(task, return_exceptions=True)
