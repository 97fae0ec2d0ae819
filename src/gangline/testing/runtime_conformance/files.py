"""Files in and out: complete, owned by the agent, bounded, and never through a link."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os

from gangline.domain.errors import CallerError, InvalidRequest, LimitExceeded, NotFound
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.testing.runtime_conformance.bench import Bench, Checks, raises, refused, until_present

CHECKS = Checks()

_FLIP = (
    "import os, shutil, sys\n"
    "os.mkdir('folder'); open('folder/file', 'w').close(); os.symlink(sys.argv[1], 'link')\n"
    "open('ready', 'w').close()\n"
    "while True:\n"
    "  for name in ('folder', 'link'):\n"
    "    try: os.rename(name, 'flip'); os.rename('flip', name)\n"
    "    except OSError: shutil.rmtree('flip', ignore_errors=True)  # an upload made it\n"
)
"""Alternates between a folder with a file and a link to another folder at the same name, forever."""


@CHECKS.add
async def home_and_workdir_are_writable_and_last(bench: Bench) -> None:
    sandbox = await bench.start()
    assert (await sandbox.exec("echo a > ~/kept && echo b > kept && mkdir -p d/e")).ok
    assert (await sandbox.exec("cat ~/kept kept")).stdout == b"a\nb\n"
    assert await sandbox.download(f"{sandbox.home}/kept") == b"a\n"


@CHECKS.isolation
async def folders_of_the_task_are_empty_writable_and_the_sessions_own(bench: Bench) -> None:
    spec = RuntimeSpec(
        backend=bench.runtime.name,
        image=bench.image,
        network="none",
        workdir="/workspace",
        folders=("/tests", "/logs/verifier"),
    )
    one, two = await asyncio.gather(*(bench.start_of(new_id("runtime"), spec) for _ in range(2)))
    assert (await one.exec("ls -A /tests /logs/verifier && touch /tests/made /logs/verifier/made")).ok
    assert (await two.exec("ls -A /tests /logs/verifier")).stdout.split() == [b"/logs/verifier:", b"/tests:"]
    await one.upload("/tests/deep/run.sh", b"#!/bin/sh\necho 1 >/logs/verifier/reward.txt\n", mode=0o755)
    assert (await one.exec(["/tests/deep/run.sh"])).ok
    await one.kill()
    assert await one.download("/logs/verifier/reward.txt") == b"1\n"


@CHECKS.add
async def files_move_between_the_folders_that_an_agent_may_write(bench: Bench) -> None:
    """With `mv`, which copies between file systems. Hard links need all folders to be on one file system."""
    sandbox = await bench.start()
    moved = "echo 1 > /tmp/$$ && mv /tmp/$$ ~/one && mv ~/one two && mkdir ~/d && mv two ~/d && mv ~/d . && cat d/two"
    result = await sandbox.exec(moved)
    assert result.stdout == b"1\n", result


@CHECKS.add
async def files_in_one_sandbox_are_not_in_another(bench: Bench) -> None:
    one, two = await asyncio.gather(bench.start(), bench.start())
    await one.upload("mine", b"1")
    assert (await two.exec("test -e mine || test -e ~/mine")).exit_code == 1


@CHECKS.add
async def uploads_make_parents_and_set_the_mode(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.upload("a/b/run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert (await sandbox.exec(["./a/b/run.sh"])).stdout == b"ran\n"
    await sandbox.upload("a/b/run.sh", b"new")
    assert await sandbox.download(f"{sandbox.workdir}/a/b/run.sh") == b"new"
    assert (await sandbox.exec("echo more >> a/b/run.sh && touch a/b/other")).ok, "the agent owns what is uploaded"
    await sandbox.upload("secret", b"", mode=0o600)
    assert (await sandbox.exec("stat -c %a secret a/b/run.sh")).stdout == b"600\n644\n"


@CHECKS.add
async def empty_and_large_files_travel(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.upload("empty", b"")
    assert await sandbox.download("empty") == b""
    data = bytes(range(253)) * 40_000
    await sandbox.upload("large", data)
    assert (await sandbox.exec(["sha256sum", "large"])).stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
    assert await sandbox.download("large") == data


@CHECKS.add
async def names_may_be_odd(bench: Bench) -> None:
    sandbox = await bench.start()
    for name in ("a b", "-rf", "'quoted' \"twice\"", "new\nline", "$(touch planted)", "漢字", "*", "x" * 200):
        await sandbox.upload(f"odd/{name}", name.encode())
        assert await sandbox.download(f"odd/{name}") == name.encode()
        assert (await sandbox.exec(["cat", f"odd/{name}"])).stdout == name.encode()
    assert (await sandbox.exec("test -e planted || test -e odd/planted")).exit_code == 1
    for name in ("x" * 300, "nul\0inside"):
        with refused():
            await sandbox.upload(name, b"")
        with refused():
            await sandbox.download(name)


@CHECKS.add
async def uploads_to_one_name_leave_one_of_them_whole(bench: Bench) -> None:
    sandbox = await bench.start()
    versions = [bytes([65 + number]) * 200_000 for number in range(8)]
    await asyncio.gather(*(sandbox.upload("same", data) for data in versions))
    assert await sandbox.download("same") in versions


@CHECKS.add
async def download_follows_no_link(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.exec(
        "ln -s /etc/passwd link; ln -s /etc folder; mkdir real; ln -s ../real real/loop; ln -s real/x dangling"
    )
    for path in ("link", "folder/passwd", "dangling"):
        with refused():
            await sandbox.download(path)


@CHECKS.add
async def upload_follows_no_link(bench: Bench) -> None:
    sandbox = await bench.start()
    outside = bench.root / "outside"
    outside.mkdir()
    try:
        await sandbox.exec(f"ln -s {outside} folder; ln -s {outside}/file link")
        with refused():
            await sandbox.upload("folder/planted", b"x")
        with contextlib.suppress(InvalidRequest):
            await sandbox.upload("link", b"x")
        assert not os.listdir(outside)
    finally:
        outside.rmdir()


@CHECKS.add
async def a_link_put_there_meanwhile_leads_nowhere(bench: Bench) -> None:
    """The agent may change a path between our check and our use of it."""
    sandbox = await bench.start()
    outside = bench.root / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    try:
        running = asyncio.create_task(sandbox.exec(["python3", "-c", _FLIP, str(outside)]))
        await until_present(sandbox, "ready")
        for number in range(60):
            with contextlib.suppress(CallerError):
                assert await sandbox.download("flip/file") != b"secret", "a file outside came out through a link"
            with contextlib.suppress(CallerError):
                await sandbox.upload(f"flip/{number}", b"planted")
        assert not running.done(), f"the links were not put there: {running.result()}"
        running.cancel()
        await asyncio.wait({running})
        assert os.listdir(outside) == ["file"], "an upload went outside through a link"
    finally:
        (outside / "file").unlink()
        outside.rmdir()


@CHECKS.add
async def paths_do_not_escape(bench: Bench) -> None:
    sandbox = await bench.start()
    for path in ("../x", "a/../../x", f"{sandbox.workdir}/../x", "", ".", "/"):
        with refused():
            await sandbox.download(path)
        with refused():
            await sandbox.upload(path, b"x")


@CHECKS.add
async def only_regular_files_come_out(bench: Bench) -> None:
    sandbox = await bench.start()
    listen = "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
    await sandbox.exec(["sh", "-c", 'mkfifo pipe; mkdir folder; python3 -c "$1"', "sh", listen])
    for path in ("pipe", "folder", "socket", "/dev/zero"):
        with refused():
            await sandbox.download(path)
    with raises(NotFound):
        await sandbox.download("absent")
    with raises(NotFound):
        await sandbox.download("folder/absent")


@CHECKS.add
async def an_upload_takes_the_place_of_what_has_its_name(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.exec("mkfifo pipe; mkdir folder")
    await _answered_either_way(sandbox, "pipe")
    with refused():
        await sandbox.upload("folder", b"x")
    await sandbox.upload("file", b"x")
    with refused():
        await sandbox.upload("file/below", b"x")


async def _answered_either_way(sandbox: Sandbox, path: str) -> None:
    """The agent's pipe is replaced or refused; the call does not wait for its reader."""
    with contextlib.suppress(CallerError):
        await sandbox.upload(path, b"new")
        assert await sandbox.download(path) == b"new"


