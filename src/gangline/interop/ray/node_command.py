"""One node of a cluster, on its assigned machine: runs `gangline node` as a child, supervised as in `up`.

Its id consists of the machine's name and the actor's number, so that it finds its folder and undelivered results when
it returns to that machine. On another machine it is another node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from gangline import __version__
from gangline.cli.processes.child import Child
from gangline.cli.processes.serving import GRACE_S
from gangline.cli.processes.supervisor import Supervisor
from gangline.cli.terminal.output import log_to_stderr
from gangline.domain.errors import NodeError, StoreError
from gangline.interop.ray.actors import Place
from gangline.machine.private import make_private_folder, open_data_folder
from gangline.machine.telemetry.logs import LogFormat
from gangline.node.node import reap
from gangline.settings.node import NodeSettings
from gangline.settings.service import write_tables

_log = logging.getLogger("gangline.interop.ray")

_LOOK_AGAIN_S = 0.5


def node_id_at(place: Place) -> str:
    name = re.sub(r"[^A-Za-z0-9-]", "-", place.machine.split(".")[0]).strip("-") or "machine"
    return f"{name[:100]}-{place.index}"


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """The common options of every node of the cluster."""

    data_dir: Path
    """Folder on each machine."""
    server_url: str
    control_token: str | None
    settings: str
    """The nodes' `NodeSettings` as JSON, parsed after the versions are compared."""
    log_format: LogFormat = "text"
    version: str = __version__
    """Version of the program that requests the node."""

    async def run(self, place: Place, on_ready: Callable[[str], None]) -> None:
        """Keep the node running until cancelled, or until it has drained; nothing of it is left afterwards.

        Raises: GanglineError if it does not start, or keeps dying.
        """
        log_to_stderr(self.log_format)
        if self.version != __version__:
            raise NodeError(f"{place.machine} has Gangline {__version__}, and {self.version} is wanted: install that.")
        supervisor, child = Supervisor(), self._child(place)
        try:
            await self._start(supervisor, child, place)
            on_ready(child.url)
            await supervisor.keep()
        finally:
            if await supervisor.stop():
                await reap(self.data_dir, node_id_at(place))

    def _child(self, place: Place) -> Child:
        node_id = node_id_at(place)
        logs = self.data_dir / "logs"
        try:
            open_data_folder(self.data_dir)
            make_private_folder(logs)
        except OSError as error:
            raise NodeError(
                f"{place.machine} cannot write to the data folder {self.data_dir}: {error.strerror}. Choose another."
            ) from error
        settings = NodeSettings.model_validate_json(self.settings)
        here = settings.model_copy(update={"host": place.host})
        token = {} if self.control_token is None else {"GANGLINE_TOKEN": self.control_token}
        return Child(
            "node",
            ["node", "--data", str(self.data_dir), "--id", node_id, "--server", self.server_url],
            tables=write_tables(node=here),
            log_path=logs / f"{node_id}.log",
            env={**os.environ, **token, "GANGLINE_LOG_FORMAT": self.log_format},
            port=0,
            may_end=True,
        )

    async def _start(self, supervisor: Supervisor, child: Child, place: Place) -> None:
        """Retries, because a killed actor's node on this machine may still be giving back its sessions."""
        give_up_at = asyncio.get_running_loop().time() + GRACE_S + 5
        while True:
            try:
                await child.start()
            except StoreError as error:
                if asyncio.get_running_loop().time() > give_up_at:
                    raise
                _log.info("cluster.earlier_life node=%s message=%s", node_id_at(place), error)
                await asyncio.sleep(_LOOK_AGAIN_S)
            else:
                supervisor.take(child)
                return
