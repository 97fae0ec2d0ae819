"""Grades recorded sessions again: the server provides the record, and one of its nodes grades.

The node with the fewest gradings of this server is chosen. Nothing is stored; the verdict is only returned to the
caller.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
from aiohttp import web
from pydantic import BaseModel, ConfigDict

from gangline.domain.errors import NodeDraining, ServerUnavailable
from gangline.domain.session import Grading, GradingRequest, SessionResult
from gangline.domain.task import EvaluatorSpec
from gangline.domain.views import NodeView
from gangline.server.service.core import RolloutService
from gangline.server.service.live_nodes import live_nodes, node_client
from gangline.wire.http.negotiation import answer, path_id, read_record
from gangline.wire.http.routes import SUBJECT, Route


class RegradeRequest(BaseModel):
    """Body of `POST /v1/sessions/{session}/regrade`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    evaluator: EvaluatorSpec | None = None
    """None: the task's own evaluator."""


class Regrading:
    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._num_on = Counter[str]()
        """node id -> gradings in progress"""

    async def grade(self, session_id: str, evaluator: EvaluatorSpec | None) -> Grading:
        """Raises: NotFound. ServerUnavailable if no node answers. Conflict if the session has not ended or was not to
        be graded. InvalidRequest, UnknownPlugin for the evaluator.
        """
        recorded = await self._service.session_result(session_id)
        task = (await self._service.task(recorded.task_id)).request
        if evaluator is not None:
            task = {**task, "evaluator": evaluator.model_dump(mode="json")}
        return await self._on_free_node(task, msgspec.structs.replace(recorded, completions=()))

    async def _on_free_node(self, task: dict[str, Any], recorded: SessionResult) -> Grading:
        request = GradingRequest(task=task, result=recorded)
        nodes = [node for node in await live_nodes(self._service) if not node.draining]
        failures: list[str] = []
        while nodes:
            node = min(nodes, key=lambda one: self._num_on[one.node_id])
            nodes.remove(node)
            try:
                return await self._on(node, request)
            except (NodeDraining, ServerUnavailable) as error:
                failures.append(f"{node.node_id}: {error}")
        reasons = "; ".join(failures) or "none has reported in the last minute"
        raise ServerUnavailable(f"no node can grade the session ({reasons}). Start one: `gangline node`.")

    async def _on(self, node: NodeView, request: GradingRequest) -> Grading:
        self._num_on[node.node_id] += 1
        try:
            async with node_client(self._service, node) as client:
                return await client.grade(request)
        finally:
            self._num_on[node.node_id] -= 1


class RegradingRoutes:
    def __init__(self, regrading: Regrading) -> None:
        self._regrading = regrading

    async def regrade(self, request: web.Request) -> web.Response:
        session_id = path_id(request, "session_id")
        SUBJECT.set(session_id)
        wanted = await read_record(request, RegradeRequest)
        verdict = await self._regrading.grade(session_id, wanted.evaluator)
        return await asyncio.to_thread(answer, request, verdict)

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/sessions/{session_id}/regrade", self.regrade,
                  "Grade an ended session again, by another evaluator or its task's own. Its result stays as it is.",
                  body=RegradeRequest, answer=Grading, errors=(400, 401, 404, 409, 503)),
        ]  # fmt: skip
