"""The foreman of a sandbox and its supervisors: they do not grow, and their death harms their own sandbox only."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gangline.domain.contracts import Runtime, RuntimeHandle, RuntimeStart
from gangline.domain.errors import RuntimeFailed, RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.task import RuntimeSpec
from gangline.runtimes.bubblewrap.runtime import SandboxRuntime
from gangline.runtimes.commands import execution, zygote
from gangline.runtimes.process import ProcessRuntime
from gangline.runtimes.shared.handle import ExecRequest, open_channel

NUM_ACTIONS = 1000
MAX_PRIVATE_BYTES = 3 << 20


@pytest.fixture(params=[SandboxRuntime, ProcessRuntime], ids=["sandbox", "process"])
async def runtime(request: pytest.FixtureRequest) -> Runtime:
    runtime: Runtime = request.param()
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    return runtime


async def start(runtime: Runtime, root: Path) -> tuple[RuntimeHandle, str]:
    """A sandbox, and its owner."""
    owner = new_id("foreman")
    spec = RuntimeSpec(network="none")
    return await runtime.start(RuntimeStart(runtime_id="r", owner=owner, spec=spec, folder=root / owner)), owner


def helpers(owner: str) -> set[int]:
    """Forks of the zygote that carry the owner's label."""
    found: set[int] = set()
    for folder in Path("/proc").iterdir():
        try:
            is_labelled = f"GANGLINE_RUNTIME={owner}/".encode() in (folder / "environ").read_bytes()
            if is_labelled and b"helpers.zygote" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found


async def foreman_of(owner: str) -> int:
    """The only fork that is left when the sandbox has begun and no command runs."""
    async with asyncio.timeout(30):
        while len(found := helpers(owner)) != 1:
            await asyncio.sleep(0.01)
    return found.pop()


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def zygote_pid() -> int:
    assert zygote._current is not None
    info = Path(f"/proc/self/fdinfo/{zygote._current.pid_fd}").read_text()
    (number,) = [line.split()[1] for line in info.splitlines() if line.startswith("Pid:")]
    return int(number)


@pytest.mark.timeout(300)
async def test_a_thousand_actions_leave_nothing_behind(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)

    async def act(number: int) -> None:
        for _ in range(number):
            assert (await handle.exec("(exit 0) & echo acted")).stdout == b"acted\n"

    try:
        await asyncio.gather(*(act(5) for _ in range(4)))
        foreman = await foreman_of(owner)
        places = [f"/proc/{pid}/fd" for pid in (os.getpid(), zygote_pid(), foreman)]
        before = [len(os.listdir(place)) for place in places]
        memory = [private_bytes(pid) for pid in (zygote_pid(), foreman)]
        await asyncio.gather(*(act(NUM_ACTIONS // 4) for _ in range(4)))
        assert await foreman_of(owner) == foreman
        async with asyncio.timeout(30):  # until the pipes of the last commands are closed
            while any(len(os.listdir(place)) > number for place, number in zip(places, before, strict=True)):
                await asyncio.sleep(0.01)
        grown = [private_bytes(pid) - one for pid, one in zip((zygote_pid(), foreman), memory, strict=True)]
        assert max(grown) < 256 << 10
        assert private_bytes(foreman) < MAX_PRIVATE_BYTES
    finally:
        await handle.stop()


async def test_a_killed_foreman_ends_its_own_sandbox_only(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)
    neighbour, _ = await start(runtime, tmp_path)
    try:
        spared = await neighbour.channel(["cat"])
        foreman = await foreman_of(owner)
        os.kill(foreman, signal.SIGKILL)
        while Path(f"/proc/{foreman}").exists():
            await asyncio.sleep(0.01)
        assert (await handle.exec("echo again")).stdout == b"again\n"
        assert helpers(owner) - {foreman}, "another foreman is there"
        assert (await neighbour.exec("echo here")).stdout == b"here\n"
        await spared.close()
    finally:
        await handle.stop()
        await neighbour.stop()


async def test_a_stopped_foreman_holds_no_caller_up(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, owner = await start(runtime, tmp_path)
    try:
        foreman = await foreman_of(owner)
        os.kill(foreman, signal.SIGSTOP)
        monkeypatch.setattr(execution, "_START_S", 0.5)
        with pytest.raises(RuntimeFailed, match="foreman did not take a command in time"):
            await handle.exec("true")
        monkeypatch.undo()
        assert (await handle.exec("echo again")).stdout == b"again\n"
        assert foreman not in helpers(owner), "the stopped one is gone"
    finally:
        await handle.stop()


async def test_a_killed_zygote_is_replaced_and_foremen_live_on(runtime: Runtime, tmp_path: Path) -> None:
    handle, owner = await start(runtime, tmp_path)
    before, old = helpers(owner), zygote_pid()
    os.kill(old, signal.SIGKILL)
    async with asyncio.timeout(30):  # reaped before anybody needs another
        while Path(f"/proc/{old}").exists():
            await asyncio.sleep(0.01)
    other, _ = await start(runtime, tmp_path)
    try:
        assert zygote_pid() != old
        assert (await handle.exec("echo still")).stdout == b"still\n"
        assert helpers(owner) == before
        assert (await other.exec("echo too")).stdout == b"too\n"
    finally:
        await handle.stop()
        await other.stop()


async def test_a_handle_without_channels_says_so() -> None:
    class Other:
        runtime_id = "r-1"

    with pytest.raises(RuntimeUnavailable, match="sandbox r-1 has no channels: its handles lack the method `channel`"):
        await open_channel(Other(), ExecRequest(command="true"))
