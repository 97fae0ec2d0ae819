"""Communication with a running command over its descriptor 3, and the grace period of a command."""

from __future__ import annotations

import asyncio
import os

from gangline.domain.errors import RuntimeFault
from gangline.domain.sandbox import Channel
from gangline.testing.runtime_conformance.bench import (
    Bench,
    Checks,
    daemon,
    is_held,
    raises,
    refused,
    until_held,
    until_present,
)

CHECKS = Checks()

_ECHO = "import os\nwhile piece := os.read(3, 1 << 16): os.write(3, piece.upper())\n"
_FLOOD = "import os\nwhile True: os.write(3, bytes(1 << 16))\n"


async def _heard(channel: Channel, num_bytes: int) -> bytes:
    heard = b""
    while len(heard) < num_bytes and (piece := await channel.read()):
        heard += piece
    return heard


@CHECKS.add
async def a_channel_carries_bytes_both_ways(bench: Bench) -> None:
    sandbox = await bench.start()
    channel = await sandbox.channel(["python3", "-c", _ECHO])
    for line in (b"one", b"two\n", bytes(range(256))):
        await channel.write(line)
        assert await _heard(channel, len(line)) == line.upper()
    await channel.close()


@CHECKS.add
async def a_channel_carries_much_at_once(bench: Bench) -> None:
    sandbox = await bench.start()
    channel = await sandbox.channel(["python3", "-c", _ECHO])
    data = os.urandom(3 << 20)
    written = asyncio.create_task(channel.write(data))
    assert await _heard(channel, len(data)) == data.upper()
    await written
    await channel.close()


@CHECKS.add
async def a_channel_reads_no_more_than_is_asked_for(bench: Bench) -> None:
    sandbox = await bench.start()
    channel = await sandbox.channel("printf 0123456789 >&3; sleep 100000")
    assert await channel.read(4) == b"0123"
    assert await channel.read(100) == b"456789"
    await channel.close()


@CHECKS.add
async def a_cancelled_read_loses_nothing(bench: Bench) -> None:
    sandbox = await bench.start()
    channel = await sandbox.channel("while [ ! -e go ]; do sleep 0.02; done; printf later >&3; sleep 100000")
    with raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await channel.read()
    await sandbox.upload("go", b"")
    assert await _heard(channel, 5) == b"later"
    await channel.close()


@CHECKS.add
async def a_channels_command_is_like_any_other(bench: Bench) -> None:
    sandbox = await bench.start(env={"FROM_SPEC": "1"})
    await sandbox.upload("sub/file", b"")
    channel = await sandbox.channel(
        'echo "$FROM_SPEC $FROM_CALL $PWD" >&3; ls /proc/self/fd; cat; echo err >&2; exit 7',
        cwd="sub",
        env={"FROM_CALL": "2"},
    )
    expected = f"1 2 {sandbox.workdir}/sub\n".encode()
    assert await _heard(channel, len(expected)) == expected
    result = await channel.ended()
    assert (result.exit_code, result.stderr, result.truncated) == (7, b"err\n", False)
    assert result.stdout.split() == [b"0", b"1", b"2", b"3", b"4"], "3 is the channel, 4 the folder that ls reads"
    assert await channel.read() == b"", "the channel ends with its command"
    await channel.close()


@CHECKS.add
async def a_channels_missing_program_is_127(bench: Bench) -> None:
    sandbox = await bench.start()
    channel = await sandbox.channel(["no-such-program-at-all"])
    assert (await channel.ended()).exit_code == 127
    assert await channel.read() == b""
    await channel.close()
    with refused():
        await sandbox.channel([])


@CHECKS.add
async def closing_a_channel_kills_the_whole_tree(bench: Bench) -> None:
    sandbox = await bench.start()
    channel = await sandbox.channel(daemon() + "; sleep 100000")
    await until_held(sandbox)
    await channel.close()
    assert not await is_held(sandbox), "a daemonised grandchild outlived its channel"
    assert (await channel.ended()).signal == 9
    assert await channel.read() == b""
    with raises(RuntimeFault):
        await channel.write(b"late")
    await channel.close()


@CHECKS.add
async def a_pending_read_ends_with_its_channel(bench: Bench) -> None:
    sandbox = await bench.start()
    channel = await sandbox.channel("sleep 100000")
    reading = asyncio.create_task(channel.read())
    await asyncio.sleep(0)
    await channel.close()
    assert await reading == b""


@CHECKS.add
async def channels_end_with_their_sandbox(bench: Bench) -> None:
    sandbox = await bench.start()
    killed = await sandbox.channel("sleep 100000")
    await sandbox.kill()
    assert (await killed.ended()).signal == 9
    assert await killed.read() == b""
    await killed.close()
    stopped = await sandbox.channel("sleep 100000")
    await sandbox.stop()
    assert await stopped.read() == b""
    await stopped.close()
    with raises(RuntimeFault):
        await sandbox.channel("true")


