"""One id, one session: neither a lease nor a caller takes over a session that is open under the same id."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.completion import Completion
from gangline.domain.errors import Conflict
from gangline.domain.ids import new_id
from gangline.domain.session import Lease
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.backends.by_role import BackendsByRole
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession, key_digest
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.external.sessions import ExternalSessions, SessionRequest
from gangline.node.external.store import ExternalStore
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.stages import Pools, PoolSizes
from gangline.store.journal.log import Journal
from support.node.proxy import served

NOBODY = "http://127.0.0.1:9"


def _lease() -> Lease:
    task: dict[str, Any] = {
        "instruction": "say hi",
        "runtime": {"backend": "process"},
        "agent": {"harness": "shell", "settings": {"command": "touch was_run"}, "allow_no_model_call": True},
    }
    return Lease(
        session_id="s1",
        task_id="t1",
        sample_index=0,
        attempt=1,
        fence=1,
        expires_at=time.time() + 600,
        lease_s=600,
        task=task,
    )


async def test_a_lease_of_an_open_sessions_id_is_refused_and_the_open_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / "runtimes").mkdir()
    journal, engine, proxy, backends = Journal.open(tmp_path / "journal"), VllmEngine(NOBODY), Proxy(), BackendsByRole()

    async with served(proxy) as url:
        parts = NodeParts(
            node_id="n1",
            owner=new_id("ids"),
            runtimes_folder=tmp_path / "runtimes",
            backends=backends,
            first_model="m",
            proxy=proxy,
            proxy_port=int(url.rpartition(":")[2]),
            journal=journal,
            pools=Pools(PoolSizes()),
        )
        store = ExternalStore(tmp_path / "sessions")
        sessions = ExternalSessions(node_id="n1", store=store, journal=journal, host=parts)
        opened = await sessions.create(SessionRequest(session_id="s1"), url, "m")
        result = await Attempt(_lease(), parts).live()
        assert (result.outcome, result.failure.boundary if result.failure else None) == ("infra_error", "node")
        assert result.failure
        assert result.failure.retryable
        assert "'s1'" in result.failure.message
        assert list((tmp_path / "runtimes").iterdir()) == []
        assert proxy.serves("s1")
        sessions.authorised("s1", key_digest(opened.api_key))
        assert sessions.view("s1").status == "open"
        await sessions.close()
    await backends.close()
    await journal.close()
    await engine.close()


class Taken:
    """A node that has a leased session of every id."""

    def serves(self, session_id: str) -> bool:
        return True

    def open_session(self, spec: SessionSpec, completions: Sequence[Completion] = ()) -> ModelSession:
        pytest.fail("the id is taken")

    def close_session(self, session_id: str) -> None:
        pytest.fail("the leased session was closed")


async def test_a_caller_does_not_get_the_id_of_a_session_that_is_served(tmp_path: Path) -> None:
    journal, engine, proxy = Journal.open(tmp_path / "journal"), VllmEngine(NOBODY), Proxy()
    leased = ModelSession(SessionSpec(session_id="s1", attempt=1, key="gls-leased"), engine, journal)
    proxy.add(leased)
    with pytest.raises(Conflict):
        proxy.add(ModelSession(SessionSpec(session_id="s1", attempt=0, key="gls-other"), engine, journal))
    store = ExternalStore(tmp_path / "sessions")
    sessions = ExternalSessions(node_id="n1", store=store, journal=journal, host=Taken())
    with pytest.raises(Conflict):
        await sessions.create(SessionRequest(session_id="s1"), NOBODY, "m")
    assert proxy.serves("s1")
    await journal.close()
    await engine.close()
