"""Evidence of how a run ended: a readable description of the process's exit, and its events."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any, cast

from gangline.domain.sandbox import ExecResult


def describe_exit(result: ExecResult) -> str:
    """One line: how the process ended, and its last line on stderr."""
    if result.timed_out:
        return "killed when its time was up"
    end = f"exited with {result.exit_code}" if result.signal is None else f"killed by {_signal_name(result.signal)}"
    end = result.memory_kill or end
    last = last_line(result.stderr)
    return f"{end}: {last}" if last else end


def json_events(stdout: bytes, key: str = "type") -> Iterator[dict[str, Any]]:
    """JSON objects with a text under `key`, one per line, in order. Other lines (cut off, or another program's) are
    skipped.
    """
    for line in stdout.splitlines():
        try:
            event: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(cast(dict[str, Any], event).get(key), str):
            yield cast(dict[str, Any], event)


def object_in(event: dict[str, Any], name: str) -> dict[str, Any]:
    """The field if it is an object, else empty: the agent can write such lines too."""
    value = event.get(name)
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def last_line(output: bytes, max_chars: int = 300) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:max_chars] if lines else ""


def runner_end(result: ExecResult) -> dict[str, Any] | None:
    """The last `{"type": "gangline.end", ...}` line of our runner script on stdout; None if it did not finish."""
    if result.timed_out or result.exit_code != 0:
        return None
    ends = [event for event in json_events(result.stdout) if event["type"] == "gangline.end"]
    return ends[-1] if ends else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
