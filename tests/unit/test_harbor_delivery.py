"""What is delivered of a rollout whose node has no records of it: nothing yet, then that they are lost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import Conflict, GanglineError, NotFound, ServerUnavailable
from gangline.domain.session import Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.interop.harbor.relay.api import HarborRollout
from gangline.interop.harbor.relay.delivery import GroupDelivery
from gangline.interop.harbor.relay.rollouts import RelayedRollout, RolloutBook, SessionAddress

TEMPLATE = TaskRequest.model_validate({"instruction": "", "agent": {"harness": "harbor"}})
FINISHED = {
    "id": "r1",
    "job_id": "job",
    "name": "hello__a",
    "state": "finished",
    "retry_ids": ["r1"],
    "task": {"name": "hello"},
    "agent": {"name": "codex"},
    "model": {"name": "m"},
    "rewards": {"reward": 1.0},
}
LEASE = Lease(session_id="t.0", task_id="t", sample_index=0, attempt=1, fence=1, expires_at=0.0, lease_s=30.0, task={})
ROLLOUT = msgspec.convert(FINISHED, HarborRollout)


class Server:
    """answers: of the next requests for a session's records; None: it has them, and no call is in them."""

    def __init__(self, *answers: GanglineError | None) -> None:
        self.answers = list(answers)
        self.results: list[SessionResult] = []

    async def request_json(self, *_: Any, **__: Any) -> list[Lease]:
        return [] if self.results else [LEASE]

    async def finalize(self, session_id: str, *, completions: bool) -> SessionResult:
        assert completions
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer
        return SessionResult(session_id=session_id, task_id="t", node_id="n1", attempt=1, fence=1, outcome="completed")

    async def post_result(self, result: SessionResult) -> None:
        self.results.append(result)

    async def task(self, task_id: str) -> Any:
        return SimpleNamespace(task_id=task_id, ended=bool(self.results))


def delivery(folder: Path, server: Server, lost_after_s: float) -> GroupDelivery:
    client: Any = server
    book = RolloutBook(folder)
    address = SessionAddress(session_id="harbor-r1", api_key="k", url="http://n")
    book.add(RelayedRollout("r1", "job", session=address, is_over=True))
    return GroupDelivery(client, book, TEMPLATE, "reward", pause_s=0.0, lost_after_s=lost_after_s)


async def test_a_node_that_restarts_is_waited_for(tmp_path: Path) -> None:
    server = Server(NotFound("no node has it"), NotFound("no node has it"), None)
    made = delivery(tmp_path, server, 3600.0)
    for _ in range(2):
        with pytest.raises(ServerUnavailable, match="no node has the records of rollout r1 yet"):
            await made.deliver([ROLLOUT])
        assert server.results == []
    assert (await made.deliver([ROLLOUT])).ended
    (result,) = server.results
    assert (result.outcome, result.reward, result.failure) == ("completed", 1.0, None)


@pytest.mark.parametrize("error", [NotFound("no node has it"), Conflict("it was aborted")])
async def test_what_does_not_come_back_is_lost_and_scores_nothing(tmp_path: Path, error: GanglineError) -> None:
    server = Server(error)
    made = delivery(tmp_path, server, 0.0 if isinstance(error, NotFound) else 3600.0)
    assert (await made.deliver([ROLLOUT])).ended
    (result,) = server.results
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert result.failure.code == "session_lost"
    assert error.message in result.failure.message
