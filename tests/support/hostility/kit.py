"""Source that every program inside begins with. It needs Python 3.8 and Linux on x86-64 or AArch64, and nothing else.

Each program has a verdict. It is `breached` when the attack returned evidence, `held` when it
returned None or the system refused a call, `absent` when the kernel lacks the thing, and `broken` when the attack
itself failed: a broken attack proves nothing, so it counts as a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

Given = dict[str, Any]
"""Facts passed from outside: secrets to look for, process ids, ports, paths."""

_NUMBERS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "clock_settime": (227, 112),
    "clone3": (435, 435),
    "capset": (126, 91),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "mq_timedreceive": (243, 183),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "semctl": (66, 191),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "settimeofday": (164, 170),
    "shmat": (30, 196),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Absent(Exception):
    """The kernel or the sandbox does not have the target."""


def syscall(name: str, *args: Any) -> int:
    """Raises: OSError; Absent where this machine has no such call."""
    number = _NUMBERS[name][platform.machine() not in ("x86_64", "amd64")]
    if number < 0:
        raise Absent(f"this machine has no {name}")
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result: int = _libc.syscall(ctypes.c_long(number), *wide)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def passed_permission(name: str, *args: Any, refused: tuple[int, ...] = (errno.EPERM, errno.EACCES)) -> str | None:
    """Evidence when a call that is wrong on purpose fails for another reason than a missing permission.

    So nothing happens where the wall is missing.
    """
    try:
        syscall(name, *args)
    except OSError as error:
        if error.errno in (*refused, errno.ENOSYS):
            raise
        return f"{name} was permitted: {error.strerror}"
    return f"{name} was permitted"


def pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def waiting(given: Given) -> list[int]:
    """Children of our command's supervisor that are not the command. Raises: Absent."""
    others = [pid for pid in pids() if pid != os.getppid()]
    found = [pid for pid in others if _parent(pid) == given["supervisor"]]
    if not found:
        raise Absent("no process waits alongside the command")
    return found


