"""A node's token acts for its own nodes alone, also with the right fence of another's lease."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import msgspec
import pytest

from gangline.domain.session import Turns
from gangline.wire.client.server import ServerClient
from integration.test_server_callbacks import served
from support.service.running import FakeNode, request, result

CALLS = ("release", "turns", "turns:begin-anew", "result")


@pytest.mark.parametrize("call", CALLS)
async def test_a_guessed_fence_of_another_nodes_session_is_refused(tmp_path: Path, call: str) -> None:
    async with served(tmp_path) as admin:
        own, other = [(await admin.create_token(role="node", tenant=tenant)).token for tenant in ("alpha", "beta")]
        await admin.submit(request("t", num_samples=1))
        async with ServerClient(admin.url, own) as client:
            node = FakeNode(client)
            (lease,) = await node.lease()
            path = f"/v1/sessions/t.0/{call}" if call == "result" else f"/v1/nodes/{node.node_id}/{call}"
            body = msgspec.json.encode({"session_id": "t.0", "fence": lease.fence})
            if call == "result":
                body = msgspec.msgpack.encode(result(lease, node.node_id))
            elif call == "turns":
                body = msgspec.msgpack.encode([Turns(session_id="t.0", fence=lease.fence, first=0, calls=())])
            headers = {
                "Authorization": f"Bearer {other}",
                "Content-Type": "application/msgpack" if call in ("result", "turns") else "application/json",
            }
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(admin.url + path, data=body) as reply,
            ):
                assert (reply.status, (await reply.json()).get("code")) == (409, "lease_lost")
            await node.finish([lease])
        assert (await admin.task("t")).sessions[0].outcome == "completed"
