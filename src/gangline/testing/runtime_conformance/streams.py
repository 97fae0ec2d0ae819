"""A command's input and output: complete, bounded, separate, and passed on as they arrive."""

from __future__ import annotations

import asyncio
import hashlib

from gangline.testing.runtime_conformance.bench import Bench, Checks, timed_out_beside, until_present

CHECKS = Checks()


@CHECKS.add
async def keeps_stdout_and_stderr_apart(bench: Bench) -> None:
    sandbox = await bench.start()
    result = await sandbox.exec("echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


@CHECKS.add
async def carries_any_bytes(bench: Bench) -> None:
    sandbox = await bench.start()
    every = bytes(range(256)) * 300
    assert (await sandbox.exec(["cat"], stdin=every)).stdout == every
    await sandbox.upload("bytes", every)
    assert (await sandbox.exec("cat bytes")).stdout == every
    assert await sandbox.download("bytes") == every


@CHECKS.add
async def large_input_arrives_whole(bench: Bench) -> None:
    sandbox = await bench.start()
    data = bytes(range(251)) * 40_000
    result = await sandbox.exec(["sha256sum"], stdin=data)
    assert result.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()


@CHECKS.add
async def input_that_nobody_reads_holds_nothing_up(bench: Bench) -> None:
    sandbox = await bench.start()
    assert (await sandbox.exec("echo over", stdin=b"x" * 5_000_000)).stdout == b"over\n"


@CHECKS.add
async def without_stdin_a_command_reads_nothing(bench: Bench) -> None:
    sandbox = await bench.start()
    assert (await sandbox.exec("cat; echo done")).stdout == b"done\n"


@CHECKS.add
async def large_output_on_both_streams_arrives_whole(bench: Bench) -> None:
    sandbox = await bench.start()
    both = "i=0; while [ $i -lt 40 ]; do head -c 50000 /dev/zero; head -c 60000 /dev/zero >&2; i=$((i + 1)); done"
    result = await sandbox.exec(both, max_output_bytes=4 << 20)
    assert (len(result.stdout), len(result.stderr), result.truncated) == (2_000_000, 2_400_000, False)


@CHECKS.add
async def output_is_bounded_and_the_rest_drained(bench: Bench) -> None:
    sandbox = await bench.start()
    result = await sandbox.exec("echo front; head -c 5000000 /dev/zero; exit 4", max_output_bytes=1000)
    assert result.exit_code == 4
    assert len(result.stdout) == 1000
    assert result.stdout.startswith(b"front\n")
    assert result.truncated


@CHECKS.add
async def output_of_just_the_bound_is_whole(bench: Bench) -> None:
    sandbox = await bench.start()
    result = await sandbox.exec("printf 12345; printf abcde >&2", max_output_bytes=5)
    assert (result.stdout, result.stderr, result.truncated) == (b"12345", b"abcde", False)
    assert (await sandbox.exec("printf 1; printf abcdef >&2", max_output_bytes=5)).truncated


@CHECKS.add
async def output_streams_while_the_command_runs(bench: Bench) -> None:
    sandbox = await bench.start()
    first = asyncio.Event()
    pieces: list[bytes] = []

    def sink(_name: str, data: bytes) -> None:
        pieces.append(data)
        first.set()

    running = asyncio.create_task(
        sandbox.exec("echo one; while [ ! -e go ]; do sleep 0.02; done; echo two", on_output=sink)
    )
    await first.wait()
    assert not running.done()
    await sandbox.upload("go", b"")
    assert (await running).stdout == b"one\ntwo\n"
    assert b"".join(pieces) == b"one\ntwo\n"


@CHECKS.add
async def a_sink_hears_what_is_beyond_the_bound(bench: Bench) -> None:
    sandbox = await bench.start()
    heard: dict[str, bytes] = {"stdout": b"", "stderr": b""}

    def sink(name: str, data: bytes) -> None:
        heard[name] += data

    result = await sandbox.exec("seq 50000; seq 3 >&2", on_output=sink, max_output_bytes=10)
    assert heard["stdout"] == b"".join(b"%d\n" % number for number in range(1, 50001))
    assert heard["stderr"] == b"1\n2\n3\n"
    assert result.stdout == heard["stdout"][:10]


@CHECKS.add
async def what_was_said_before_a_timeout_or_a_kill_is_told(bench: Bench) -> None:
    sandbox = await bench.start()
    command = "echo out; echo err >&2; touch lock.held; sleep 100000"
    timed_out = await timed_out_beside(sandbox, command)
    assert (timed_out.stdout, timed_out.stderr) == (b"out\n", b"err\n")
    running = asyncio.create_task(sandbox.exec("echo out; touch said; sleep 100000"))
    await until_present(sandbox, "said")
    await sandbox.kill()
    assert (await running).stdout == b"out\n"
