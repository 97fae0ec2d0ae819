"""The program that attacks are aimed at: a process with a secret in every place where a process can have one.

It runs twice: on the host, as a stranger's process, and in another sandbox, as another session's agent. Its only
argument names it; the secret comes by its environment and is in its arguments too. It prints a line of JSON with all
addresses, and ends, with everything it made, when its standard input does. It needs Python and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmat.restype = ctypes.c_void_p
_IPC_CREAT, _IPC_RMID = 0o1000, 0


def main(secret: str, *_marks: str) -> None:
    number = int(secret[:6], 16)
    name = f"gangline-{secret[:12]}"  # the name is not a secret; the rest of it is
    told: dict[str, Any] = {"pid": os.getpid(), "name": name, "key": number, "signals": 0}
    held: list[Any] = []

    memory = ctypes.create_string_buffer(secret.encode(), 256)
    told["address"] = ctypes.addressof(memory)
    _hold_files(secret, name, told, held)
    _hold_ipc(secret, number, name, told)
    _hold_sockets(secret, name, told, memory)

    def signalled(_number: int, _frame: object) -> None:
        told["signals"] += 1

    signal.signal(signal.SIGUSR1, signalled)
    print(json.dumps(told), flush=True)
    while os.read(0, 4096):
        pass
    _remove(told)


def _hold_files(secret: str, name: str, told: dict[str, Any], held: list[Any]) -> None:
    folder = f"{os.getcwd()}/{name}"
    os.mkdir(folder, 0o700)
    os.chdir(folder)
    with open("secret", "w") as file:
        file.write(secret)
    unlinked = open("unlinked", "w+")  # noqa: SIM115 it stays open
    unlinked.write(secret)
    unlinked.flush()
    os.unlink("unlinked")
    held.append(unlinked)
    told["folder"] = folder
    told["unlinked_fd"] = unlinked.fileno()
    told["files"] = []
    for where in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/run/lock"):
        with contextlib.suppress(OSError):
            with open(f"{where}/{name}", "w") as file:
                file.write(secret)
            os.chmod(f"{where}/{name}", 0o666)
            told["files"].append(f"{where}/{name}")


def _hold_ipc(secret: str, number: int, name: str, told: dict[str, Any]) -> None:
    told["shm"] = shm = _libc.shmget(number, 4096, _IPC_CREAT | 0o666)
    if shm >= 0 and (at := _libc.shmat(shm, None, 0)) not in (None, ctypes.c_void_p(-1).value):
        ctypes.memmove(at, secret.encode(), len(secret))
    told["msg"] = queue = _libc.msgget(number, _IPC_CREAT | 0o666)
    if queue >= 0:
        message = (1).to_bytes(8, sys.byteorder) + secret.encode()
        _libc.msgsnd(queue, message, len(secret), 0o4000)
    told["sem"] = sem = _libc.semget(number, 1, _IPC_CREAT | 0o666)
    if sem >= 0:
        _libc.semctl(sem, 0, 16, ctypes.c_int(4711))
    told["mq"] = -1
    with contextlib.suppress(AttributeError, OSError):
        runtime = ctypes.CDLL("librt.so.1", use_errno=True)
        told["mq"] = mq = runtime.mq_open(f"/{name}".encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
        if mq >= 0:
            runtime.mq_send(mq, secret.encode(), len(secret), 1)


def _hold_sockets(secret: str, name: str, told: dict[str, Any], memory: Any) -> None:
    def answer(line: bytes) -> bytes:
        if line.startswith(b"signals"):
            return str(told["signals"]).encode()
        return bytes(memory.raw) if line.startswith(b"memory") else secret.encode()

    def serve(listening: socket.socket) -> None:
        while True:
            talk, _ = listening.accept()
            with talk, contextlib.suppress(OSError):
                talk.settimeout(5)
                line = talk.recv(4096)
                if line.startswith((b"GET", b"POST", b"PUT", b"HEAD")):
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(secret)}\r\nConnection: close\r\n\r\n"
                    talk.sendall(head.encode())
                talk.sendall(answer(line))

    def serve_datagrams(bound: socket.socket) -> None:
        while True:
            line, sender = bound.recvfrom(4096)
            bound.sendto(answer(line), sender)

    places: list[tuple[str, int, int, Any]] = [
        ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        ("tcp_any", socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 0)),
        ("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
        ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        ("abstract", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{name}"),
        ("unix", socket.AF_UNIX, socket.SOCK_STREAM, f"/tmp/{name}.sock"),
        ("vsock", getattr(socket, "AF_VSOCK", 40), socket.SOCK_STREAM, (0xFFFFFFFF, 0xFFFFFFFF)),
    ]
    for place, family, kind, address in places:
        told[place] = None
        with contextlib.suppress(OSError, OverflowError):
            bound = socket.socket(family, kind)
            bound.bind(address)
            if place == "unix":
                os.chmod(address, 0o777)
            if kind == socket.SOCK_STREAM:
                bound.listen(64)
            named = bound.getsockname()
            told[place] = address.lstrip("\0") if family == socket.AF_UNIX else named[1]
            work = serve if kind == socket.SOCK_STREAM else serve_datagrams
            threading.Thread(target=work, args=(bound,), daemon=True).start()


def _remove(told: dict[str, Any]) -> None:
    _libc.shmctl(told["shm"], _IPC_RMID, None)
    _libc.msgctl(told["msg"], _IPC_RMID, None)
    _libc.semctl(told["sem"], 0, _IPC_RMID)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("librt.so.1").mq_unlink(f"/{told['name']}".encode())
    for path in (*told["files"], f"/tmp/{told['name']}.sock"):
        with contextlib.suppress(OSError):
            os.unlink(path)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
