"""The shell tool: what persists, how commands end, what is said when they do not."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from gangline.agents.tools.action_server import ActionServer, ActionServerOptions, ShellTool
from gangline.agents.tools.answers import ShellResult
from gangline.domain.errors import ActionRefused, InvalidRequest
from support.node.tools import action_server

T = 20.0
SHORT_S = 2.0
"""Time limit of commands that have begun by then, on a busy machine too, and do not end."""


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncGenerator[ActionServer]:
    async with action_server(tmp_path) as server:
        yield server


@pytest.fixture
def shell(server: ActionServer) -> ShellTool:
    return server.shell


async def settled(shell: ShellTool, result: ShellResult) -> ShellResult:
    """The end of a command that was reported as going on."""
    while result.state in ("running", "waiting"):
        result = await shell.wait(timeout_s=T)
    return result


async def test_folder_variables_functions_and_options_persist(shell: ShellTool, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    first = await shell.run("cd sub; X=5; export Y=6; f() { echo f$X; }; alias hi='echo hi'", timeout_s=T)
    assert (first.state, first.exit_code, first.folder) == ("ended", 0, str(tmp_path / "sub"))
    result = await shell.run("f; env | grep ^Y=; pwd; hi", timeout_s=T)
    assert result.output.text == f"f5\nY=6\n{tmp_path}/sub\nhi\n"
    assert not result.is_new


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("false", b"", 1),
        ("(exit 42)", b"", 42),
        ("sh -c 'kill -9 $$'", b"Killed\n", 137),
        ("echo a; echo b >&2; echo c", b"a\nb\nc\n", 0),
        ("cat <<'EOF'\n$X `it's` \\n\nEOF\n", b"$X `it's` \\n\n", 0),
        ("for i in 1 2\ndo\n  echo $i\ndone", b"1\n2\n", 0),
        ("echo 'it'\\''s'", b"it's\n", 0),
        ("# only a comment", b"", 0),
        ("", b"", 0),
        ("echo a # comment", b"a\n", 0),
        ("printf '\\377\\0\\r\\n\\t\\033[0m'", b"\xff\0\r\n\t\x1b[0m", 0),
        ("echo -n no line end", b"no line end", 0),
        ("echo x | tr x y", b"y\n", 0),
        ("return 3", b"", 3),
        ("cat < /dev/null", b"", 0),
        ("exec 2>&1; echo both", b"both\n", 0),
        ("echo '!!' \"$-\" | cut -c1-2", b"!!\n", 0),
    ],
)
async def test_a_commands_output_and_exit_code_are_exact(
    shell: ShellTool, command: str, output: bytes, code: int
) -> None:
    result = await settled(shell, await shell.run(command, timeout_s=T))
    assert (result.state, result.output.head + result.output.tail, result.exit_code) == ("ended", output, code)
    assert (await shell.run("echo ok", timeout_s=T)).output.text == "ok\n"


async def test_a_syntax_error_is_the_commands_own(shell: ShellTool) -> None:
    await shell.run("X=1", timeout_s=T)
    for wrong in ("if", "echo 'open", "done", "f() {", "cat <<EOF"):
        result = await shell.run(wrong, timeout_s=T)
        assert result.state == "ended", wrong
    assert (await shell.run("echo $X", timeout_s=T)).output.text == "1\n"


async def test_marks_and_their_descriptors_are_out_of_a_commands_reach(shell: ShellTool) -> None:
    result = await shell.run("ls -1 /proc/self/fd; printf 'prompt\\0' >&62; echo 7 >&61", timeout_s=T)
    assert result.output.text.split("\n")[:4] == ["0", "1", "2", "3"], "3 is the folder that ls reads"
    assert result.exit_code == 1
    assert "ad file descriptor" in result.output.text


async def test_tracing_shows_commands_and_not_our_own(shell: ShellTool) -> None:
    await shell.run("set -x", timeout_s=T)
    assert (await shell.run("echo hi", timeout_s=T)).output.text.lstrip("+ ") == "echo hi\nhi\n"
    await shell.run("set +x", timeout_s=T)
    assert (await shell.run("echo hi", timeout_s=T)).output.text == "hi\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), ("exec true", 0), ("exec sh -c 'exit 4'", 4), ("set -e; false", 1), ("kill -9 $$", 137)],
)
async def test_a_shell_that_ends_is_followed_by_a_new_one(
    shell: ShellTool, tmp_path: Path, command: str, code: int
) -> None:
    await shell.run("X=1; cd /", timeout_s=T)
    result = await shell.run(command, timeout_s=T)
    assert (result.state, result.exit_code, result.is_new) == ("ended", code, True)
    assert result.status() == f"exit code {code}; the shell ended, and the next command starts in a new one"
    after = await shell.run("echo [$X]; pwd", timeout_s=T)
    assert (after.output.text, after.is_new) == (f"[]\n{tmp_path}\n", False)


async def test_a_shell_that_ends_between_commands_is_reported(shell: ShellTool) -> None:
    await shell.run("(sleep 0.2; kill -9 $$) &", timeout_s=T)
    async with asyncio.timeout(T):
        while not (await shell.run("sleep 0.05", timeout_s=T)).is_new:
            pass


async def test_out_of_time_a_command_goes_on_and_the_shell_stays_usable(shell: ShellTool) -> None:
    result = await shell.run("X=1; echo begun; sleep 1000", timeout_s=SHORT_S)
    assert (result.state, result.output.text, result.exit_code) == ("running", "begun\n", None)
    assert result.foreground == ["sleep 1000"]
    assert SHORT_S <= result.duration_s < T
    assert re.match(r"still running \(sleep 1000\) after \d", result.status())
    with pytest.raises(ActionRefused, match=r"a command has been running for .* s .sleep 1000.: wait") as refused:
        await shell.run("echo no", timeout_s=T)
    assert refused.value.reason == "running"
    again = await shell.wait(timeout_s=0.1)
    assert (again.state, again.output.text) == ("running", "")
    ended = await shell.interrupt(timeout_s=T)
    assert (ended.state, ended.exit_code) == ("ended", 130)
    assert (await shell.run("echo $X", timeout_s=T)).output.text == "1\n"


async def test_waiting_gets_the_rest_of_the_output(shell: ShellTool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    first = await shell.run("echo one; read _ < go; echo two", timeout_s=SHORT_S)
    assert (first.state, first.output.text) == ("running", "one\n")
    waiting = asyncio.create_task(shell.wait(timeout_s=T))
    await asyncio.to_thread((tmp_path / "go").write_text, "x\n")
    second = await waiting
    assert (second.state, second.output.text, second.exit_code) == ("ended", "two\n", 0)
    assert (await shell.wait(timeout_s=T)).state == "idle"


@pytest.mark.parametrize("ask", ["wait", "interrupt"])
async def test_the_end_of_a_command_that_nobody_waited_for_is_not_lost(
    shell: ShellTool, tmp_path: Path, ask: str
) -> None:
    command = "until [ -e go ]; do sleep 0.05; done; echo two; touch done; (exit 3)"
    first = await shell.run(command, timeout_s=0.4)
    assert first.state == "running"
    (tmp_path / "go").touch()
    while not (tmp_path / "done").exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    second = await getattr(shell, ask)(timeout_s=T)
    assert (second.state, second.output.text, second.exit_code) == ("ended", "two\n", 3)
    assert second.duration_s >= 0.4
    assert (await shell.wait(timeout_s=T)).state == "idle"
    assert (await shell.run("echo next", timeout_s=T)).exit_code == 0


async def test_a_loop_of_the_shells_own_can_be_interrupted(shell: ShellTool) -> None:
    await shell.run("X=1", timeout_s=T)
    assert (await shell.run("while :; do :; done", timeout_s=0.2)).state == "running"
    result = await shell.interrupt(timeout_s=T)
    assert (result.state, result.exit_code) == ("ended", 130)
    assert (await shell.run("echo $X", timeout_s=T)).output.text == "1\n"


async def test_a_command_is_interrupted_while_its_shell_starts(tmp_path: Path) -> None:
    tools, work = tmp_path / "bin", tmp_path / "work"
    for folder in (tools, work):
        folder.mkdir()
    slow = f"trap : INT; touch {tmp_path}/starts; sleep 1"
    (tools / "bash").write_text(f'#!/bin/sh\n[ "$1" != --norc ] || {{ {slow}; }}\nexec /bin/bash "$@"\n')
    (tools / "bash").chmod(0o755)
    async with action_server(work, env={"PATH": f"{tools}:{os.environ['PATH']}"}) as server:
        waiting = asyncio.create_task(server.shell.run("touch begun; sleep 1000", timeout_s=T))
        while not (tmp_path / "starts").exists():
            await asyncio.sleep(0.01)
        ended = await server.shell.interrupt(timeout_s=3)
        assert (ended.state, ended.exit_code) == ("ended", 130)
        assert (await waiting).state == "running"
        assert (await server.shell.run("ls", timeout_s=T)).output.text == ""


@pytest.mark.parametrize("try_", range(16))
async def test_a_command_that_its_shell_has_not_begun_is_interrupted(
    shell: ShellTool, tmp_path: Path, try_: int
) -> None:
    """Where the signal meets the shell is a matter of luck: before it looks for a command, or as it begins this one."""
    pid = int((await shell.run("echo $$", timeout_s=T)).output.text)
    os.kill(pid, signal.SIGSTOP)
    try:
        first = await shell.run("sleep 1000", timeout_s=0.1)
        interrupted = asyncio.create_task(shell.interrupt(timeout_s=T))
        await asyncio.sleep(0.09 + 0.005 * try_)  # around the look at whether it waits for input
    finally:
        os.kill(pid, signal.SIGCONT)
    assert first.state == "running"
    ended = await interrupted
    assert (ended.state, ended.exit_code) == ("ended", 130)
    for _ in range(2):
        assert (await shell.run("echo once >> runs", timeout_s=T)).state == "ended"
    assert (tmp_path / "runs").read_text() == "once\nonce\n"


async def test_a_program_that_ignores_interrupts_leaves_a_restart(shell: ShellTool) -> None:
    result = await shell.run("trap '' INT; echo begun; sleep 1000", timeout_s=SHORT_S)
    assert result.state == "running"
    assert (await shell.interrupt(timeout_s=0.2)).state == "running"
    await shell.restart()
    after = await shell.run("echo new; trap", timeout_s=T)
    assert (after.output.text, after.is_new) == ("new\n", True)


async def test_a_restart_ends_background_jobs(shell: ShellTool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    await shell.run("sleep 1000 > alive &", timeout_s=T)
    os.set_blocking(reader, True)
    await shell.restart()
    assert await asyncio.to_thread(os.read, reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize(
    ("command", "keys", "output"),
    [
        ("cat", "hello\n\x04", "hello\nhello\n"),
        ("read -p 'name? ' N; echo got $N", "bob\n", "bob\ngot bob\n"),
        ("python3 -c 'print(input())'", "né\n", "né\nné\n"),
        ("head -n 1 /dev/tty", "x\n", "x\nx\n"),
        ("stty -echo; read P; stty echo; echo $P", "secret\n", "secret\n"),
        ("stty -icanon -echo; dd bs=1 count=1 2>/dev/null; stty sane", "y", "y"),
    ],
)
async def test_a_program_that_waits_for_input_says_so_and_gets_it(
    shell: ShellTool, command: str, keys: str, output: str
) -> None:
    began_at = time.monotonic()
    result = await shell.run(command, timeout_s=60.0)
    assert (result.state, time.monotonic() - began_at < 50) == ("waiting", True)
    assert result.status().startswith("waiting for input")
    ended = await settled(shell, await shell.send_keys(keys, timeout_s=T))
    assert (ended.state, ended.output.text, ended.exit_code) == ("ended", output, 0)


async def test_a_program_that_reads_no_terminal_is_not_waiting(shell: ShellTool) -> None:
    result = await shell.run("sleep 0.5; sh -c 'sleep 0.3' | cat", timeout_s=T)
    assert (result.state, result.exit_code) == ("ended", 0)


async def test_ctrl_c_and_ctrl_z_work_as_keys(shell: ShellTool) -> None:
    await shell.run("cat", timeout_s=T)
    assert (await shell.send_keys("\x03", timeout_s=T)).exit_code == 130
    await shell.run("cat", timeout_s=T)
    stopped = await shell.send_keys("\x1a", timeout_s=T)
    assert (stopped.state, stopped.exit_code) == ("ended", 148)
    assert "Stopped" in (await shell.run("jobs", timeout_s=T)).output.text
    assert (await shell.run("fg", timeout_s=T)).state == "waiting"
    assert (await shell.send_keys("\x04", timeout_s=T)).exit_code == 0


async def test_keys_that_nobody_read_are_not_the_next_command(shell: ShellTool) -> None:
    await shell.run("sleep 1000", timeout_s=0.2)
    await shell.send_keys("echo typed ahead\n", timeout_s=0.2)
    await shell.interrupt(timeout_s=T)
    assert (await shell.run("echo next", timeout_s=T)).output.text == "next\n"


async def test_background_jobs_go_on_and_their_output_is_apart(shell: ShellTool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    begun = await shell.run("(read _ < go; echo from the job; touch done) &", timeout_s=T)
    assert (begun.state, begun.output.text) == ("ended", "")
    await asyncio.to_thread((tmp_path / "go").write_text, "x\n")
    while not (tmp_path / "done").exists():
        await asyncio.sleep(0.01)
    result = await shell.run("wait; echo own", timeout_s=T)
    assert (result.output.text, result.earlier.text) == ("own\n", "from the job\n")


async def test_huge_output_keeps_head_and_tail_and_is_drained(tmp_path: Path) -> None:
    async with action_server(tmp_path, ActionServerOptions(max_output_bytes=1000)) as server:
        result = await server.shell.run("seq 1 400000", timeout_s=60.0)
        whole = "".join(f"{n}\n" for n in range(1, 400_001)).encode()
        assert (result.output.head, result.output.tail) == (whole[:500], whole[-500:])
        assert result.output.omitted_bytes == len(whole) - 1000
        assert f"\n[{len(whole) - 1000} bytes omitted]\n" in result.output.text
        endless = await server.shell.run("yes", timeout_s=SHORT_S)
        assert (endless.state, endless.output.omitted_bytes > 1_000_000) == ("running", True)
        assert (await server.shell.interrupt(timeout_s=T)).exit_code == 130


async def test_long_commands_and_all_scripts_of_the_world(shell: ShellTool) -> None:
    text = "né 漢字 🛷 " * 50_000
    result = await shell.run(f"printf %s '{text}' | md5sum; printf %s 'né 漢字 🛷'", timeout_s=60.0)
    assert result.output.text.endswith("-\nné 漢字 🛷")
    raw = b"\xff\xfe".decode(errors="surrogateescape")
    assert (await shell.run(f"printf %s {raw}", timeout_s=T)).output.head == b"\xff\xfe"


async def test_what_no_command_can_hold_is_refused(shell: ShellTool) -> None:
    with pytest.raises(InvalidRequest, match="NUL"):
        await shell.run("echo \0", timeout_s=T)
    with pytest.raises(InvalidRequest, match="not a character"):
        await shell.run("echo \ud800", timeout_s=T)


async def test_the_terminals_size_can_be_set(shell: ShellTool) -> None:
    assert (await shell.run("stty size", timeout_s=T)).output.text == "50 200\n"
    await shell.resize(30, 100)
    assert (await shell.run("stty size", timeout_s=T)).output.text == "30 100\n"
    await shell.restart()
    assert (await shell.run("stty size", timeout_s=T)).output.text == "30 100\n"
    with pytest.raises(InvalidRequest, match="0 rows"):
        await shell.resize(0, 80)


async def test_a_terminal_that_a_program_spoiled_is_mended_for_the_next_command(shell: ShellTool) -> None:
    await shell.run("stty raw -echo", timeout_s=T)
    result = await shell.run("stty -a | grep -o -- '-\\?icanon\\|-\\?echo '", timeout_s=T)
    assert result.output.text.split() == ["icanon", "echo"]


async def test_a_second_request_takes_the_place_of_the_one_that_waits(shell: ShellTool) -> None:
    waiting = asyncio.create_task(shell.run("sleep 1000", timeout_s=T))
    await asyncio.sleep(0.1)
    assert (await shell.interrupt(timeout_s=T)).exit_code == 130
    assert (await waiting).state == "running"


async def test_no_history_is_written(shell: ShellTool, tmp_path: Path) -> None:
    await shell.run("echo secret; exit", timeout_s=T)
    assert list(tmp_path.iterdir()) == []


async def test_sh_does_where_there_is_no_bash(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "sleep", "cat", "python3", "ls"):
        (tools / name).symlink_to(os.path.realpath(f"/bin/{name}") if name != "python3" else "/usr/bin/python3")
    async with action_server(tmp_path, env={"PATH": str(tools)}) as server:
        shell = server.shell
        assert (await shell.run("X=1; cd /; echo $0", timeout_s=T)).output.text == "sh\n"
        assert (await shell.run("pwd; echo $X; (exit 3)", timeout_s=T)).output.text == "/\n1\n"
        assert (await shell.run("while :; do :; done", timeout_s=0.2)).state == "running"
        assert (await shell.interrupt(timeout_s=T)).state == "ended"
        assert (await shell.run("if", timeout_s=T)).state == "ended"
        assert (await shell.run("sleep 1000", timeout_s=0.2)).state == "running"
        assert (await shell.interrupt(timeout_s=T)).exit_code == 130
        assert (await shell.run("ls /proc/self/fd; exit 5", timeout_s=T)).exit_code == 5
        assert (await shell.run("cat", timeout_s=T)).state == "waiting"
