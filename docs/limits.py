"""The page of limits: every figure is read from the code that holds it."""

from __future__ import annotations

from gangline.domain.ids import ID_PATTERN
from gangline.domain.task import MAX_DEPTH, MAX_SAMPLES, LimitsSpec
from gangline.node.calls.reading.body import REFUSED_EVERY_S
from gangline.node.control import sessions as control_sessions
from gangline.node.external import sessions as external
from gangline.node.health import disk_guard
from gangline.node.sessions.harness import run as harness_run
from gangline.sandbox.bubblewrap import command_line as bubblewrap
from gangline.sandbox.network import relay
from gangline.server import app
from gangline.server.routes import events as event_routes
from gangline.server.routes import nodes as node_routes
from gangline.server.service import core as service
from gangline.settings.node import CallLimits
from gangline.store import audit as actions
from gangline.wire.http.listening import LIMITS
from gangline.wire.http.negotiation import MAX_CONTROL_BYTES
from gangline.wire.http.query import MAX_WAIT_S

_INTRODUCTION = """\
# Limits

Limits on requests of strangers, agents and clients, and the answer beyond each limit. Errors are problem+json with
`code`; on the routes of models they have the shape of the provider whose API was called. `LimitExceeded` is 413
(`limit_exceeded`), `TooMany` 429 (`too_many`, retryable), `RequestTimeout` 408 (`request_timeout`). `--call-limits`
sets the names in brackets.
"""


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size and num_bytes % size == 0:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes:,} bytes"


def _call_rows() -> list[tuple[str, str, str]]:
    limits = CallLimits()
    return [
        ("a model call: body, decompressed (`max_body_bytes`)", _size(limits.max_body_bytes), "413"),
        ("its messages (`max_messages`)", f"{limits.max_messages:,}", "413"),
        ("its content parts (`max_parts`)", f"{limits.max_parts:,}", "413"),
        ("its tools (`max_tools`)", f"{limits.max_tools:,}", "413"),
        ("any other field (`max_definition_bytes`)", _size(limits.max_definition_bytes), "413"),
        ("a session's calls in flight: bodies (`max_in_flight_bytes`)", _size(limits.max_in_flight_bytes), "429"),
        ("a session's calls after one of these answers", f"one every {REFUSED_EVERY_S:g} s", "the next ones wait"),
    ]


def _rows() -> list[tuple[str, list[tuple[str, str, str]]]]:
    before = [
        (
            "connections to one address",
            f"{LIMITS.max_connections:,}, or a quarter of the files that the process may have open",
            "one without a request gives way, first those that never had one; where there is none: 503 `too_many`",
        ),
        ("first line of a request, its query included", _size(LIMITS.max_line_bytes), "400"),
        ("one header", _size(LIMITS.max_header_bytes), "400"),
        ("headers of a request", f"{LIMITS.max_headers}", "400"),
        ("the head of a connection's first request", f"{LIMITS.head_s:g} s", "disconnected"),
        ("a connection without another request; the head of that", f"{LIMITS.idle_s:g} s", "disconnected"),
        ("nothing is read of an answer that waits", f"{LIMITS.answer_idle_s:g} s", "disconnected"),
        ("nothing comes of a body", f"{LIMITS.body_idle_s:g} s", "408"),
        ("a body in all", f"{LIMITS.body_s:g} s", "408"),
    ]
    server = [
        ("body of a submit", _size(app.MAX_TASK_BYTES), "413"),
        ("sessions in one submit", f"{service.MAX_SESSIONS_AT_ONCE:,}", "413, nothing is accepted"),
        ("samples of a task", f"{MAX_SAMPLES:,}", "400"),
        ("depth of a task's free fields", f"{MAX_DEPTH}", "400"),
        ("a node's result", _size(app.MAX_RESULT_BYTES), "413"),
        ("any other body", _size(MAX_CONTROL_BYTES), "413"),
        ("sessions in one lease call", f"{node_routes.MAX_SESSIONS:,}", "no more are given"),
        ("event streams", f"{event_routes.MAX_STREAMS:,}", "429"),
        ("one long poll", f"{MAX_WAIT_S:g} s", "answered then; ask again"),
        ("an id", f"`{ID_PATTERN}`", "400"),
        ("log of actions", f"{actions.MAX_FILES} files of {_size(actions.MAX_FILE_BYTES)}", "the oldest goes"),
    ]
    node = [
        *_call_rows(),
        ("body of `/generate`", _size(control_sessions.MAX_GENERATE_BYTES), "413"),
        ("any other body", _size(MAX_CONTROL_BYTES), "413"),
        ("open external sessions", f"{external.MAX_OPEN:,}", "429"),
        ("`metadata` of a session, `info` of a claim", _size(external.MAX_STRANGER_BYTES), "400"),
        ("one long poll", f"{MAX_WAIT_S:g} s", "answered then; ask again"),
        (
            "free space of the data folder's disk (`--disk-reserve`)",
            f"{_size(disk_guard.DEFAULT_RESERVE_BYTES)}, or {disk_guard.MAX_SHARE:.0%} of a smaller disk",
            "no session is taken; below half of it the agent with the largest sandbox is ended (`disk_limit`)",
        ),
        (
            "files that the data folder's disk can still take",
            f"{disk_guard.RESERVE_FILES:,}, or {disk_guard.MAX_SHARE:.0%} of a smaller disk's; none without the above",
            "the same",
        ),
        ("connections out of one sandbox", f"{relay.MAX_CONNECTIONS}", "the next one is closed"),
        (
            "output of a harness that is kept, each stream",
            _size(harness_run.MAX_LOG_BYTES),
            "later output is dropped",
        ),
        ("log files of a harness that are kept", f"{harness_run.MAX_FILES}", "the others are left out"),
        ("each of them", _size(harness_run.MAX_FILE_BYTES), "only the end is kept"),
    ]
    usual = LimitsSpec()
    assert usual.memory_bytes is not None
    assert usual.disk_bytes is not None
    assert usual.max_files is not None
    sandbox = [
        (
            "`memory_bytes`",
            _size(usual.memory_bytes),
            "its largest process is ended, or gets no more; an agent that is: `memory_limit`",
        ),
        ("`cpus`", f"{usual.cpus:g}", "it waits"),
        ("`max_pids`", f"{usual.max_pids}", "no process is started"),
        ("`disk_bytes`", _size(usual.disk_bytes), "its processes are ended: `agent_error`, `disk_limit`"),
        ("`max_files`", f"{usual.max_files:,}", "the same"),
        ("`max_file_bytes`", "as `disk_bytes`", "the write fails (SIGXFSZ)"),
        ("/dev/shm", _size(bubblewrap.SHM_BYTES), "the write fails (ENOSPC)"),
    ]
    return [
        ("Server and node, before authentication", before),
        ("Server", server),
        ("Node", node),
        ("Sandbox, where its task names no others in `runtime.limits`", sandbox),
    ]


def limits() -> str:
    """docs/reference/limits.md"""
    parts = [_INTRODUCTION]
    for title, rows in _rows():
        parts += [f"## {title}\n", "| subject | limit | beyond it |\n|---|---|---|"]
        parts += [f"| {what} | {limit} | {told} |" for what, limit, told in rows]
        parts.append("")
    parts.append(_MORE)
    return "\n".join(parts)


_MORE = """\
A task sets further limits for its own agent (time, turns, tokens). `limits()` reports with each result the limits of
a sandbox that its runtime enforces, and their mechanism: [runtimes](../guides/runtimes.md#limits).
"""
