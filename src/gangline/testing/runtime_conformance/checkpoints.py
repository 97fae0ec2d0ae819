"""Checkpoints of a sandbox's files: kept unchanged, forked, restored, released.

Runtimes without checkpoints report that in `limits()`, and refuse them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec

from gangline.domain.errors import NotFound, RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import Checkpoint, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.testing.runtime_conformance.bench import (
    NOT_SUPPORTED,
    Bench,
    Checks,
    daemon,
    is_held,
    promised,
    raises,
    refused,
    until_held,
    until_present,
)

CHECKS = Checks()

_TREE = """
mkdir -p tree/deep/er empty "$HOME/.config"
echo one > tree/one; echo two > tree/deep/two; echo three > tree/deep/er/three; echo conf > "$HOME/.config/tool"
chmod 640 tree/one; chmod 711 tree/deep; ln -s one tree/link; ln -s /etc/passwd tree/outside; mkfifo tree/pipe
ln tree/one tree/same; touch -d @1000000000 tree/deep/two; truncate -s 100000000 tree/hole; mkdir tree/gone
echo x > tree/gone/x
"""
_CHANGES = """
rm tree/one tree/link; rm -r tree/gone; mv tree/deep tree/moved; echo more >> tree/moved/two; mkdir tree/one
echo inside > tree/one/inside; rm -r empty; echo file > empty; chmod 600 tree/moved/er/three; echo new > new
rm "$HOME/.config/tool"; find . "$HOME" -exec touch -h -d @1000000001 {} +
"""


@asynccontextmanager
async def _with_tree(bench: Bench) -> AsyncGenerator[tuple[Sandbox, Checkpoint, bytes]]:
    """A sandbox, its checkpoint, and the checkpoint's listing. Raises: unittest.SkipTest if checkpoints are not
    supported.
    """
    sandbox = await bench.start()
    promised(sandbox, "checkpoints")
    made = await sandbox.exec(_TREE)
    assert made.ok, f"the tree was not made: {made}"
    listing = await _listing(sandbox)
    checkpoint = await sandbox.checkpoint("tree")
    yield sandbox, checkpoint, listing
    await bench.release(checkpoint)


async def _listing(sandbox: Sandbox) -> bytes:
    result = await sandbox.exec(
        "find . \"$HOME\" -printf '%y %m %s %P %l ' \\( -type f -printf '%T@\\n' -o -printf '\\n' \\) | sort; "
        'find . "$HOME" -type f -size -1000k | sort | xargs cat'
    )
    assert result.ok, f"the files were not listed: {result}"
    return result.stdout.replace(sandbox.workdir.encode(), b"").replace(sandbox.home.encode(), b"")


@CHECKS.add
async def a_runtime_without_checkpoints_says_so_and_refuses_them(bench: Bench) -> None:
    sandbox = await bench.start()
    if sandbox.limits().get("checkpoints") == NOT_SUPPORTED:
        with raises(RuntimeUnavailable):
            await sandbox.checkpoint()
        with raises(RuntimeUnavailable):
            await sandbox.reset()
        return
    checkpoint = await sandbox.checkpoint("first")
    facts = (checkpoint.name, checkpoint.number, checkpoint.runtime_id, checkpoint.runtime, checkpoint.owner)
    assert facts == ("first", 1, sandbox.runtime_id, bench.runtime.name, bench.owner), f"facts of a checkpoint: {facts}"
    await bench.release(checkpoint)


@CHECKS.add
async def a_checkpoint_changes_nothing_for_its_sandbox(bench: Bench) -> None:
    async with _with_tree(bench) as (sandbox, _checkpoint, listing):
        assert await _listing(sandbox) == listing
        assert (await sandbox.exec("touch mine && cat tree/same")).stdout == b"one\n"
        assert await sandbox.download("tree/deep/two") == b"two\n", "files are moved as before"
        await sandbox.upload("tree/deep/new", b"new")
        assert (await sandbox.exec("cat tree/deep/new; stat -c %U tree/deep/new .")).stdout.startswith(b"new")


@CHECKS.add
async def a_fork_has_the_files_of_its_checkpoint_and_no_later_ones(bench: Bench) -> None:
    async with _with_tree(bench) as (sandbox, checkpoint, listing):
        changed = await sandbox.exec(_CHANGES)
        assert changed.ok, f"files were not changed: {changed}"
        fork = await bench.start(base=checkpoint)
        assert await _listing(fork) == listing, "a fork has other files than its checkpoint"
        changed = await fork.exec(_CHANGES)
        assert changed.ok, f"a fork's user cannot change its files: {changed}"
        assert await _listing(fork) == await _listing(sandbox), "the same changes give other files in a fork"
        await fork.stop()


@CHECKS.add
async def forks_and_their_parent_see_nothing_of_each_other(bench: Bench) -> None:
    async with _with_tree(bench) as (sandbox, checkpoint, listing):
        forks = await asyncio.gather(*(bench.start(base=checkpoint) for _number in range(3)))
        everyone = (sandbox, *forks)
        await asyncio.gather(
            *(one.exec(f"echo {number} > mine; echo {number} >> tree/same") for number, one in enumerate(everyone))
        )
        for number, one in enumerate(everyone):
            seen = (await one.exec("cat mine; tail -n 1 tree/same")).stdout
            assert seen == b"%d\n%d\n" % (number, number), f"sandbox {number} sees {seen!r}"
        late = await bench.start(base=checkpoint)
        assert await _listing(late) == listing, "a checkpoint changed with its sandboxes"
        await asyncio.gather(*(one.stop() for one in (*forks, late)))


@CHECKS.add
async def a_reset_returns_to_a_checkpoint_or_to_the_beginning(bench: Bench) -> None:
    async with _with_tree(bench) as (sandbox, checkpoint, listing):
        assert (await sandbox.exec(_CHANGES)).ok
        changed = await _listing(sandbox)
        later = await sandbox.checkpoint()
        await sandbox.reset(checkpoint)
        assert await _listing(sandbox) == listing
        await sandbox.reset(later)
        assert await _listing(sandbox) == changed
        await sandbox.reset()
        assert (await sandbox.exec('ls -A . "$HOME"')).stdout.count(b"\n") <= 4, (
            "a reset sandbox is not as at its start"
        )
        with raises(NotFound):
            await sandbox.download("tree/same")
        await sandbox.upload("again", b"again")
        assert (await sandbox.exec("cat again")).stdout == b"again"
        await bench.release(later)


@CHECKS.add
async def a_reset_ends_every_process(bench: Bench) -> None:
    sandbox = await bench.start()
    promised(sandbox, "checkpoints")
    running = asyncio.create_task(sandbox.exec("touch ready; sleep 100000"))
    await until_present(sandbox, "ready")
    await sandbox.reset()
    assert (await running).exit_code is None, "a command outlived a reset"
    assert (await sandbox.exec("test ! -e ready")).ok


@CHECKS.add
async def processes_outlive_a_checkpoint_and_write_into_the_present_only(bench: Bench) -> None:
    sandbox = await bench.start()
    promised(sandbox, "checkpoints")
    await sandbox.exec("echo before > file")
    first = await sandbox.checkpoint()
    await sandbox.exec(daemon(prelude="exec 8>> file; "))
    await until_held(sandbox)
    for _number in range(2):  # the next one must not lack files of a released one
        await bench.release(await sandbox.checkpoint())
    second = await sandbox.checkpoint()
    assert await is_held(sandbox), "a checkpoint ended a process"
    await sandbox.exec("echo after >> file")
    for checkpoint in (first, second):
        fork = await bench.start(base=checkpoint)
        assert await fork.download("file") == b"before\n", f"{checkpoint.method}: a later write is in a checkpoint"
        await fork.stop()
    assert await sandbox.download("file") == b"before\nafter\n"
    await bench.release(first, second)


@CHECKS.add
async def checkpoints_outlive_kills_and_their_sandbox(bench: Bench) -> None:
    async with _with_tree(bench) as (sandbox, checkpoint, listing):
        await sandbox.kill()
        assert await _listing(sandbox) == listing, "files are gone after a kill"
        await sandbox.stop()
        fork = await bench.start(base=checkpoint)
        assert await _listing(fork) == listing
        second = await fork.checkpoint()
        await fork.stop()
        await bench.release(checkpoint)
        grandchild = await bench.start(base=second)
        assert await _listing(grandchild) == listing, "a checkpoint needs one that was released before it"
        await grandchild.kill()
        assert await _listing(grandchild) == listing
        await grandchild.stop()
        await bench.release(second)


@CHECKS.add
async def a_released_checkpoint_is_gone(bench: Bench) -> None:
    async with _with_tree(bench) as (sandbox, checkpoint, _listing_of_it):
        await bench.release(checkpoint)
        await bench.release(checkpoint)
        with raises(NotFound):
            await bench.start(base=checkpoint)
        with raises(NotFound):
            await sandbox.reset(checkpoint)
        assert (await sandbox.exec("cat tree/same")).stdout == b"one\n", "its sandbox goes on"
    await sandbox.stop()
    assert os.listdir(bench.root) == [], "files of a released checkpoint are left"


@CHECKS.add
async def a_reaper_removes_checkpoints_that_it_does_not_keep(bench: Bench) -> None:
    async with _with_tree(bench) as (sandbox, checkpoint, _listing_of_it):
        kept = await sandbox.checkpoint()
        await sandbox.stop()
        assert await bench.runtime.reap("someone-else", bench.root) == 0
        assert await bench.runtime.reap(bench.owner, bench.root, frozenset({kept.checkpoint_id})) == 1
        with raises(NotFound):
            await bench.start(base=checkpoint)
        await bench.release(kept)


@CHECKS.add
async def a_fork_needs_the_owner_and_the_specification_of_its_checkpoint(bench: Bench) -> None:
    async with _with_tree(bench) as (sandbox, checkpoint, _listing_of_it):
        with refused():
            await bench.start(base=checkpoint, env={"OTHER": "1"})
        foreign = msgspec.structs.replace(checkpoint, checkpoint_id=f"../{checkpoint.checkpoint_id}")
        with refused():
            await sandbox.reset(foreign)
        bench.owner, own = new_id("another"), bench.owner
        try:
            with refused():
                await bench.start(base=checkpoint)
        finally:
            bench.owner = own


@CHECKS.isolation
async def nothing_of_layers_can_be_reached_from_inside(bench: Bench) -> None:
    spec = RuntimeSpec(backend=bench.runtime.name, image=bench.image, workdir="/workspace")
    sandbox = await bench.start_of(new_id("runtime"), spec, (bench.root,))
    promised(sandbox, "checkpoints")
    await sandbox.exec("echo secret-of-parent > file")
    checkpoint = await sandbox.checkpoint()
    await sandbox.exec("echo secret-of-later > file")
    fork = await bench.start_of(new_id("runtime"), spec, (bench.root,), checkpoint)
    assert (await fork.exec("grep -rl secret-of-later /workspace /tmp /var /home 2>/dev/null")).stdout == b""
    seen = (await fork.exec(f"ls -A {bench.root} 2>/dev/null; grep -c overlay.*upper /proc/self/mountinfo")).stdout
    paths = [line for line in seen.splitlines() if line.startswith((b"checkpoint", b"runtime"))]
    assert not paths, f"a fork sees {paths}"
    for path in (checkpoint.folder, *(f"{bench.root}/{name}" for name in os.listdir(bench.root))):
        assert not (await fork.exec(["ls", path])).ok, f"a fork can list {path}"
    await fork.stop()
    await sandbox.stop()
    await bench.release(checkpoint)


@CHECKS.add
async def planted_links_devices_and_marks_do_not_mislead_a_checkpoint(bench: Bench) -> None:
    sandbox = await bench.start()
    promised(sandbox, "checkpoints")
    first = await sandbox.checkpoint()
    planting = """
