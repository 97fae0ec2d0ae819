"""Harbor's Docker environment keeps the contract of runtimes, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from containers.engines import IMAGE
from containers.test_container_sessions import run, task
from gangline.domain.errors import InvalidRequest, RuntimeFailed, RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart
from gangline.domain.task import RuntimeSpec
from gangline.interop.harbor.runtime.runtime import HarborRuntime
from gangline.settings.machine import Settings
from gangline.testing.runtime_conformance import Check, checks, run_check
from harbor_runtime.conftest import containers
from support.service.cli_process import UpProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

_LEFT_OUT = {
    "a_thousand_actions_leave_no_growth": "1,100 actions are as many calls of Docker's, more than the check waits for",
    "a_link_put_there_meanwhile_leads_nowhere": "120 moves of files are as many calls of Docker's",
    "the_proxy_is_reached_and_streams": "its 200 answers are as many calls of Docker's",
    "the_proxy_is_reached_under_full": "here the operator has closed the network",
}
_PATIENCE_S = 60.0


def _start(root: Path, **spec: object) -> RuntimeStart:
    runtime_id = new_id("runtime")
    whole = RuntimeSpec.model_validate({"backend": "harbor", "network": "none", "image": IMAGE, **spec})
    return RuntimeStart(runtime_id=runtime_id, owner="tests", spec=whole, folder=root / runtime_id, proxy_port=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(
    harbor_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[HarborRuntime]:
    """With a sandbox that lives meanwhile, and with it the bridge to Harbor."""
    runtime = HarborRuntime()
    handle = await runtime.start(_start(tmp_path_factory.mktemp("held")))
    yield runtime
    await handle.stop()


@pytest.mark.parametrize("check", checks(isolated=True), ids=lambda check: check.__name__)
async def test_harbors_docker(runtime: HarborRuntime, check: Check, tmp_path: Path) -> None:
    if why := _LEFT_OUT.get(check.__name__):
        pytest.skip(f"does not apply: {why}")
    await run_check(check, runtime, tmp_path, isolated=True, image=IMAGE)


async def test_a_policy_that_harbor_does_not_enforce_is_refused_in_its_words(
    harbor_environment: dict[str, str], tmp_path: Path
) -> None:
    runtime = HarborRuntime(Settings.from_environ().model_copy(update={"harbor_network": "policy"}))
    with pytest.raises(InvalidRequest, match="network_mode='no-network' is not supported"):
        await runtime.start(_start(tmp_path))
    assert not os.listdir(tmp_path)


async def test_what_an_environment_has_not_is_refused(runtime: HarborRuntime, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="closed the network"):
        await runtime.start(_start(tmp_path, network="full"))
    with pytest.raises(InvalidRequest, match=r"runtime\.python.* has none"):
        await runtime.start(_start(tmp_path, python="/opt/env"))
    handle = await runtime.start(_start(tmp_path))
    with pytest.raises(RuntimeUnavailable, match="checkpoints are not supported"):
        await handle.checkpoint()
    await handle.stop()
    assert not os.listdir(tmp_path)


async def test_a_dead_node_leaves_no_container(harbor_environment: dict[str, str], tmp_path: Path) -> None:
    node = _node(tmp_path)
    with node:
        assert _ours(tmp_path)
        node.kill()
    deadline = time.monotonic() + _PATIENCE_S
    while _ours(tmp_path):
        assert time.monotonic() < deadline, "the bridge of a dead node did not stop its environments"
        time.sleep(0.2)


async def test_what_a_dead_bridge_leaves_is_reaped(runtime: HarborRuntime, tmp_path: Path) -> None:
    node = _node(tmp_path)
    with node:
        node.send_signal(signal.SIGSTOP)
        (bridge,) = _bridges(node.pid)
        os.kill(bridge, signal.SIGKILL)
        node.kill()
    assert await runtime.reap("someone-else", tmp_path) == 0
    assert len(_ours(tmp_path)) == 1
    assert await runtime.reap("tests", tmp_path) == 1
    assert (os.listdir(tmp_path), _ours(tmp_path)) == ([], [])


async def test_a_sandbox_whose_bridge_has_died_fails_and_can_be_stopped(
    harbor_environment: dict[str, str], tmp_path: Path
) -> None:
    before = _bridges(os.getpid())
    handle = await HarborRuntime().start(_start(tmp_path))
    (bridge,) = _bridges(os.getpid()) - before
    os.kill(bridge, signal.SIGKILL)
    with pytest.raises(RuntimeFailed, match=r"gone|bridge"):
        await handle.exec("true")
    assert len(_ours(tmp_path)) == 1
    await handle.stop()
    assert (os.listdir(tmp_path), _ours(tmp_path)) == ([], [])


async def test_a_session_runs_in_harbors_docker(harbor_environment: dict[str, str], tmp_path: Path) -> None:
    up = UpProcess(tmp_path, env=harbor_environment)
    try:
        (result,) = await run(up, task("harbor", "python3 agent.py"))
    finally:
        up.close()
    assert (result.outcome, result.reward, result.failure) == ("completed", 1.0, None)
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert [certificate.context for certificate in trace.certificates] == ["first", "exact", "exact"]


def _node(root: Path) -> subprocess.Popen[str]:
    """Another process, with one sandbox."""
    program = textwrap.dedent("""
        import asyncio, sys
        from pathlib import Path
        from gangline.domain.sandbox import RuntimeStart
        from gangline.domain.task import RuntimeSpec
        from gangline.interop.harbor.runtime.runtime import HarborRuntime

        async def main(root, image, name):
            spec = RuntimeSpec(backend="harbor", image=image, network="none")
            start = RuntimeStart(runtime_id=name, owner="tests", spec=spec, folder=Path(root, name))
            await HarborRuntime().start(start)
            print("ready", flush=True)
            await asyncio.sleep(1000)

        asyncio.run(main(*sys.argv[1:]))
    """)
    argv = [sys.executable, "-c", program, str(root), IMAGE, new_id("runtime")]
    node = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    assert node.stdout.readline() == "ready\n"
    return node


def _ours(root: Path) -> list[str]:
    """Containers of the sandboxes whose folders are there."""
    return [name for name in containers() if any(folder in name for folder in os.listdir(root))]


def _bridges(pid: int) -> set[int]:
    """Bridges that a process has started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = {int(child) for file in children for child in file.read_text().split()}
    return {
        child
        for child in found
        if b"harbor/runtime/in_sandbox/bridge.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    }
