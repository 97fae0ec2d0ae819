"""Harbor's health check as a prepare action, with the same retries: failures in the start period are not counted."""

from __future__ import annotations

import math
import shlex
from typing import Any

from gangline.interop.harbor.tasks.config import HarborHealthcheck

_LOOP = """
ends=$(($(date +%s) + {start_period})); failures=0
while :; do
  now=$(date +%s)
  timeout {timeout} sh -c {command} && exit 0
  if [ "$now" -lt "$ends" ]; then sleep {start_interval}; continue; fi
  failures=$((failures + 1))
  [ "$failures" -lt {retries} ] || {{ echo "unhealthy: $failures checks failed" >&2; exit 1; }}
  sleep {interval}
done
"""
_MARGIN_S = 10.0


def healthcheck_action(check: HarborHealthcheck) -> dict[str, Any]:
    """A `runtime.prepare` action that fails INIT if the environment does not become healthy."""
    command = _LOOP.format(
        start_period=math.ceil(check.start_period_sec),
        timeout=int(check.timeout_sec),
        command=shlex.quote(check.command),
        start_interval=f"{check.start_interval_sec:g}",
        retries=check.retries,
        interval=f"{check.interval_sec:g}",
    )
    starting_s = check.start_period_sec + check.start_interval_sec + check.timeout_sec
    counted_s = max(1, check.retries) * (check.interval_sec + check.timeout_sec)
    return {"type": "exec", "command": command, "timeout_seconds": starting_s + counted_s + _MARGIN_S}
