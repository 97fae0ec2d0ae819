"""Files that come out of a sandbox, or go into it, while the agent makes the paths mean something else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from gangline.domain.errors import CallerError
from gangline.domain.sandbox import Sandbox
from gangline.testing.runtime_conformance.bench import until_present
from support.hostility.attack import Assault, Attacks
from support.hostility.grounds import Grounds

ATTACKS = Attacks("files that are moved in and out")

_PATIENCE_S = 3.0
_MAX_BYTES = 1 << 20
_ROUNDS = 120
_numbers = itertools.count()

_UP = "/".join([".."] * 40)
"""To the root from any folder that a test runner makes: `..` of the root is the root."""

# Shell lines; $SECRET is a file of the node's, $FOLDER the folder that it lies in, and `bait` what the node asks for.
_DOWNLOADS = {
    "a_link_to_a_file_of_the_host_comes_out": ("ln -s $SECRET bait", "bait"),
    "a_link_to_a_link_comes_out": ("ln -s $SECRET one; ln -s one bait", "bait"),
    "a_file_in_a_linked_folder_comes_out": ("ln -s $FOLDER bait", "bait/secret"),
    "a_file_below_a_linked_folder_comes_out": ("mkdir a; ln -s $FOLDER/.. a/bait", "a/bait/{name}/secret"),
    "a_link_by_a_relative_way_comes_out": (f"ln -s {_UP}$SECRET bait", "bait"),
    "a_link_through_the_kernels_files_comes_out": ("ln -s /proc/self/root$SECRET bait", "bait"),
    "a_path_with_dots_comes_out": ("mkdir a", f"a/{_UP}{{secret}}"),
    "a_path_of_the_host_comes_out": ("true", "{secret}"),
    "a_path_below_the_kernels_files_comes_out": ("true", "/proc/self/root{secret}"),
    "an_open_file_of_the_node_comes_out": ("ln -s /proc/self/fd/{fd} bait", "bait"),
    "the_environment_of_the_node_comes_out": ("ln -s /proc/self/environ bait", "bait"),
    "the_environment_by_its_own_path_comes_out": ("true", "/proc/self/environ"),
}
_FOREVER = {
    "a_pipe_holds_the_node_up": "mkfifo bait",
    "a_pipe_behind_a_link_holds_the_node_up": "mkfifo pipe; ln -s pipe bait",
    "an_endless_device_fills_the_node": "ln -s /dev/zero bait",
    "a_hole_larger_than_memory_fills_the_node": "truncate -s 1T bait || truncate -s 9G bait",
    "a_file_longer_than_allowed_comes_out": f"head -c {_MAX_BYTES * 3} /dev/zero > bait",
}
_UPLOADS = {
    "an_upload_goes_through_a_link": ("ln -s $FOLDER/planted bait", "bait"),
    "an_upload_goes_through_a_linked_folder": ("ln -s $FOLDER bait", "bait/planted"),
    "an_upload_goes_through_a_deeper_linked_folder": ("mkdir a; ln -s $FOLDER/.. a/bait", "a/bait/{name}/planted"),
    "an_upload_makes_folders_through_a_link": ("ln -s $FOLDER bait", "bait/more/planted"),
    "an_upload_with_dots_leaves_the_sandbox": ("mkdir a", f"a/{_UP}{{folder}}/planted"),
    "an_upload_to_a_path_of_the_host_leaves_the_sandbox": ("true", "{folder}/planted"),
    "an_upload_through_the_kernels_files_leaves_the_sandbox": ("true", "/proc/self/root{folder}/planted"),
}


def _words(grounds: Grounds) -> dict[str, str]:
    folder = grounds.host["folder"]
    return {"secret": f"{folder}/secret", "folder": folder, "name": grounds.host["name"], "fd": str(grounds.leaked)}


async def _prepared(grounds: Grounds, shell: str, path: str) -> str:
    """Runs the agent's lines in a folder of their own; gives the path that the node then asks for."""
    words = _words(grounds)
    name = f"transfer-{next(_numbers)}"
    env = {"SECRET": words["secret"], "FOLDER": words["folder"]}
    lines = f"mkdir {name} && cd {name} && {{ {shell.replace('{fd}', words['fd'])}; }}"
    result = await grounds.handle.exec(lines, env=env)
    assert result.ok, result
    whole = path.format(**words)
    return whole if whole.startswith("/") else f"{name}/{whole}"