def _parent(pid: int) -> int:
    """0: it is gone."""
    fields = contents(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def contents(path: str, max_bytes: int = 1 << 20) -> bytes:
    """The content of a file, or nothing when it cannot be read. Never blocks."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    data = b""
    try:
        # The kernel's tables come in pieces of a page, whatever is asked for.
        while len(data) < max_bytes and (piece := os.read(fd, max_bytes - len(data))):
            data += piece
    except OSError:
        pass
    finally:
        os.close(fd)
    return data


def files_below(root: str, without: list[str]) -> Iterator[str]:
    """Paths of files, but those in the folders `without`."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in without]
        yield from (os.path.join(folder, name) for name in names)


def found(secret: str, places: Iterator[str] | list[str]) -> str | None:
    """The first path whose content has the secret."""
    for path in places:
        if secret.encode() in contents(path):
            return f"{path} has the secret"
    return None


def is_open(talk: socket.socket) -> bool:
    """One that was turned away is closed here too."""
    talk.setblocking(False)
    try:
        talk.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        pass
    talk.close()
    return False


def removed_file(folder: str, size_bytes: int) -> int:
    """A file of that size that has no name any more."""
    path = f"{folder}/removed"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.unlink(path)
    os.write(fd, b"1" * size_bytes)
    return fd


def said_by(address: Any, family: int, kind: int = socket.SOCK_STREAM, line: bytes = b"tell\n") -> bytes:
    """A service's answer to a line."""
    with socket.socket(family, kind) as talk:
        talk.settimeout(3)
        talk.connect(address)
        talk.sendall(line)
        return talk.recv(65536)


def way_to(host: str, port: int) -> str:
    """Evidence of a route. Nothing is sent. Raises: OSError where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))
        return f"a route from {asking.getsockname()[0]}"


def asked_of_proxy(*pieces: bytes) -> str | None:
    """Send pieces to the sandbox's forward proxy, one after each answer; evidence when it went where it may not."""
    host, _, port = os.environ["HTTP_PROXY"].rpartition("/")[2].partition(":")
    answers = b""
    with socket.create_connection((host, int(port)), 5) as talk:
        for piece in pieces:
            talk.sendall(piece)
            answers += talk.recv(65536)
        talk.settimeout(0.1)
        with contextlib.suppress(OSError):
            answers += talk.recv(65536)
    if b"\r\n" not in answers:
        return None
    return f"it answered {answers[:300]!r}" if b" 200 " in answers.split(b"\r\n")[0] + b" " else None


def fetched(given: Given, url: str) -> str | None:
    """A GET; PORT in the URL is the victim's."""
    whole = url.replace("PORT", str(given["victim"]["tcp"]))
    return asked_of_proxy(f"GET {whole} HTTP/1.1\r\nHost: localhost:9\r\n\r\n".encode())


def tunnelled(given: Given, target: str) -> str | None:
    whole = target.replace("PORT", str(given["victim"]["tcp"]))
    request = f"CONNECT {whole} HTTP/1.1\r\nHost: {whole}\r\n\r\n"
    return asked_of_proxy(request.encode(), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


_KEYRINGS = {"session": -3, "user": -4, "user_session": -5}


def planted_keys(name: str, secret: str, for_everyone: bool = False) -> dict[str, int]:
    """A key with the secret in each keyring that others could share: keyring -> serial of the key."""
    serials: dict[str, int] = {}
    for keyring, number in _KEYRINGS.items():
        with contextlib.suppress(OSError):
            described = f"{name}-{keyring}".encode()
            serials[keyring] = syscall("add_key", b"user", described, secret.encode(), len(secret), number)
            if for_everyone:
                syscall("keyctl", 5, serials[keyring], 0x3F3F3F3F)
    return serials


def key_found(given: Given, keyring: str) -> str | None:
    """Search a keyring for the victim's key, by way of the session's own keyring."""
    victim = given["victim"]
    if keyring not in victim["keys"]:
        raise Absent("the victim could not add a key")
    if keyring != "session":
        syscall("keyctl", 8, _KEYRINGS[keyring], -3)
    serial = syscall("keyctl", 10, -3, b"user", f"{victim['name']}-{keyring}".encode(), 0)
    payload = ctypes.create_string_buffer(256)
    syscall("keyctl", 11, serial, payload, 256)
    return f"key {serial} has the secret" if payload.value.decode() == victim["secret"] else None


def remove_keys(serials: dict[str, int]) -> None:
    for serial in serials.values():
        with contextlib.suppress(OSError):
            syscall("keyctl", 21, serial)


_LONGEST_S = 20
_MISSING = (errno.ENOSYS, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT, errno.ENODEV)


def run_all(attacks: dict[str, tuple[Callable[[Given], str | None], str]]) -> None:
    """Run each program in its own process and print its verdict. Children of a program may continue."""
    supervisor = os.getppid()
    above = contents(f"/proc/{supervisor}/stat").rpartition(b")")[2].split()
    spawner = int(above[1]) if above else 0
    for name, (attack, told_given) in attacks.items():
        given = {**json.loads(told_given), "supervisor": supervisor, "spawner": spawner}
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reading)
            os.write(writing, json.dumps(_verdict(attack, given)).encode())
            os._exit(0)
        os.close(writing)
        ready, _, _ = select.select([reading], [], [], _LONGEST_S)
        told = os.read(reading, 65536) if ready else b""
        os.close(reading)
        with contextlib.suppress(OSError):
            os.kill(pid, 9)
        status = os.waitpid(pid, 0)[1]
        verdict = json.loads(told) if told else _silent(bool(ready), status)
        sys.stdout.write(json.dumps({"attack": name, **verdict}) + "\n")
        sys.stdout.flush()
    os._exit(0)


def _silent(ended: bool, status: int) -> dict[str, str]:
    if ended and os.WIFSIGNALED(status):
        return {"verdict": "held", "told": f"the program was ended by signal {os.WTERMSIG(status)}"}
    return {"verdict": "broken", "told": f"no verdict, wait status {status}" if ended else "not done in time"}


def _verdict(attack: Callable[[Given], str | None], given: Given) -> dict[str, str]:
    try:
        evidence = attack(given)
        verdict, told = ("breached", evidence) if evidence is not None else ("held", "")
    except Absent as absent:
        verdict, told = "absent", str(absent)
    except MemoryError:
        verdict, told = "held", "no memory"
    except OSError as error:
        verdict = "absent" if error.errno in _MISSING else "held"
        told = f"{type(error).__name__}: {error}"
    except BaseException:
        verdict, told = "broken", traceback.format_exc()
    return {"verdict": verdict, "told": told[:8192]}


FOR_PROGRAMS = (fcntl, re, resource, signal, stat, struct, subprocess, threading, time)
"""Modules that programs use without importing them."""