import os
os.symlink("/etc/shadow", "shadow"); os.symlink("/", "root"); os.symlink("..", "up")
os.makedirs("opaque/below"); open("opaque/below/file", "w").write("kept")
for path, name in (("opaque", "user.overlay.opaque"), ("opaque", "trusted.overlay.opaque"),
                   ("opaque", "user.overlay.redirect"), ("opaque", "trusted.overlay.redirect")):
    try: os.setxattr(path, name, b"y")
    except OSError: pass
open("target", "w").write("kept")
try: os.mknod("device", 0o20666, 0)
except OSError: pass
import socket; s = socket.socket(socket.AF_UNIX); s.bind("socket")
os.mkdir("closed"); open("closed/file", "w").write("kept"); os.chmod("closed", 0)
"""
    planted = await sandbox.exec(["python3", "-c", planting])
    assert planted.ok, f"nothing was planted: {planted}"
    running = asyncio.create_task(sandbox.exec("touch ready; sleep 100000"))
    await until_present(sandbox, "ready")
    second = await sandbox.checkpoint()
    await sandbox.kill()
    await running
    third = await sandbox.checkpoint()
    for checkpoint in (second, third):
        fork = await bench.start(base=checkpoint)
        links = (await fork.exec("readlink shadow root up")).stdout
        assert links == b"/etc/shadow\n/\n..\n", f"{checkpoint.method}: links became {links!r}"
        kept = (await fork.exec("cat opaque/below/file target; chmod 700 closed; cat closed/file")).stdout
        assert kept == b"keptkeptkept", f"{checkpoint.method}: planted attributes changed files: {kept!r}"
        found = (await fork.exec("find . -type b -o -type c ! -name device")).stdout
        assert found == b"", f"{checkpoint.method}: devices were copied: {found!r}"
        await fork.stop()
    await bench.release(first, second, third)