@CHECKS.add
async def downloads_are_bounded(bench: Bench) -> None:
    sandbox = await bench.start()
    await sandbox.exec("truncate -s 1T huge || truncate -s 4G huge; printf 12345 > five")
    with raises(LimitExceeded):
        await sandbox.download("huge", max_bytes=1 << 20)
    with raises(LimitExceeded):
        await sandbox.download("five", max_bytes=4)
    assert await sandbox.download("five", max_bytes=5) == b"12345"


_LOCK = (
    "import os, sys\n"
    "os.makedirs('closed/in'); open('closed/in/file', 'w').close(); os.chmod('closed/in', 0); os.chmod('closed', 0)\n"
    "os.mkdir('kept'); os.symlink(sys.argv[1], 'kept/link'); os.symlink(sys.argv[1], 'link'); os.chmod('kept', 0o555)\n"
    "open('file', 'w').close(); os.mkfifo('pipe'); open(os.environ['HOME'] + '/.profile', 'w').close()\n"
    "os.mkdir('deep'); os.chdir('deep')\n"
    "for _ in range(2000): os.mkdir('d'); os.chdir('d')\n"
    "os.chdir(os.environ['WORKDIR'])\n"
    "os.chmod(os.environ['HOME'], 0); os.chmod('.', 0o555)\n"
)
"""Leaves files that the next user can neither remove nor write to by usual means."""


@CHECKS.add
async def what_an_agent_locked_is_cleared_from_outside(bench: Bench) -> None:
    sandbox = await bench.start()
    outside = bench.root / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"keep")
    try:
        locked = await sandbox.exec(["python3", "-c", _LOCK, str(outside)], env={"WORKDIR": sandbox.workdir})
        assert locked.ok, locked
        await sandbox.kill()
        for path in ("closed", "kept/link/below", "link", "file/below", "pipe", "deep", "absent/below", sandbox.home):
            await sandbox.clear(path)
        assert os.listdir(outside) == ["file"], "a link was followed"
        for path in ("closed/new", "kept/link/below", "link", "file/below", "pipe", f"{sandbox.home}/new"):
            await sandbox.upload(path, b"new")
            assert await sandbox.download(path) == b"new"
        left = await sandbox.exec(f"touch written kept/written ~/written && ls -A ~ && ls -d deep {outside}/file")
        assert left.stdout.split()[:2] == [b"new", b"written"], left
        assert b"deep" not in left.stdout
        await sandbox.clear(".")
        assert (await sandbox.exec("ls -A && touch written")).stdout == b""
        for path in ("../x", f"{sandbox.workdir}/../x", ""):
            with refused():
                await sandbox.clear(path)
    finally:
        (outside / "file").unlink()
        outside.rmdir()
