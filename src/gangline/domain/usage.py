"""Resources that sandboxes use, and their sums over a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Amount = Literal[
    "cpu_s",
    "peak_memory_bytes",
    "written_bytes",
    "proxy_sent_bytes",
    "proxy_received_bytes",
    "list_sent_bytes",
    "list_received_bytes",
]
AMOUNTS: tuple[Amount, ...] = (
    "cpu_s",
    "peak_memory_bytes",
    "written_bytes",
    "proxy_sent_bytes",
    "proxy_received_bytes",
    "list_sent_bytes",
    "list_received_bytes",
)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Resource use of a sandbox, or of several together. An unknown amount is None, never 0."""

    disk_bytes: int | None
    """Disk usage in bytes; None if not measured, or not yet."""
    files: int | None = None
    """Files and folders; None as above."""
    exceeded: str | None = None
    """Name of a limit for which the runtime once ended the sandbox's processes."""
    memory_bytes: int | None = None
    """Memory in use now, without cached files that are not in use; None if not measured, and in records."""
    cpu_s: float | None = None
    """Processor time so far, in seconds."""
    peak_memory_bytes: int | None = None
    """Peak memory."""
    written_bytes: int | None = None
    """Bytes written so far to file systems on a disk, including removed files, without data that is only in memory."""
    proxy_sent_bytes: int | None = None
    """Bytes that the sandbox has sent to the node's proxy: model calls with their HTTP headers."""
    proxy_received_bytes: int | None = None
    """Bytes of the proxy's answers."""
    list_sent_bytes: int | None = None
    """Bytes sent to hosts of `runtime.network_allow`: content of tunnels, and requests as passed on."""
    list_received_bytes: int | None = None
    """Bytes received from these hosts."""
    measured: dict[str, str] = {}
    """Amount -> how it is measured; for a None, why it is not."""


class SessionUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Resource use of one attempt: of all its sandboxes, by stage."""

    agent: Usage
    """INIT and RUN, in the agent's sandbox."""
    grading: Usage | None = None
    """POSTRUN, in the agent's sandbox and in clean ones; None if nothing was graded."""


def unmeasured(why: str) -> Usage:
    """Returns a usage in which everything is unknown, for this reason."""
    return Usage(disk_bytes=None, measured=dict.fromkeys(AMOUNTS, why))


def since(before: Usage, total: Usage) -> Usage:
    """Returns the part of `total` that came after `before`, in the same sandbox.

    If the peak has not grown, the peak of the later part is unknown: None.
    """
    changes: dict[str, Any] = {}
    measured = dict(total.measured)
    for name in AMOUNTS:
        now, then = getattr(total, name), getattr(before, name)
        changes[name] = None if now is None else now - (then or 0)
    peak, earlier = total.peak_memory_bytes, before.peak_memory_bytes
    changes["peak_memory_bytes"] = peak
    if peak is not None and earlier is not None and peak <= earlier:
        changes["peak_memory_bytes"] = None
        measured["peak_memory_bytes"] = "not more than before, in the same sandbox"
    return msgspec.structs.replace(total, memory_bytes=None, measured=measured, **changes)


def summed(usages: Sequence[Usage]) -> Usage:
    """Returns the combined amounts of at least one sandbox: the highest peak, and the sums of the others.

    An amount that is unknown for one is unknown for all; a peak is unknown only if it is unknown for all.
    """
    totals: dict[str, Any] = {}
    measured: dict[str, str] = {}
    for name in AMOUNTS:
        values = [getattr(usage, name) for usage in usages]
        if name == "peak_memory_bytes":
            totals[name] = max((value for value in values if value is not None), default=None)
        else:
            totals[name] = None if None in values else sum(values)
        is_known = totals[name] is not None
        words = [usage.measured.get(name, "") for usage in usages if (getattr(usage, name) is not None) == is_known]
        if text := "; ".join(word for word in dict.fromkeys(words) if word):
            measured[name] = text
    last = usages[-1]
    return Usage(disk_bytes=last.disk_bytes, files=last.files, exceeded=last.exceeded, measured=measured, **totals)