def _downloads(shell: str, path: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        asked = await _prepared(grounds, shell, path)
        with contextlib.suppress(CallerError, OSError):
            data = await grounds.handle.download(asked, max_bytes=_MAX_BYTES)
            return f"{asked} came out: {data[:40]!r}" if grounds.secret.encode() in data else None
        return None

    return run


def _holds_up(shell: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        asked = await _prepared(grounds, shell, "bait")
        try:
            async with asyncio.timeout(_PATIENCE_S):
                data = await _download_or_refusal(grounds.handle, asked)
        except TimeoutError:
            return f"the node was held up for {_PATIENCE_S:g} s"
        except MemoryError:
            return "the node had no memory left"
        return f"{len(data)} bytes came out" if len(data) > _MAX_BYTES else None

    return run


async def _download_or_refusal(handle: Sandbox, path: str) -> bytes:
    with contextlib.suppress(CallerError):
        return await handle.download(path, max_bytes=_MAX_BYTES)
    return b""


def _uploads(shell: str, path: str) -> Assault:
    async def run(grounds: Grounds) -> str | None:
        asked = await _prepared(grounds, shell, path)
        with contextlib.suppress(CallerError, OSError):
            await grounds.handle.upload(asked, b"planted")
        return _planted(grounds)

    return run


def _planted(grounds: Grounds) -> str | None:
    """The file that an upload left among the node's own files. It is removed."""
    found = [path for path in Path(grounds.host["folder"]).rglob("*") if path.name not in ("secret", "more")]
    for path in found:
        path.unlink()
    with contextlib.suppress(OSError):
        Path(grounds.host["folder"], "more").rmdir()
    return f"{found[0]} was written" if found else None


for _name, (_shell, _path) in _DOWNLOADS.items():
    ATTACKS.add(_name, _downloads(_shell, _path), needs_isolation=_path.startswith("/") or "environment" in _name)
for _name, _shell in _FOREVER.items():
    ATTACKS.add(_name, _holds_up(_shell), needs_isolation=False)
for _name, (_shell, _path) in _UPLOADS.items():
    ATTACKS.add(_name, _uploads(_shell, _path), needs_isolation=_path.startswith("/"))

_SWAP = """
import os, sys
os.mkdir('real'); open('real/secret', 'w').close(); os.symlink(sys.argv[1], 'link')
open('ready', 'w').close()
while True:
    for name in ('real', 'link'):
        try: os.rename(name, 'flip'); os.rename('flip', name)
        except OSError: os.system('rm -rf flip')
"""


@ATTACKS.around(needs_isolation=False)
async def a_folder_that_turns_into_a_link_lets_files_out(grounds: Grounds) -> str | None:
    async def look(path: str) -> str | None:
        with contextlib.suppress(CallerError, OSError):
            data = await grounds.handle.download(f"{path}/flip/secret", max_bytes=_MAX_BYTES)
            return "the secret came out" if grounds.secret.encode() in data else None
        return None

    return await _while_swapping(grounds, look)


@ATTACKS.around(needs_isolation=False)
async def a_folder_that_turns_into_a_link_lets_files_in(grounds: Grounds) -> str | None:
    async def look(path: str) -> str | None:
        with contextlib.suppress(CallerError, OSError):
            await grounds.handle.upload(f"{path}/flip/planted", b"planted")
        return _planted(grounds)

    return await _while_swapping(grounds, look)


async def _while_swapping(grounds: Grounds, look: Callable[[str], Awaitable[str | None]]) -> str | None:
    name = f"transfer-{next(_numbers)}"
    argv = ["python3", "-I", "-B", "-c", f"import os; os.mkdir({name!r}); os.chdir({name!r}){_SWAP}"]
    running = asyncio.create_task(grounds.handle.exec([*argv, grounds.host["folder"], grounds.mark]))
    try:
        await until_present(grounds.handle, f"{name}/ready")
        for _ in range(_ROUNDS):
            if evidence := await look(name):
                return evidence
        assert not running.done(), f"nothing was swapped: {running.result()}"
        return None
    finally:
        running.cancel()
        await asyncio.wait({running})
        await asyncio.to_thread(grounds.end_survivors)


@ATTACKS.around(needs_isolation=False)
async def a_lease_on_a_file_holds_the_node_up(grounds: Grounds) -> str | None:
    """The kernel makes whoever opens a leased file wait, 45 s by default, until its holder lets go."""
    name = f"transfer-{next(_numbers)}"
    program = (
        "import fcntl, os, signal, sys, time; signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); os.write(fd, b'x')\n"
        "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK); open(sys.argv[1] + '.ready', 'w').close(); time.sleep(1000)"
    )
    argv = ["python3", "-I", "-B", "-c", program, name, grounds.mark]
    running = asyncio.create_task(grounds.handle.exec(argv))
    begun = time.monotonic()
    try:
        await until_present(grounds.handle, f"{name}.ready")
        begun = time.monotonic()
        with contextlib.suppress(CallerError, OSError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await grounds.handle.download(name)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await asyncio.to_thread(grounds.end_survivors)
    return f"the node waited for {_PATIENCE_S:g} s" if time.monotonic() - begun > _PATIENCE_S else None
