"""Isolation: identities, information and changes that an untrusted program must not get."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import unittest
import zlib
from collections.abc import Generator
from pathlib import Path

from gangline.domain.ids import new_id
from gangline.domain.task import RuntimeSpec
from gangline.testing.runtime_conformance.bench import Bench, Checks

CHECKS = Checks()


@CHECKS.isolation
async def the_agent_is_not_root_and_not_process_one(bench: Bench) -> None:
    sandbox = await bench.start()
    assert (await sandbox.exec("id -u")).stdout.strip() != b"0"
    assert (await sandbox.exec("echo $$")).stdout.strip() != b"1"
    assert not (await sandbox.exec("cat /etc/shadow")).ok


@CHECKS.isolation
async def the_agent_has_no_privileges_and_gets_none(bench: Bench) -> None:
    """Neither capabilities nor a way to get them through a set-user-id program."""
    sandbox = await bench.start()
    seen = await sandbox.exec(["grep", "-E", "^(CapPrm|CapEff|CapAmb|NoNewPrivs)", "/proc/self/status"])
    none = "0" * 16
    assert seen.stdout.decode().split() == [
        "CapPrm:", none, "CapEff:", none, "CapAmb:", none, "NoNewPrivs:", "1",
    ]  # fmt: skip


@CHECKS.isolation
async def the_host_is_read_only_and_its_processes_invisible(bench: Bench) -> None:
    sandbox = await bench.start()
    for path in ("/usr/x", "/etc/x"):
        assert not (await sandbox.exec(["touch", path])).ok
    name = new_id("x")
    await sandbox.exec(["touch", f"/{name}"])  # the root folder may be the sandbox's own
    assert name not in os.listdir("/")
    environ = f"/proc/{os.getpid()}/environ"
    assert (await sandbox.exec(f"test -e {environ} && tr '\\0' '\\n' < {environ} | grep -q ^PATH=")).exit_code != 0
    assert not (await sandbox.exec(["test", "-e", str(bench.root)])).ok


@CHECKS.isolation
async def the_kernels_settings_and_disks_are_out_of_reach(bench: Bench) -> None:
    sandbox = await bench.start()
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/dev/mem", "/dev/kmsg"):
        assert not (await sandbox.exec(["test", "-w", path])).ok, f"{path} can be written"
    assert (await sandbox.exec("find /dev -type b -readable 2>/dev/null")).stdout == b"", "disks can be read"


@CHECKS.isolation
async def temporary_files_and_shared_memory_are_its_own(bench: Bench) -> None:
    one, two = await asyncio.gather(bench.start(), bench.start())
    paths = [f"{folder}/{bench.owner}" for folder in ("/tmp", "/var/tmp", "/dev/shm")]
    for path in paths:
        await one.exec(["touch", path])
        assert not (await two.exec(["test", "-e", path])).ok
    seen_here = await asyncio.to_thread(lambda: [path for path in paths if os.path.exists(path)])
    assert seen_here == []


@CHECKS.isolation
async def no_two_sandboxes_have_one_user(bench: Bench) -> None:
    """Even if their ids collide in the way in which runtimes choose users."""
    if os.geteuid() != 0:
        raise unittest.SkipTest("does not apply: an ordinary user's agents are that user")
    spec = RuntimeSpec(backend=bench.runtime.name, image=bench.image)
    sandboxes = [await bench.start_of(runtime_id, spec) for runtime_id in _alike(3)]
    users = [(await sandbox.exec(["id", "-u"])).stdout for sandbox in sandboxes]
    assert len(set(users)) == len(users), f"sandboxes that live at once share a user: {users}"


def _alike(count: int) -> list[str]:
    """Ids whose CRC-32 has equal lower 16 bits."""
    found: dict[int, list[str]] = {}
    for number in itertools.count():
        same = found.setdefault(zlib.crc32(f"alike-{number}".encode()) & 0xFFFF, [])
        same.append(f"alike-{number}")
        if len(same) == count:
            return same
    raise AssertionError


@CHECKS.isolation
async def hidden_folders_are_empty_wherever_they_lie(bench: Bench) -> None:
    """For example a data folder inside a folder that sandboxes see."""
    spec = RuntimeSpec(backend=bench.runtime.name, image=bench.image)
    tried = 0
    for place in (sys.prefix, "/opt", "/usr/local", "/etc"):
        with _data_folder(place) as folder:
            if folder is None:
                continue
            read = f"cat {folder}/nodes/secret"
            open_to_all = await bench.start_of(new_id("runtime"), spec)
            if (await open_to_all.exec(read)).stdout != b"secret":
                continue  # a runtime that shows no such folder hides all of it
            tried += 1
            sandbox = await bench.start_of(new_id("runtime"), spec, hidden=(folder,))
            seen = await sandbox.exec(f"{read}; ls -A {folder}; find {place} -path '*{folder.name}/*' 2>/dev/null")
            assert seen.stdout == b"", f"{folder} was to be hidden: {seen}"
            assert not (await sandbox.exec(["touch", f"{folder}/planted"])).ok
    if not tried:
        raise unittest.SkipTest("does not apply: the runtime shows no folder of the host that can be written here")


@contextlib.contextmanager
def _data_folder(place: str) -> Generator[Path | None]:
    """Contains a file that everyone may read; None if the folder cannot be created."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="gangline-conformance-", dir=place))
    except OSError:
        yield None
        return
    try:
        (folder / "nodes").mkdir()
        (folder / "nodes" / "secret").write_text("secret")
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)
