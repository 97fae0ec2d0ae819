"""System calls of an untrusted program: kernel interfaces that reach beyond a sandbox are closed to it."""

from __future__ import annotations

import ctypes
import os
import textwrap
import unittest
from typing import get_args

from gangline.domain.sandbox import Sandbox
from gangline.domain.task import SystemCall
from gangline.testing.runtime_conformance.bench import Bench, Checks, promised

CHECKS = Checks()

_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1
_SESSION_KEYRING = -3

_PRELUDE = """
import ctypes, errno, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
X86 = os.uname().machine == "x86_64"
def call(name, on_x86, on_arm, *arguments):
    # Print how a system call ends; one that ends well is told as `done`.
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(on_x86 if X86 else on_arm), *map(ctypes.c_long, arguments))
    print(name, "done" if result >= 0 else errno.errorcode[ctypes.get_errno()])
    return result
"""

_TRIES = """
call("keyring", 250, 219, 0, -3, 1)
call("keyring", 248, 217, 0, 0, 0, 0, -3)
call("keyring", 249, 218, 0, 0, 0, 0)
parameters = ctypes.create_string_buffer(256)
call("io_uring", 425, 425, 1, ctypes.addressof(parameters))
call("io_uring", 426, 426, 0, 0, 0, 0)
call("io_uring", 427, 427, 0, 0, 0, 0)
call("userfaultfd", 323, 282, 1)
counter = (ctypes.c_uint32 * 32)(1, 128, 1)
call("perf_events", 298, 241, ctypes.addressof(counter), 0, -1, -1, 0)
call("bpf", 321, 280, 0, 0, 0)
call("vsock", 41, 198, 40, 1, 0)
call("user_namespaces", 308, 268, os.open("/proc/self/ns/user", os.O_RDONLY), 0x10000000)
call("user_namespaces", 435, 435, 0, 0)
if call("user_namespaces", 56, 220, 0x10000000 | 17, 0, 0, 0, 0) == 0:
    os._exit(0)
call("user_namespaces", 272, 97, 0x10000000)
"""
_REFUSED = {"EPERM", "ENOSYS", "EAFNOSUPPORT", "EACCES"}

_FOREIGN = """
call("x32", 0x40000000 | 250, 0x40000000 | 250, 0, -3, 1)
if X86:
    code = mmap.mmap(-1, 4096, prot=7)
    code.write(bytes.fromhex("538b078b5f048b4f0831d2cd805bc3"))  # three numbers at an address, into `int 0x80`
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    for number in (286, 287, 288, 310, 425, 374, 336, 357):
        result = run(ctypes.addressof((ctypes.c_int * 3)(number, 0, 0)))
        print("i386", "done" if result >= 0 else errno.errorcode[-result])
"""

_TAKE_OVER = """
for pid in filter(str.isdigit, os.listdir("/proc")):
    own = open(f"/proc/{pid}/status").read().split("Uid:")[1].split()[0] == str(os.getuid())
    filtered = "Seccomp:\\t2" in open(f"/proc/{pid}/status").read()
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
        print(pid, "filtered" if filtered else "open")
    except OSError:
        pass
"""

_KEEP = """
payload, name = ctypes.create_string_buffer(sys.argv[1].encode()), ctypes.create_string_buffer(sys.argv[2].encode())
kind = ctypes.create_string_buffer(b"user")
for keyring in (-3, -4):
    call("kept", 248, 217, *map(ctypes.addressof, (kind, name, payload)), len(sys.argv[1]), keyring)
"""

_FIND = """
kind, name = ctypes.create_string_buffer(b"user"), ctypes.create_string_buffer(sys.argv[1].encode())
payload = ctypes.create_string_buffer(256)
for place in (-3, -4, -5):
    key = call("search", 250, 219, 10, place, ctypes.addressof(kind), ctypes.addressof(name), 0)
    if key >= 0 and call("read", 250, 219, 11, key, ctypes.addressof(payload), 256) >= 0:
        print("found", payload.value.decode())
"""


