"""Means of contact between two processes of one machine: shared memory, queues, semaphores, temporary files,
sockets."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import socket
import stat
import tty
from collections.abc import Callable

from support.hostility.attack import Attacks, Program
from support.hostility.grounds import Grounds
from support.hostility.kit import Absent, Given, contents, found, said_by, syscall

ATTACKS = Attacks("shared memory, queues and local sockets")


@ATTACKS.against_both
def attaches_shared_memory(given: Given) -> str | None:
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(syscall("shmget", given["victim"]["key"], 0, 0o444), None, 0o10000)
    here = ctypes.string_at(at, 64)
    return "it has the secret" if given["victim"]["secret"].encode() in here else None


@ATTACKS.against_both
def attaches_shared_memory_by_its_number(given: Given) -> str | None:
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(given["victim"]["shm"], None, 0o10000)
    if at in (None, ctypes.c_void_p(-1).value):
        return None
    return "it has the secret" if given["victim"]["secret"].encode() in ctypes.string_at(at, 64) else None


@ATTACKS.against_both
def receives_from_a_message_queue(given: Given) -> str | None:
    """MSG_COPY leaves the message there."""
    queue = syscall("msgget", given["victim"]["key"], 0o444)
    here = ctypes.create_string_buffer(256)
    syscall("msgrcv", queue, here, 128, 0, 0o40000 | 0o4000)
    return "it has the secret" if given["victim"]["secret"].encode() in here.raw else None


@ATTACKS.against_both
def reads_a_semaphore(given: Given) -> str | None:
    value = syscall("semctl", syscall("semget", given["victim"]["key"], 1, 0o444), 0, 12, 0)
    return "it has the victim's value" if value == 4711 else None


@ATTACKS.against_both
def sees_the_kernels_lists_of_shared_memory(given: Given) -> str | None:
    listed = b"".join(contents(f"/proc/sysvipc/{kind}") for kind in ("shm", "msg", "sem")).split()
    return "its key is listed" if str(given["victim"]["key"]).encode() in listed else None


@ATTACKS.against_both
def opens_a_posix_message_queue(given: Given) -> str | None:
    if given["victim"]["mq"] < 0:
        raise Absent("the victim has no queue")
    queue = syscall("mq_open", given["victim"]["name"].encode(), os.O_RDWR, 0, None)
    here = ctypes.create_string_buffer(8192)
    length = syscall("mq_timedreceive", queue, here, 8192, None, (ctypes.c_long * 2)(0, 0))
    libc = ctypes.CDLL("librt.so.1")
    libc.mq_send(queue, here.raw[:length], length, 1)
    return "it has the secret" if given["victim"]["secret"].encode() in here.raw else None


@ATTACKS.against_both
def reads_files_in_folders_for_everyone(given: Given) -> str | None:
    return found(given["victim"]["secret"], list(given["victim"]["files"]))


@ATTACKS.against_both
def writes_files_in_folders_for_everyone(given: Given) -> str | None:
    """Only opens them, so that existing content stays."""
    for path in given["victim"]["files"]:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY))
            return f"{path} can be written"
    return None


@ATTACKS.against_both
def lists_names_in_folders_for_everyone(given: Given) -> str | None:
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/run/lock", "/dev/mqueue"):
        with contextlib.suppress(OSError):
            if any(name.startswith(given["victim"]["name"]) for name in os.listdir(folder)):
                return f"{folder} shows its files"
    return None


@ATTACKS.against_both
def dials_an_abstract_socket(given: Given) -> str | None:
    answer = said_by(f"\0{given['victim']['abstract']}", socket.AF_UNIX)
    return f"it answered {answer[:80]!r}" if given["victim"]["secret"].encode() in answer else None


@ATTACKS.against_both
def dials_a_socket_in_a_temporary_folder(given: Given) -> str | None:
    if given["victim"]["unix"] is None:
        raise Absent("the victim has no such socket")
    answer = said_by(given["victim"]["unix"], socket.AF_UNIX)
    return f"it answered {answer[:80]!r}" if given["victim"]["secret"].encode() in answer else None


@ATTACKS.against_both
def sees_names_of_abstract_sockets(given: Given) -> str | None:
    return "/proc/net/unix shows it" if given["victim"]["name"].encode() in contents("/proc/net/unix") else None


@ATTACKS.inside
def dials_the_service_manager_or_an_engine_of_containers(given: Given) -> str | None:
    """Sockets that would be root's keys, and any other under /run or /var/run."""
    for top in ("/run", "/var/run", "/tmp"):
        for folder, _, names in os.walk(top):
            for path in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.stat(path).st_mode):
                        with socket.socket(socket.AF_UNIX) as talk:
                            talk.connect(path)
                        return f"{path} can be dialled"
    return None


@ATTACKS.around()
async def writes_to_a_terminal_of_the_host(grounds: Grounds) -> str | None:
    def writes(given: Given) -> str | None:
        fd = os.open(given["terminal"], os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        os.write(fd, given["mark"].encode())
        return None

    return await _at_a_terminal(grounds, writes, lambda master, _: os.read(master, 4096))


@ATTACKS.around()
async def types_into_a_terminal_of_the_host(grounds: Grounds) -> str | None:
    """TIOCSTI puts characters into the input of a terminal, as if somebody typed them."""

    def types(given: Given) -> str | None:
        fd = os.open(given["terminal"], os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        for character in given["mark"]:
            fcntl.ioctl(fd, 0x5412, character.encode())
        return None

    return await _at_a_terminal(grounds, types, lambda _, slave: os.read(slave, 4096))


async def _at_a_terminal(grounds: Grounds, program: Program, look: Callable[[int, int], bytes]) -> str | None:

    master, slave = pty.openpty()
    try:
        tty.setraw(slave)
        os.set_blocking(master, False)
        os.set_blocking(slave, False)
        await grounds.run_inside(program, terminal=os.ttyname(slave))
        try:
            seen = look(master, slave)
        except BlockingIOError:
            return None
        return "the mark came out" if grounds.mark.encode() in seen else None
    finally:
        os.close(master)
        os.close(slave)
