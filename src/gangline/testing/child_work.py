"""Jobs for `ForkServers` that report the state of the child process, or end in each possible way."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

_seen: list[object] = []


def prepare(job: dict[str, Any]) -> dict[str, Any]:
    if job.get("unprepared"):
        raise ValueError("not prepared")
    _seen.append(job.get("note"))
    return job


def work(job: dict[str, Any]) -> dict[str, Any]:
    match job["action"]:
        case "spin":
            while True:
                pass
        case "swell":
            return {"kept": [bytes(64 << 20) for _ in range(100)]}
        case "sleep":
            Path(job["mark"]).write_text(str(os.getpid()))
            time.sleep(600)
        case "fault":
            ctypes.string_at(0)
        case "leave":
            os._exit(9)
        case "fail":
            raise ZeroDivisionError("no number")
        case _:
            pass
    return _what_it_has()


def _what_it_has() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "server_environment": _environment(os.getppid()),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if _is_open(int(name))),
        "seen": list(_seen),
    }


def _environment(pid: int) -> dict[str, str]:
    """The variables with which the process was started."""
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def _is_open(descriptor: int) -> bool:
    """Excludes the descriptor of the directory listing itself."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
