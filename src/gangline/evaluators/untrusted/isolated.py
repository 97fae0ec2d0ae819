"""Work on text that an agent wrote, in a child process with limits of time and memory.

Parsers and computer algebra can take for ever on the right text, hold the interpreter meanwhile, and cannot be stopped:
inside the node one answer could stall every session. The work is a module with two functions of JSON values:
`prepare(job)` for the part that the agent has no influence on, and `work(prepared)` for the rest. Only `work` is held
to the limits of processor time and memory: a failure of `prepare`, or too little wall-clock time, is ours.

The child has none of the node's environment.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import signal
import sys
from typing import Any, NamedTuple

from gangline.domain.errors import EvaluatorError

__all__ = ["ENVIRONMENT", "Limits", "OverLimit", "in_child", "main"]

ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8"}
"""All that a child process has of the node's environment."""

_MAX_SHOWN_CHARS = 500
_PREPARED = b"prepared\n"
_OURS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that come from elsewhere: an operator, or a machine that is out of memory."""


class Limits(NamedTuple):
    """Limits of one child."""

    cpu_s: int
    """Processor time of `work`, in whole seconds."""
    memory_bytes: int
    """Address space that `work` may take beyond the prepared process."""
    timeout_s: float
    """Wall-clock time of everything; long, as a loaded machine is not the agent's fault."""


class OverLimit(Exception):
    """`work` took more than it may, or crashed: the doing of its input."""


async def in_child(module: str, job: Any, limits: Limits) -> Any:
    """The result of `module.work(module.prepare(job))`.

    Raises: OverLimit; EvaluatorError when `prepare` fails, or wall-clock time runs out.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", f"from {__name__} import main; main()"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limits.timeout_s):
            request = {"module": module, "job": job, "limits": limits}
            stdout, stderr = await child.communicate(json.dumps(request).encode())
    except TimeoutError:
        raise EvaluatorError(
            f"{module} was not done in {limits.timeout_s:g} s; the machine may be overloaded"
        ) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode is not None
    if child.returncode == 0:
        return json.loads(stdout.removeprefix(_PREPARED))
    why = stderr.decode(errors="replace").strip()[-_MAX_SHOWN_CHARS:]
    if stdout.startswith(_PREPARED) and -child.returncode not in _OURS:
        raise OverLimit(_end_of(child.returncode, why, limits))
    raise EvaluatorError(f"{module} ended with {child.returncode}: {why or 'no message'}")


def _end_of(code: int, why: str, limits: Limits) -> str:
    if -code == signal.SIGXCPU:
        return f"it took more than {limits.cpu_s} s of processor time"
    if "MemoryError" in why:
        return f"it took more than {limits.memory_bytes >> 20} MiB of memory"
    return f"it crashed ({'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}): {why[-200:]}"


def main() -> None:
    """The child: a request on stdin, the result on stdout."""
    request = json.load(sys.stdin)
    limits = Limits(*request["limits"])
    out = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no result
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module = importlib.import_module(request["module"])
    prepared = module.prepare(request["job"])
    os.write(out, _PREPARED)
    _hold_to(limits)
    data = json.dumps(module.work(prepared)).encode()
    with os.fdopen(out, "wb") as stream:
        stream.write(data)


def _hold_to(limits: Limits) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime) + 1 + limits.cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    with open("/proc/self/statm", encoding="ascii") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + limits.memory_bytes, taken + limits.memory_bytes))
