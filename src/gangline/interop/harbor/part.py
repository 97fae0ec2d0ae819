"""Harbor's part of the server: accepts groups of rollouts that Harbor has run."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.domain.session import Lease
from gangline.domain.task import TaskRequest
from gangline.server.parts import ServerPart
from gangline.settings.plugins import check_task
from gangline.wire.http.negotiation import answer, read_record
from gangline.wire.http.routes import SUBJECT, Route

GROUPS = "/v1/harbor/groups"
HOLDER = "harbor"
"""Holds the sessions' leases instead of a node."""
LABEL = "run-by-harbor"
"""Such tasks need it of a node, in `runtime.node_labels`, and no node has it."""
_AT_ONCE = 8
"""Sessions leased by one request: their results are to arrive before the leases expire."""


class HarborPart(ServerPart):
    async def lease(self, request: web.Request) -> web.Response:
        task = await read_record(request, TaskRequest, max_bytes=self.place.max_task_bytes)
        check_task(task)
        if LABEL not in task.runtime.node_labels:
            raise InvalidRequest(f"runtime.node_labels must name {LABEL}: otherwise nodes would run these sessions.")
        SUBJECT.set(task.task_id)
        service = self.place.service
        return answer(request, await service.store.run(service.store.lease_elsewhere, task, HOLDER, _AT_ONCE))

    def routes(self) -> Sequence[Route]:
        return [
            Route("POST", GROUPS, self.lease,
                  "Accept a task that Harbor has run, and lease some of its sessions to report their results.",
                  body=TaskRequest, answer=list[Lease], errors=(400, 401, 409, 413, 507)),
        ]  # fmt: skip