@CHECKS.add
async def channels_are_beside_each_other_and_commands(bench: Bench) -> None:
    sandbox = await bench.start()
    channels = await asyncio.gather(*(sandbox.channel(["python3", "-c", _ECHO]) for _ in range(4)))
    flood = await sandbox.channel(["python3", "-c", _FLOOD])  # it is never read
    for number, channel in enumerate(channels):
        await channel.write(f"line {number}".encode())
    assert (await sandbox.exec("echo beside")).stdout == b"beside\n"
    for number, channel in enumerate(channels):
        assert await _heard(channel, 6) == f"LINE {number}".encode()
    await asyncio.gather(*(channel.close() for channel in (*channels, flood)))


@CHECKS.add
async def a_writer_waits_for_a_reader(bench: Bench) -> None:
    sandbox = await bench.start()
    channel = await sandbox.channel("while [ ! -e go ]; do sleep 0.02; done; head -c 4194304 <&3 | wc -c")
    written = asyncio.create_task(channel.write(bytes(4 << 20)))
    assert not (await asyncio.wait({written}, timeout=0.2))[0], "4 MB were taken although nobody reads"
    await sandbox.upload("go", b"")
    await written
    assert (await channel.ended()).stdout.strip() == b"4194304"
    await channel.close()


@CHECKS.isolation
async def nothing_else_reaches_a_channel(bench: Bench) -> None:
    """It has no name: neither in the file system nor in the network's abstract namespace."""
    sandbox = await bench.start()
    channel = await sandbox.channel("touch ready; sleep 100000")
    await until_present(sandbox, "ready")
    named = await sandbox.exec("grep -h '[/@]' /proc/net/unix; find / -xdev -type s 2>/dev/null")
    assert named.stdout == b"", named.stdout
    await channel.close()


# -- grace -------------------------------------------------------------------------------------------------------

_FLUSHES = """trap 'echo flushed > flushed; exit 0' TERM; touch ready; while :; do sleep 0.02; done"""


@CHECKS.add
async def a_grace_lets_programs_write_what_they_have(bench: Bench) -> None:
    sandbox = await bench.start()
    result = await sandbox.exec(f"({_FLUSHES}) & wait", timeout_s=3.0, grace_s=30.0)
    assert (result.timed_out, result.exit_code, result.signal) == (True, None, None)
    assert await sandbox.download("flushed") == b"flushed\n"


@CHECKS.add
async def a_cancelled_command_has_its_grace_too(bench: Bench) -> None:
    sandbox = await bench.start()
    running = asyncio.create_task(sandbox.exec(_FLUSHES, grace_s=30.0))
    await until_present(sandbox, "ready")
    running.cancel()
    with raises(asyncio.CancelledError):
        await running
    assert await sandbox.download("flushed") == b"flushed\n"


@CHECKS.add
async def a_grace_ends(bench: Bench) -> None:
    """For the whole process tree, including processes that ignore SIGTERM."""
    sandbox = await bench.start()
    deaf = "trap '' TERM; "
    result = await sandbox.exec(f"{deaf}{daemon(prelude=deaf)}; sleep 100000", timeout_s=3.0, grace_s=0.3)
    assert result.timed_out
    assert not await is_held(sandbox), "a process that ignores signals outlived the grace"


@CHECKS.add
async def a_kill_with_a_grace_lets_all_commands_write_what_they_have(bench: Bench) -> None:
    sandbox = await bench.start()
    running = asyncio.create_task(sandbox.exec(_FLUSHES))
    other = "trap 'echo flushed > also; exit 0' TERM; echo ready >&3; while :; do sleep 0.02; done"
    channel = await sandbox.channel(other)
    assert await channel.read() == b"ready\n"
    await until_present(sandbox, "ready")
    await sandbox.kill(grace_s=30.0)
    assert (await running).exit_code is None
    assert [await sandbox.download(name) for name in ("flushed", "also")] == [b"flushed\n"] * 2
    await channel.close()
    assert (await sandbox.exec("echo again")).stdout == b"again\n"


@CHECKS.add
async def kill_waits_for_no_grace(bench: Bench) -> None:
    sandbox = await bench.start()
    running = asyncio.create_task(sandbox.exec("trap '' TERM; touch ready; sleep 100000", grace_s=3600.0))
    await until_present(sandbox, "ready")
    running.cancel()
    await asyncio.sleep(0)
    await sandbox.kill()
    await asyncio.wait({running})