async def _printed(sandbox: Sandbox, program: str, *arguments: str) -> list[str]:
    result = await sandbox.exec(["python3", "-c", textwrap.dedent(_PRELUDE + program), *arguments])
    assert result.exit_code == 0, f"the program that tries it failed: {result}"
    return result.stdout.decode().splitlines()


@CHECKS.add
async def interfaces_to_the_kernel_that_no_task_asked_for_are_closed(bench: Bench) -> None:
    sandbox = await bench.start()
    promised(sandbox, "system_calls")
    lines = await _printed(sandbox, _TRIES)
    assert {line.split()[0] for line in lines} == set(get_args(SystemCall)), lines
    assert all(line.split()[1] in _REFUSED for line in lines), f"said to be filtered: {lines}"
    assert "vsock EAFNOSUPPORT" in lines, f"said to be filtered: {lines}"


@CHECKS.add
async def another_abi_is_no_way_around(bench: Bench) -> None:
    sandbox = await bench.start()
    promised(sandbox, "system_calls")
    lines = await _printed(sandbox, _FOREIGN)
    assert lines
    assert {line.split()[1] for line in lines} <= _REFUSED, f"said to be filtered: {lines}"


@CHECKS.add
async def what_a_task_asks_for_is_open_and_the_rest_closed(bench: Bench) -> None:
    sandbox = await bench.start(system_calls=("user_namespaces",))
    if "engine" in (promise := promised(sandbox, "system_calls")):
        raise unittest.SkipTest(f"does not apply: {promise}, which refuses user namespaces itself")
    assert "user_namespaces" in promise, "limits() says what is open"
    lines = await _printed(sandbox, _TRIES)
    assert "user_namespaces done" in lines, lines
    others = [line for line in lines if not line.startswith("user_namespaces")]
    assert all(line.split()[1] in _REFUSED for line in others), others


@CHECKS.add
async def threads_and_children_can_be_started_all_the_same(bench: Bench) -> None:
    """`clone3` is reported as missing, and C libraries fall back."""
    sandbox = await bench.start()
    program = "import threading; t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()"
    result = await sandbox.exec(["python3", "-c", f"{program}; import subprocess; print(subprocess.call('true'))"])
    assert result.stdout.split() == [b"thread", b"0"], result


@CHECKS.isolation
async def nothing_unfiltered_in_a_sandbox_can_be_taken_over(bench: Bench) -> None:
    sandbox = await bench.start()
    promised(sandbox, "system_calls")
    lines = await _printed(sandbox, _TAKE_OVER)
    assert not [line for line in lines if line.endswith("open")], f"memory of unfiltered processes is open: {lines}"


@CHECKS.isolation
async def no_key_passes_from_one_sandbox_to_another(bench: Bench) -> None:
    """Even if both tasks requested keyrings."""
    one, two = await bench.start(system_calls=("keyring",)), await bench.start(system_calls=("keyring",))
    kept = await _printed(one, _KEEP, "hidden-output", f"key-{bench.owner}")
    lines = await _printed(two, _FIND, f"key-{bench.owner}")
    assert not [line for line in lines if "found" in line], (kept, lines)


@CHECKS.add
async def the_keyring_of_who_started_the_node_is_not_the_agents(bench: Bench) -> None:
    number = _KEYCTL.get(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    if number is None or libc.syscall(number, _JOIN_SESSION_KEYRING, None) < 0:
        raise unittest.SkipTest("does not apply: this machine has no session keyrings")
    add_key = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
    name = f"operator-{bench.owner}".encode()
    assert libc.syscall(add_key, b"user", name, b"operators-secret", 16, _SESSION_KEYRING) >= 0
    sandbox = await bench.start(system_calls=("keyring",))
    lines = await _printed(sandbox, _FIND, name.decode())
    assert not [line for line in lines if "found" in line], lines
