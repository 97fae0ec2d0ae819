"""An action server in a sandbox: its shell, interpreter and files, through a channel of the runtime."""

from __future__ import annotations

import asyncio

from gangline.agents.tools.action_server import ActionServer
from gangline.domain.errors import ActionRefused, ActionServerFailed
from gangline.testing.runtime_conformance.bench import Bench, Checks, is_held, raises, until_held

CHECKS = Checks()

_PATIENCE_S = 60.0
_NUM_ACTIONS = 1000
_FOOTPRINT = """
import os
def stat(pid):
    try: return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    except OSError: return [None, None]
def below(pid):
    return [pid] + [each for other, parent in parents.items() if parent == pid for each in below(other)]
parents = {pid: stat(pid)[1] for pid in os.listdir("/proc") if pid.isdigit() and stat(pid)[0] != "Z"}
server = str(os.getppid())
anonymous = next(line.split()[1] for line in open(f"/proc/{server}/status") if line.startswith("RssAnon"))
print(len(os.listdir(f"/proc/{server}/fd")), len(below(server)), anonymous)
"""
"""Descriptors of the server, which is the interpreter's parent, the processes below it, and its memory in kB."""
_MAX_GROWTH_KB = 2048


async def _said(server: ActionServer, command: str) -> str:
    result = await server.shell.run(command, timeout_s=_PATIENCE_S)
    assert result.state == "ended", result
    return result.output.text


@CHECKS.add
async def a_shell_keeps_its_folder_variables_and_jobs(bench: Bench) -> None:
    sandbox = await bench.start(env={"FROM_SPEC": "1"})
    async with await ActionServer.start(sandbox, env={"FROM_CALL": "2"}) as server:
        assert await _said(server, "pwd; echo $FROM_SPEC$FROM_CALL $HOME") == f"{sandbox.workdir}\n12 {sandbox.home}\n"
        await _said(server, "mkdir sub; cd sub; X=5; sleep 100000 &")
        assert (await _said(server, "pwd; echo $X; jobs")).startswith(f"{sandbox.workdir}/sub\n5\n[1]")
        failed = await server.shell.run("echo out; echo err >&2; exit 3", timeout_s=_PATIENCE_S)
        assert (failed.output.text, failed.exit_code, failed.is_new) == ("out\nerr\n", 3, True)
        assert await _said(server, "echo $X; pwd") == f"\n{sandbox.workdir}\n"


@CHECKS.add
async def a_command_that_goes_on_can_be_interrupted(bench: Bench) -> None:
    async with await ActionServer.start(await bench.start()) as server:
        running = await server.shell.run("echo begun; sleep 100000", timeout_s=0.5)
        assert (running.state, running.output.text, running.foreground) == ("running", "begun\n", ["sleep 100000"])
        ended = await server.shell.interrupt(timeout_s=_PATIENCE_S)
        assert (ended.state, ended.exit_code) == ("ended", 130)
        assert await _said(server, "echo usable") == "usable\n"


@CHECKS.add
async def a_program_that_waits_for_input_gets_it(bench: Bench) -> None:
    async with await ActionServer.start(await bench.start()) as server:
        waiting = await server.shell.run("printf 'name? '; head -n 1 | tr a-z A-Z", timeout_s=_PATIENCE_S)
        assert (waiting.state, waiting.output.text) == ("waiting", "name? ")
        result = await server.shell.send_keys("gus\n", timeout_s=_PATIENCE_S)
        while result.state in ("running", "waiting"):
            result = await server.shell.wait(timeout_s=_PATIENCE_S)
        assert (result.exit_code, result.output.text) == (0, "gus\nGUS\n")


@CHECKS.add
async def an_interpreter_keeps_its_names(bench: Bench) -> None:
    async with await ActionServer.start(await bench.start()) as server:
        await server.python.run("x = 41\nimport subprocess", timeout_s=_PATIENCE_S)
        cell = await server.python.run("subprocess.run(['echo', 'hi'])\nx + 1", timeout_s=_PATIENCE_S)
        assert (cell.result, cell.output.text, cell.traceback) == ("42", "hi\n", None)
        late = await server.python.run("while True: pass", timeout_s=0.5)
        assert (late.state, late.is_interrupted) == ("ended", True)
        died = await server.python.run("import os; x and os._exit(3)", timeout_s=_PATIENCE_S)
        assert (died.state, died.exit_code) == ("died", 3)
        assert (await server.python.run("1 + 1", timeout_s=_PATIENCE_S)).is_new


