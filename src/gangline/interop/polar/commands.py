"""Shell commands with their own folder, environment and retries, and additions to a task's objects; pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, cast

_LONGEST_REST_S = 5.0


def added(fields: dict[str, Any], name: str, more: Mapping[str, Any], *, wins: bool = False) -> None:
    """Merge `more` into the object of that name. A value that is not an object stays, and validation will refuse it.

    wins: for duplicate keys `more` wins; else the existing value.
    """
    own = fields.get(name, {})
    if isinstance(own, dict):
        fields[name] = {**cast("dict[str, Any]", own), **more} if wins else {**more, **cast("dict[str, Any]", own)}


def surrounded(command: str, cwd: Any, env: Mapping[str, Any]) -> str:
    """The command with its folder and environment set."""
    exports = [f"export {name}={shlex.quote(str(value))}" for name, value in env.items()]
    entered = [] if cwd is None else [f"cd {shlex.quote(str(cwd))} || exit"]
    return "\n".join((*entered, *exports, command))


def attempted(command: str, attempts: int, rest_s: float) -> str:
    """The command, retried until it succeeds. Source: Polar's gateway: delays double, up to five seconds."""
    rests = [min(rest_s * 2**number, _LONGEST_REST_S) for number in range(attempts - 1)]
    again = [f'if [ $status != 0 ]; then sleep {rest:g}; sh -c "$step"; status=$?; fi' for rest in rests]
    return "\n".join((f"step={shlex.quote(command)}", 'sh -c "$step"; status=$?', *again, "exit $status"))
