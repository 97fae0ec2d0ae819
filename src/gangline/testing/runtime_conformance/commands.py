"""A single command: its arguments, environment, folder and end."""

from __future__ import annotations

import os
import signal

from gangline.domain.sandbox import ExecResult
from gangline.testing.runtime_conformance.bench import Bench, Checks, refused

CHECKS = Checks()

_OF_THE_C_LIBRARY = 1 << 31 | 1 << 32
"""Signals 32 and 33: posix_spawn leaves them ignored, and no program can use them."""


def _told_once(result: ExecResult) -> bool:
    return [result.exit_code is not None, result.signal is not None, result.timed_out].count(True) == 1


@CHECKS.add
async def tells_exit_codes(bench: Bench) -> None:
    sandbox = await bench.start()
    for code in (0, 1, 7, 255):
        result = await sandbox.exec(f"exit {code}")
        assert result.exit_code == code
        assert _told_once(result)


@CHECKS.add
async def tells_signals_apart_from_exit_codes(bench: Bench) -> None:
    sandbox = await bench.start()
    for name, number in (("TERM", 15), ("KILL", 9), ("INT", 2), ("SEGV", 11), ("USR1", 10)):
        result = await sandbox.exec(f"kill -{name} $$")
        assert (result.exit_code, result.signal, result.timed_out) == (None, number, False), name
    assert (await sandbox.exec("exit 143")).exit_code == 143


@CHECKS.add
async def a_missing_program_is_127(bench: Bench) -> None:
    sandbox = await bench.start()
    result = await sandbox.exec(["no-such-program-at-all"])
    assert result.exit_code == 127
    assert b"no-such-program-at-all" in result.stderr


@CHECKS.add
async def what_cannot_be_run_is_126(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.upload("plain.txt", b"#!/bin/sh\necho ran\n", mode=0o644)
    result = await sandbox.exec(["./plain.txt"])
    assert result.exit_code == 126
    assert b"plain.txt" in result.stderr


@CHECKS.add
async def an_empty_command_is_refused(bench: Bench) -> None:
    sandbox = await bench.start()
    with refused():
        await sandbox.exec([])


@CHECKS.add
async def an_argument_list_meets_no_shell(bench: Bench) -> None:
    sandbox = await bench.start()
    assert (await sandbox.exec(["printf", "%s|", "a b", "$HOME", "'", "", "-n", "a\nb"])).stdout == (
        b"a b|$HOME|'||-n|a\nb|"
    )


@CHECKS.add
async def words_may_be_long_and_of_any_script(bench: Bench) -> None:
    sandbox = await bench.start()
    word = "né 漢字 🛷\n"
    assert (await sandbox.exec(["printf", "%s", word])).stdout.decode() == word
    assert (await sandbox.exec('printf "%s" "$WORD"', env={"WORD": word})).stdout.decode() == word
    assert (await sandbox.exec(["printf", "%s", "x" * 100_000])).stdout == b"x" * 100_000


@CHECKS.add
async def the_environment_is_clean(bench: Bench) -> None:
    os.environ["GANGLINE_CONFORMANCE_SECRET"] = "leaked"
    try:
        sandbox = await bench.start(env={"FROM_SPEC": "1", "BOTH": "spec"})
        lines = (await sandbox.exec("env", env={"FROM_CALL": "2", "BOTH": "call"})).stdout.decode().splitlines()
    finally:
        del os.environ["GANGLINE_CONFORMANCE_SECRET"]
    seen = dict(line.split("=", 1) for line in lines)
    assert "GANGLINE_CONFORMANCE_SECRET" not in seen
    assert (seen["FROM_SPEC"], seen["FROM_CALL"], seen["HOME"]) == ("1", "2", sandbox.home)
    assert seen["BOTH"] == "call", "what a call says is nearer than what the specification says"
    assert seen["LANG"] == "C.UTF-8"
    assert "FROM_CALL" not in (await sandbox.exec("env")).stdout.decode(), "a command's environment outlived it"


@CHECKS.add
async def starts_in_the_workdir_and_honours_cwd(bench: Bench) -> None:
    sandbox = await bench.start()
    assert (await sandbox.exec("pwd")).stdout.decode().strip() == sandbox.workdir
    await sandbox.upload("sub/file", b"x")
    assert (await sandbox.exec("pwd", cwd="sub")).stdout.decode().strip() == f"{sandbox.workdir}/sub"
    assert (await sandbox.exec("pwd", cwd=sandbox.home)).stdout.decode().strip() == sandbox.home


@CHECKS.add
async def a_missing_cwd_is_told(bench: Bench) -> None:
    sandbox = await bench.start()
    result = await sandbox.exec("echo ran", cwd="no-such-folder")
    assert (result.exit_code in (126, 127), result.stdout) == (True, b""), result
    assert b"no-such-folder" in result.stderr


@CHECKS.add
async def signals_are_at_their_defaults(bench: Bench) -> None:
    """Also if the node ignores some, as `nohup` and a shell's `&` make it do."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        sandbox = await bench.start()
        seen = await sandbox.exec(["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"])
    finally:
        signal.signal(signal.SIGHUP, before)
    blocked, ignored = (int(line.split()[1], 16) for line in seen.stdout.splitlines())
    assert (blocked, ignored & ~_OF_THE_C_LIBRARY) == (0, 0), f"blocked {blocked:x}, ignored {ignored:x}"


@CHECKS.add
async def no_descriptor_but_the_streams_is_inherited(bench: Bench) -> None:
    sandbox = await bench.start()
    seen = await sandbox.exec(["ls", "/proc/self/fd"])
    assert seen.stdout.split() == [b"0", b"1", b"2", b"3"], "3 is the folder that ls reads"


@CHECKS.add
async def a_command_has_no_terminal(bench: Bench) -> None:
    sandbox = await bench.start()
    assert (await sandbox.exec("test -t 0 || test -t 1 || test -t 2 || : < /dev/tty")).exit_code != 0
