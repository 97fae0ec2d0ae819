"""How a process's end reads, for people."""

from __future__ import annotations

import signal

from gangline.domain.contracts import ExecResult

__all__ = ["describe_exit", "last_line"]


def describe_exit(result: ExecResult) -> str:
    """One line: how the process ended, and the last thing it said on stderr."""
    if result.timed_out:
        return "killed when its time was up"
    end = f"exited with {result.exit_code}" if result.signal is None else f"killed by {_signal_name(result.signal)}"
    said = last_line(result.stderr)
    return f"{end}: {said}" if said else end


def last_line(output: bytes, max_chars: int = 300) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:max_chars] if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