@CHECKS.add
async def files_are_the_agents_own(bench: Bench) -> None:
    sandbox = await bench.start()
    async with await ActionServer.start(sandbox) as server:
        await server.files.write("sub/a.txt", "one\ntwo\n")
        assert await sandbox.download("sub/a.txt") == b"one\ntwo\n"
        await sandbox.upload("b.txt", b"three\n")
        await server.files.replace("b.txt", old="three", new="3")
        assert (await server.files.view("b.txt")).lines == ["3"]
        assert [match.path for match in (await server.files.search("tw")).matches] == ["./sub/a.txt"]
        with raises(ActionRefused):
            await server.files.view("missing")
        assert await _said(server, "stat -c %u sub/a.txt") == (await sandbox.exec("id -u")).stdout.decode()


@CHECKS.add
async def nothing_of_an_action_server_lies_on_the_disk(bench: Bench) -> None:
    sandbox = await bench.start()
    before = (await sandbox.exec(["find", sandbox.workdir, sandbox.home])).stdout
    async with await ActionServer.start(sandbox) as server:
        await _said(server, "true")
        await server.files.tree()
        during = await sandbox.exec(["find", sandbox.workdir, sandbox.home])
    assert during.stdout == before
    assert (await sandbox.exec(["find", sandbox.workdir, sandbox.home])).stdout == before


@CHECKS.add
async def an_action_server_ends_with_its_channel_and_with_kill(bench: Bench) -> None:
    sandbox = await bench.start()
    command = "exec 9> lock; flock 9; touch lock.held; sleep 100000"
    server = await ActionServer.start(sandbox)
    await server.shell.run(f"({command}) &", timeout_s=_PATIENCE_S)
    await until_held(sandbox)
    await server.close()
    assert not await is_held(sandbox), "a process of a closed action server is alive"
    server = await ActionServer.start(sandbox)
    await sandbox.kill()
    with raises(ActionServerFailed):
        await server.shell.run("true", timeout_s=_PATIENCE_S)
    await server.close()


@CHECKS.add
async def two_action_servers_of_a_sandbox_are_apart(bench: Bench) -> None:
    sandbox = await bench.start()
    async with await ActionServer.start(sandbox) as one, await ActionServer.start(sandbox) as other:
        await asyncio.gather(_said(one, "X=1"), _said(other, "X=2"))
        assert [await _said(one, "echo $X"), await _said(other, "echo $X")] == ["1\n", "2\n"]
        with raises(ActionServerFailed):
            await one.shell.run("kill -9 $PPID", timeout_s=_PATIENCE_S)
        assert await _said(other, "echo $X") == "2\n"


@CHECKS.add
async def a_thousand_actions_leave_no_growth(bench: Bench) -> None:
    sandbox = await bench.start()
    async with await ActionServer.start(sandbox) as server:
        await _act(server, 100)
        before = await _footprint(server)
        await _act(server, _NUM_ACTIONS)
        after = await _footprint(server)
    assert after[:2] == before[:2], f"descriptors or processes grew: {before} {after}"
    assert after[2] - before[2] <= _MAX_GROWTH_KB, f"the server grew by {after[2] - before[2]} kB"


async def _act(server: ActionServer, number: int) -> None:
    for n in range(0, number, 4):
        await _said(server, f"echo {n}; true &")
        await server.python.run(f"x = {n}", timeout_s=_PATIENCE_S)
        await server.files.write("a.txt", f"{n}\n")
        await server.files.view("a.txt")


async def _footprint(server: ActionServer) -> list[int]:
    await _said(server, "wait")
    cell = await server.python.run(_FOOTPRINT, timeout_s=_PATIENCE_S)
    assert cell.traceback is None, cell.traceback
    return [int(word) for word in cell.output.text.split()]
