"""Files that an agent leaves for a checkpoint of its sandbox, and for the forks and resets that come of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import unittest
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise
from pathlib import Path

from gangline.domain.errors import CallerError, GanglineError
from gangline.domain.sandbox import Checkpoint, Sandbox
from gangline.settings.machine import Settings
from gangline.testing.runtime_conformance.bench import until_present
from support.hostility.attack import Assault, Attacks
from support.hostility.grounds import Grounds
from support.hostility.kit import Given, files_below, found

ATTACKS = Attacks("checkpoints and forks")

_PATIENCE_S = 15.0
_MOST_BYTES = 4 << 20
_SWAPS = 12
_LONG = "import os; [(os.mkdir('d' * 200), os.chdir('d' * 200)) for _ in range(40)]; "


@contextlib.asynccontextmanager
async def _planted(grounds: Grounds, shell: str) -> AsyncGenerator[Sandbox]:
    """A sandbox in which the agent has run these lines. $SECRET is a file of the node's, $FOLDER its folder.

    Raises: unittest.SkipTest where there are no checkpoints.
    """
    async with grounds.sandbox() as handle:
        grounds.promised(handle, "checkpoints")
        env = {"SECRET": f"{grounds.host['folder']}/secret", "FOLDER": grounds.host["folder"]}
        result = await handle.exec(shell, env=env)
        assert result.ok, result
        yield handle


@contextlib.asynccontextmanager
async def _kept(grounds: Grounds, handle: Sandbox) -> AsyncGenerator[Checkpoint]:
    checkpoint = await handle.checkpoint()
    try:
        yield checkpoint
    finally:
        await grounds.bench.release(checkpoint)


@contextlib.asynccontextmanager
async def _beside(handle: Sandbox, shell: str = "touch ready; sleep 100000") -> AsyncGenerator[None]:
    """A process that lives meanwhile, so that files are copied rather than moved. It makes the file `ready`."""
    running = asyncio.create_task(handle.exec(shell))
    try:
        await until_present(handle, "ready")
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})


def _bytes_in(checkpoint: Checkpoint) -> int:
    """On the disk, as the host sees them."""
    files = (path for path in Path(checkpoint.folder).rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.lstat().st_blocks * 512 for path in files)


def _secret_in(grounds: Grounds, checkpoint: Checkpoint) -> str | None:
    for path in Path(checkpoint.folder).rglob("*"):
        if stat.S_ISREG(path.lstat().st_mode) and grounds.secret.encode() in path.read_bytes()[:_MOST_BYTES]:
            return f"{path} has the secret"
    return None


# -- what leads elsewhere ----------------------------------------------------------------------------------------

_LINKS = {
    "a_link_to_a_file_of_the_host_is_copied": "ln -s $SECRET bait",
    "a_linked_folder_of_the_host_is_copied": "ln -s $FOLDER bait",
}


def _is_copied(shell: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        async with _planted(grounds, shell) as handle, _beside(handle), _kept(grounds, handle) as checkpoint:
            return _secret_in(grounds, checkpoint)

    return run


for _name, _shell in _LINKS.items():
    ATTACKS.add(_name, _is_copied(_shell), needs_isolation=False)


@ATTACKS.around(needs_isolation=False)
async def a_folder_that_turns_into_a_link_is_copied(grounds: Grounds) -> str | None:
    swap = (
        "mkdir real; touch real/secret; ln -s $FOLDER link; touch ready; while :; do mv -T real flip; mv -T flip real; "
        "mv -T link flip; mv -T flip link; done"
    ).replace("$FOLDER", grounds.host["folder"])
    async with _planted(grounds, "true") as handle, _beside(handle, swap):
        for _ in range(_SWAPS):
            with contextlib.suppress(GanglineError):
                async with _kept(grounds, handle) as checkpoint:
                    if evidence := _secret_in(grounds, checkpoint):
                        return evidence
    return None


@ATTACKS.around(needs_isolation=False)
async def a_link_in_a_fork_comes_out(grounds: Grounds) -> str | None:
    async with _planted(grounds, "mkdir a; ln -s $FOLDER a/bait") as handle, _kept(grounds, handle) as checkpoint:
        fork = await grounds.bench.start(base=checkpoint)
        try:
            with contextlib.suppress(CallerError, OSError):
                data = await fork.download("a/bait/secret")
                return "the secret came out" if grounds.secret.encode() in data else None
        finally:
            await fork.stop()
    return None


@ATTACKS.around(needs_isolation=False)
async def an_upload_into_a_fork_goes_through_a_link(grounds: Grounds) -> str | None:
    planted = Path(grounds.host["folder"], "planted-in-a-fork")
    async with _planted(grounds, "mkdir a; ln -s $FOLDER a/bait") as handle, _kept(grounds, handle) as checkpoint:
        fork = await grounds.bench.start(base=checkpoint)
        try:
            # A careless copy has made a folder of the link.
            await fork.exec('rm -rf a/bait; ln -s "$FOLDER" a/bait', env={"FOLDER": grounds.host["folder"]})
            with contextlib.suppress(CallerError, OSError):
                await fork.upload(f"a/bait/{planted.name}", b"planted")
        finally:
            await fork.stop()
    if planted.name not in os.listdir(planted.parent):
        return None
    os.unlink(planted)
    return f"{planted} was written"


# -- what holds up, or fills ---------------------------------------------------------------------------------------

_BURDENS = {
    "a_pipe_holds_a_checkpoint_up": ("mkfifo pipe", "touch ready; sleep 100000"),
    "an_endless_device_fills_a_checkpoint": ("ln -s /dev/zero zero", "touch ready; sleep 100000"),
    "files_of_holes_fill_a_checkpoint_or_hold_it_up": (
        "for number in 1 2 3 4 5 6 7 8; do truncate -s 9G hole$number; done",
        "touch ready; sleep 100000",
    ),
    "a_lease_on_a_file_holds_a_checkpoint_up": (
        "true",
        'exec python3 -I -c "import fcntl, os, signal, time; signal.signal(signal.SIGIO, signal.SIG_IGN); '
        "fd = os.open('leased', os.O_RDWR | os.O_CREAT); fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK); "
        "open('ready', 'w').close(); time.sleep(100000)\"",
    ),
}
"""Attack -> what is planted, and the process that lives on."""


def _burdens(shell: str, beside: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        async with _planted(grounds, shell) as handle, _beside(handle, beside):
            for _ in range(2):  # the second one compares files with the first one's
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        checkpoint = await handle.checkpoint()
                except TimeoutError:
                    return f"the node was held up for {_PATIENCE_S:g} s"
                except GanglineError:
                    continue
                except OSError as error:
                    return f"the node failed: {error}"
                num_bytes = await asyncio.to_thread(_bytes_in, checkpoint)
                await grounds.bench.release(checkpoint)
                if num_bytes > _MOST_BYTES:
                    return f"a checkpoint of nothing has {num_bytes} bytes"
        return None

    return run


for _name, (_shell, _program) in _BURDENS.items():
    ATTACKS.add(_name, _burdens(_shell, _program), needs_isolation=False)


# -- what cannot be copied -----------------------------------------------------------------------------------------

_MESSES = {
    "folders_deeper_than_any_path": (f'python3 -c "{_LONG}"', "test -d ddd*"),
    "files_with_two_names_deeper_than_any_path": (
        f"python3 -c \"{_LONG}open('one', 'w').close(); os.link('one', 'two')\"",
        "test -d ddd*",
    ),
    "folders_that_cannot_be_entered": ("mkdir -p a/b; touch a/b/c; chmod 000 a/b a", "test -e a"),
}
"""What is planted -> the lines that plant it, and those that look whether it is still there."""


def _is_left(shell: str, look: str, *, alive: bool) -> Assault:
    """A checkpoint is made or refused. Either way nothing of it stays, and the sandbox has its files."""

    async def run(grounds: Grounds) -> str | None:
        before = set(os.listdir(grounds.bench.root))
        async with _planted(grounds, shell) as handle:
            async with _beside(handle) if alive else contextlib.nullcontext():
                try:
                    await grounds.bench.release(await handle.checkpoint())
                except GanglineError:
                    pass
                except OSError as error:
                    return f"the node failed: {error}"
            if not (await handle.exec(look)).ok:
                return "the sandbox has lost its files"
        left = set(os.listdir(grounds.bench.root)) - before
        return f"{sorted(left)} stay on the disk" if left else None

    return run


for _name, (_shell, _look) in _MESSES.items():
    ATTACKS.add(f"{_name}_stay_behind_a_checkpoint", _is_left(_shell, _look, alive=False), needs_isolation=False)
    _alive = f"{_name}_stay_behind_a_checkpoint_of_the_living"
    ATTACKS.add(_alive, _is_left(_shell, _look, alive=True), needs_isolation=False)


_CLOSED = {
    "a_closed_file_is_kept_from_a_checkpoint": ("echo kept > file; chmod 000 file", "chmod 600 file; cat file"),
    "a_closed_folder_is_kept_from_a_checkpoint": (
        "mkdir -p a/b; echo kept > a/b/file; chmod 000 a/b a",
        "chmod 700 a; chmod 700 a/b; cat a/b/file",
    ),
    "a_closed_working_folder_is_kept_from_a_checkpoint": (
        'echo kept > file; chmod 000 file . "$HOME"',
        "chmod 700 .; chmod 600 file; cat file",
    ),
}


def _is_kept_away(shell: str, look: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        async with _planted(grounds, "true") as handle, _beside(handle):
            assert (await handle.exec(shell)).ok
            try:
                checkpoint = await handle.checkpoint()
            except GanglineError as error:
                return f"no checkpoint was made: {error.message}"
            fork = await grounds.bench.start(base=checkpoint)
            try:
                opened = f"chmod 700 {fork.workdir}; cd {fork.workdir}; {look}"
                seen = (await fork.exec(opened, cwd="/")).stdout
            finally:
                await fork.stop()
                await grounds.bench.release(checkpoint)
            await handle.exec(f'chmod 700 {handle.workdir} "$HOME"', cwd="/")
            return None if seen == b"kept\n" else f"the fork has {seen!r}"

    return run


for _name, (_shell, _look) in _CLOSED.items():
    ATTACKS.add(_name, _is_kept_away(_shell, _look), needs_isolation=False)


# -- what a fork gets ----------------------------------------------------------------------------------------------


async def _in_fork(grounds: Grounds, shell: str, look: str, told: Callable[[bytes], str | None]) -> str | None:
    async with _planted(grounds, shell) as handle:
        for alive in (False, True):
            async with _beside(handle) if alive else contextlib.nullcontext(), _kept(grounds, handle) as checkpoint:
                fork = await grounds.bench.start(base=checkpoint)
                try:
                    if evidence := told((await fork.exec(look)).stdout):
                        return evidence
                finally:
                    await fork.stop()
    return None


@ATTACKS.around()
async def a_program_of_the_agents_is_roots_in_a_fork(grounds: Grounds) -> str | None:
    shell = 'cp "$(command -v id)" id; chmod 6755 id'
    return await _in_fork(
        grounds, shell, "./id -u; ./id -g", lambda seen: "it runs as root" if b"0" in seen.split() else None
    )


@ATTACKS.around()
async def devices_come_into_a_fork(grounds: Grounds) -> str | None:
    """Everyone may make one with the numbers 0 and 0, which is none: it marks a removed file in a layer."""
    shell = "mknod mark c 0 0 2>/dev/null; mknod zero c 1 5 2>/dev/null; mknod disk b 8 0 2>/dev/null; true"
    look = "find . \\( -type c -o -type b \\) ! -name mark -print"
    return await _in_fork(grounds, shell, look, lambda seen: f"{seen!r} are devices" if seen else None)


@ATTACKS.around()
async def files_of_different_moments_are_a_checkpoint(grounds: Grounds) -> str | None:
    """The agent writes its turn's number into one file after the other: no file may be newer than one before it."""
    writes = """exec python3 -I -c "
import itertools, os
for number in itertools.count():
    for file in range(200):
        with open('new', 'w') as new: new.write(str(number))
        os.rename('new', f'turn{file:03}')
    if number == 2: open('ready', 'w').close()
" """
    look = "for file in turn*; do cat $file; echo; done"
    async with _planted(grounds, "true") as handle, _beside(handle, writes):
        for _ in range(4):
            async with _kept(grounds, handle) as checkpoint:
                if not checkpoint.is_frozen:
                    raise unittest.SkipTest("does not apply: the runtime says that processes run on")
                fork = await grounds.bench.start(base=checkpoint)
                seen = [int(line) for line in (await fork.exec(look)).stdout.split()]
                await fork.stop()
            if len(seen) != 200 or any(later > earlier for earlier, later in pairwise(seen)):
                return f"{len(seen)} files of the turns {sorted(set(seen))}"
    return None


