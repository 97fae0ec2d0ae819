"""What an attempt lives from, in this process: proxy, scripted engine, journal and pools, without a server."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from gangline.domain.ids import new_id
from gangline.domain.session import Lease
from gangline.node.backends.by_role import BackendsByRole
from gangline.node.backends.engine import BackendSpec
from gangline.node.backends.gate import Gate
from gangline.node.calls.proxy import Proxy
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.stages import Pools, PoolSizes
from gangline.serving.scripted.server import scripted_server
from gangline.store.journal.log import Journal
from support.node.proxy import served


@asynccontextmanager
async def node_parts(
    folder: Path,
    *,
    gate: Gate | None = None,
    sizes: PoolSizes | None = None,
    script: dict[str, Any] | None = None,
    engine_url: str | None = None,
    role_scripts: Mapping[str, dict[str, Any]] | None = None,
) -> AsyncGenerator[NodeParts]:
    """The engine answers everything with "hi", unless there is a script for it, or it is another one.

    role_scripts: of the engines of roles.
    """
    async with AsyncExitStack() as stack:
        script = script or {"rules": [{"pattern": ".", "text": "hi"}]}
        url = engine_url or await stack.enter_async_context(scripted_server(script))
        backends = BackendsByRole()
        stack.push_async_callback(backends.close)
        await backends.policy.add(url)
        for role, one in (role_scripts or {}).items():
            await backends.add(BackendSpec(await stack.enter_async_context(scripted_server(one)), role=role))
        proxy = Proxy()
        node_url = await stack.enter_async_context(served(proxy))
        journal = Journal.open(folder / "journal")
        stack.push_async_callback(journal.close)
        (folder / "runtimes").mkdir(parents=True)
        yield NodeParts(
            node_id="n1",
            owner=new_id("attempt"),  # what a reaper finds by it must be nobody else's
            runtimes_folder=folder / "runtimes",
            backends=backends,
            first_model="scripted",
            proxy=proxy,
            proxy_port=int(node_url.rpartition(":")[2]),
            journal=journal,
            pools=Pools(sizes or PoolSizes()),
            gate=gate or Gate(),
        )


def lease_of(session_id: str = "s1", **task: Any) -> Lease:
    """The lease of a session in the `process` runtime. task: fields over those of an agent that does nothing."""
    request: dict[str, Any] = {
        "instruction": "say hi",
        "runtime": {"backend": "process"},
        "agent": {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True},
        **task,
    }
    return Lease(
        session_id=session_id,
        task_id="t1",
        sample_index=0,
        attempt=1,
        fence=1,
        expires_at=time.time() + 600,
        lease_s=600,
        task=request,
    )
