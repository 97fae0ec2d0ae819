"""GPUs of a session's own, in containers of real engines. No machine of the tests has one: devices stand in for them.

For podman these are devices of the Container Device Interface, as NVIDIA's are, from a specification of the test's own.
Docker before 25 does not read those, so it gets devices by their paths.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from containers.engines import IMAGE
from containers.test_container_images import OWNER
from containers.test_container_sessions import run, task
from gangline.domain.errors import RuntimeFailed, RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.containers import gpus
from gangline.settings.plugins import make_runtime
from support.service.cli_process import UpProcess

SPECIFICATIONS = Path("/var/run/cdi")
USES = (
    "import glob, json, pathlib, time; "
    "began = time.time(); time.sleep({s}); "
    "seen = sorted(glob.glob('/dev/gpu*')); "
    "pathlib.Path('answer.txt').write_text(json.dumps([seen, began, time.time()]))"
)
GRADER = """
import json, pathlib
gpus, began, ended = json.loads(pathlib.Path("answer.txt").read_text())
pathlib.Path("reward.json").write_text(json.dumps({"reward": 1, "gpus": gpus, "began": began, "ended": ended}))
"""
DEVICES = {"/dev/gpu0": "/dev/zero", "/dev/gpu1": "/dev/full"}


@pytest.fixture(autouse=True)
def machine(container_runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """One with two GPUs."""
    names = [f"{there}:{path}" for path, there in DEVICES.items()]
    file = SPECIFICATIONS / f"{new_id('gangline')}.json"
    if container_runtime == "podman" and os.geteuid() == 0:  # who may write specifications
        names = [f"gangline.test/gpu={number}" for number in range(len(DEVICES))]
        devices = [
            {"name": str(number), "containerEdits": {"deviceNodes": [{"path": path, "hostPath": there}]}}
            for number, (path, there) in enumerate(DEVICES.items())
        ]
        SPECIFICATIONS.mkdir(exist_ok=True)
        file.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "gangline.test/gpu", "devices": devices}))
    monkeypatch.setenv("GANGLINE_GPUS", shlex.join(names))
    yield
    file.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
async def _nothing_stays(container_runtime: str, tmp_path: Path):
    yield
    await make_runtime(container_runtime).reap(OWNER, tmp_path)


async def started(name: str, root: Path, number: int, sharing: str | None = None) -> Sandbox:
    spec = RuntimeSpec.model_validate({"backend": name, "image": IMAGE, "network": "none", "gpus": number})
    runtime_id = new_id("runtime")
    folder = root / runtime_id
    start = RuntimeStart(runtime_id=runtime_id, owner=OWNER, spec=spec, folder=folder, sharing=sharing)
    return await make_runtime(name).start(start)


async def seen(handle: Sandbox) -> list[str]:
    return (await handle.exec("ls -d /dev/gpu* 2>/dev/null; true")).stdout.decode().split()


async def test_sandboxes_have_gpus_of_their_own_and_those_of_a_session_the_same(
    container_runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_PATIENCE_S", 0.5)
    agent = await started(container_runtime, tmp_path, 1, "s.1")
    grader = await started(container_runtime, tmp_path, 1, "s.1")
    other = await started(container_runtime, tmp_path, 1, "s.2")
    assert await seen(agent) == await seen(grader) == ["/dev/gpu0"]
    assert await seen(other) == ["/dev/gpu1"]
    assert (await agent.exec("head -c 4 /dev/gpu0 | od -An -tx1")).stdout.decode().split() == ["00"] * 4
    await agent.kill()
    assert await seen(agent) == ["/dev/gpu0"], "in its next life too"
    with pytest.raises(RuntimeFailed, match="2 of this machine's 2 are still taken by other sandboxes"):
        await started(container_runtime, tmp_path, 1)
    await agent.stop()
    with pytest.raises(RuntimeFailed, match="are still taken"):
        await started(container_runtime, tmp_path, 1)
    await grader.stop()
    await other.stop()
    both = await started(container_runtime, tmp_path, 2)
    assert await seen(both) == ["/dev/gpu0", "/dev/gpu1"]
    await both.stop()
    with pytest.raises(RuntimeUnavailable, match="3 GPUs are asked for, and GANGLINE_GPUS names 2"):
        await started(container_runtime, tmp_path, 3)
    none = await started(container_runtime, tmp_path, 0)
    assert await seen(none) == []
    await none.stop()


async def test_sessions_wait_for_gpus_and_no_two_have_the_same_at_once(container_runtime: str, tmp_path: Path) -> None:
    command = f"python3 -c {shlex.quote(USES.format(s=1.5))}"
    request: dict[str, Any] = task(container_runtime, command, num_samples=5)
    request["agent"]["allow_no_model_call"] = True
    request["runtime"] |= {"gpus": 1, "prepare": []}
    request["evaluator"]["config"]["files"] = {"grade.py": GRADER}
    names = ("GANGLINE_DOCKER", "GANGLINE_GPUS")
    up = UpProcess(tmp_path, env={name: value for name, value in os.environ.items() if name in names})
    try:
        results = await run(up, request)
    finally:
        up.close()
    spans: list[tuple[str, float, float]] = []
    for result in results:
        assert result.outcome == "completed", result.failure
        (gpu,) = result.reward_details["gpus"]
        spans.append((gpu, result.reward_details["began"], result.reward_details["ended"]))
    for gpu in DEVICES:
        own = sorted((began, ended) for one, began, ended in spans if one == gpu)
        assert own, f"{gpu} was not used: {spans}"
        assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(own)), own
