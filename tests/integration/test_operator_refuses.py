"""What a node's operator does not allow is refused, whatever the server gives the node and whoever asks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.placement import Allowed
from gangline.node.sessions.attempt import Attempt
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.server import ServerClient
from support.node.attempt import lease_of, node_parts
from support.node.node import TOKEN, running_node

ALLOWED = Allowed(runtimes=frozenset({"sandbox"}), networks=frozenset({"none", "proxy"}))
REFUSED: list[dict[str, Any]] = [{"backend": "process"}, {"backend": "sandbox", "network": "full"}]


@pytest.mark.parametrize("runtime", REFUSED, ids=["runtime", "network"])
@pytest.mark.parametrize("whose", ["agent", "grader"])
async def test_a_session_that_was_leased_all_the_same_does_not_run(
    tmp_path: Path, runtime: dict[str, Any], whose: str
) -> None:
    grader = {"strategy": "script", "refresh_runtime": True, "config": {"command": "touch /tmp/graded"}}
    task: dict[str, Any] = {"runtime": {"backend": "sandbox"}, "evaluator": grader}
    if whose == "agent":
        task["runtime"] = runtime
    else:
        task["evaluator"] = {**grader, "runtime": runtime}
    async with node_parts(tmp_path / "node") as parts:
        refusing = msgspec.structs.replace(parts, allowed=ALLOWED)
        lease = lease_of(**task)
        result = await Attempt(lease, refusing).live()
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert "operator allows only" in result.failure.message
    assert not result.failure.retryable


async def test_a_task_that_no_node_may_run_says_so_when_it_is_submitted(tmp_path: Path) -> None:
    async with (
        scripted_server({"rules": [{"pattern": ".", "text": "hi"}]}) as engine,
        serving(data_dir=tmp_path / "server", control_token=TOKEN) as server,
        running_node(
            tmp_path / "node", engine, server_url=server.url, runtimes=("sandbox",), networks=("none", "proxy")
        ),
        ServerClient(server.url, TOKEN) as client,
    ):
        for number, runtime in enumerate(REFUSED):
            submitted = await client.submit({"task_id": f"t{number}", **lease_of(runtime=runtime).task})
            assert submitted.unplaced is not None
            assert "operator" in submitted.unplaced, submitted.unplaced