def looks_for_secrets(given: Given) -> str | None:
    roots = [given["root"], given["workdir"], given["home"], "/tmp", "/dev/shm", f"/proc/1/root/{given['root']}"]
    places = (path for root in roots for path in files_below(root, given["exposed"]))
    return found(given["wanted"], places)


def _reads(victim: str, thief: str) -> Assault:
    """One of a parent and two forks writes a secret after the checkpoint, and another one looks for it."""

    async def run(grounds: Grounds) -> str | None:
        async with _planted(grounds, "echo before > file") as parent, _kept(grounds, parent) as checkpoint:
            forks = [await grounds.bench.start(base=checkpoint) for _ in range(2)]
            try:
                everyone = {"parent": parent, "fork": forks[0], "sibling": forks[1]}
                wanted = f"{grounds.mark}-{victim}"
                await everyone[victim].exec(f"echo {wanted} > file; echo {wanted} > /tmp/{wanted}")
                root = str(grounds.bench.root)
                # No session writes there, and to read all of it can take a minute.
                exposed = list(map(str, Settings.from_environ().expose))
                return await grounds.run_inside(
                    looks_for_secrets, everyone[thief], wanted=wanted, root=root, exposed=exposed
                )
            finally:
                await asyncio.gather(*(fork.stop() for fork in forks))

    return run


ATTACKS.add("a_fork_reads_later_files_of_its_parent", _reads("parent", "fork"), needs_isolation=True)
ATTACKS.add("a_parent_reads_files_of_its_fork", _reads("fork", "parent"), needs_isolation=True)
ATTACKS.add("a_fork_reads_files_of_another_one", _reads("fork", "sibling"), needs_isolation=True)


def writes_into_checkpoints(given: Given) -> str | None:
    for folder, _, names in os.walk(given["checkpoint"]):
        for name in names:
            with contextlib.suppress(OSError), open(f"{folder}/{name}", "a") as file:
                file.write("changed")
    return None


@ATTACKS.around()
async def a_fork_changes_its_checkpoint(grounds: Grounds) -> str | None:
    async with _planted(grounds, "echo before > file") as parent, _kept(grounds, parent) as checkpoint:
        for handle in (parent, await grounds.bench.start(base=checkpoint)):
            await handle.exec("echo changed > file")
            await grounds.run_inside(writes_into_checkpoints, handle, checkpoint=checkpoint.folder)
        fork = await grounds.bench.start(base=checkpoint)
        seen = await fork.download("file")
        await fork.stop()
    return None if seen == b"before\n" else f"a later fork has {seen!r}"
