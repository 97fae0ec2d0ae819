"""Log files of a harness's program in its HOME: kept as artifacts, bounded, and not trusted.

They are read by a command in the sandbox, so they show no more than the agent could read; only regular files are read.
Of a long file the end is kept, where a failed run reports its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gangline.domain.contracts import RuntimeHandle
from gangline.domain.errors import GanglineError

__all__ = ["MAX_FILES", "MAX_FILE_BYTES", "collect_logs"]

log = logging.getLogger("gangline.node")

MAX_FILES = 16
MAX_FILE_BYTES = 128 << 10
_TIMEOUT_S = 10.0
_MAX_NAMES_BYTES = 64 << 10

# Patterns are the adapter's, and are expanded here; names that come out of them are the agent's, and never are.
_LIST = 'cd && for name in {patterns}; do [ -f "$name" ] && [ ! -L "$name" ] && printf "%s\\0" "$name"; done; true'


async def collect_logs(handle: RuntimeHandle, patterns: Sequence[str]) -> dict[str, bytes]:
    """Artifact name (`harness.logs/` and the path in HOME) -> content. Never raises a runtime's error: an unavailable
    log is no reason to lose a session."""
    found: dict[str, bytes] = {}
    try:
        for name in await _names(handle, patterns):
            result = await handle.exec(
                ["tail", "-c", str(MAX_FILE_BYTES), "--", name],
                cwd=handle.home,
                timeout_s=_TIMEOUT_S,
                max_output_bytes=MAX_FILE_BYTES,
            )
            if result.ok:
                found[f"harness.logs/{name}"] = result.stdout
    except GanglineError as error:
        log.warning("harness.logs_failed runtime=%s message=%s", handle.runtime_id, error)
    return found


async def _names(handle: RuntimeHandle, patterns: Sequence[str]) -> list[str]:
    if not patterns:
        return []
    listing = _LIST.format(patterns=" ".join(patterns))
    result = await handle.exec(listing, timeout_s=_TIMEOUT_S, max_output_bytes=_MAX_NAMES_BYTES)
    names = [name.decode() for name in result.stdout.split(b"\0")[:-1] if _is_text(name)]
    return names[:MAX_FILES]


def _is_text(name: bytes) -> bool:
    try:
        return name.decode().isprintable()
    except UnicodeDecodeError:
        return False
