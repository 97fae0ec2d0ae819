"""The note that an attempt leaves with its sandbox for a restart of the node, and the continuation from it.

Laws
- An attempt is adopted from harness start until grading starts in the agent's own sandbox: a second grading there could
  see the files of the first. Grading in a clean runtime is simply repeated.
- The note is in the keeper's memory and is lost with the sandbox. It contains the digest of the session's key, never
  the key, and no calls that the journal has.
- The token streams come from the journal: a session's records were durable before they were answered.
- An agent that runs in the node's process ends with it, and so do a session's environments: there is no note, and the
  session is retried.
- RUN's budget continues from its last report, not counting the time that the node was down.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable

import msgspec

from gangline.domain.contracts import AgentRun, Launch
from gangline.domain.errors import Failure
from gangline.domain.lifecycle import Outcome
from gangline.domain.sandbox import ExecRequest, ExecResult, Sandbox
from gangline.domain.session import HarnessExit, Lease, StageTiming
from gangline.domain.usage import Usage
from gangline.node.backends.gate import GateMeter
from gangline.sandbox.keeper.kept import KeptSandbox
from gangline.store.journal.log import AttemptKey

log = logging.getLogger("gangline.node")

RESTARTED = Failure(
    boundary="node",
    code="node_restarted",
    message="the node died while the session ran; its completed calls are kept",
    retryable=True,
)


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How RUN ended, and its verdict."""

    outcome: Outcome
    failure: Failure | None
    harness_exit: HarnessExit | None
    artifacts: dict[str, bytes]
    ended_at: float
    """Unix time, UTC, seconds."""
    usage: Usage | None = None
    """Resource use of the agent's sandbox in RUN; None if there was no sandbox."""


class RunClock:
    """Measures how much of RUN's budget is used, not counting time that the gate held the session or the node was
    down."""

    def __init__(self, meter: GateMeter, spent_before_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._clock = clock
        self._began = clock() - spent_before_s - meter.held_s

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began - self._meter.held_s


class AttemptNote(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about an attempt in RUN or POSTRUN that the journal does not contain."""

    lease: Lease
    key_digest: bytes
    timings: tuple[StageTiming, ...]
    """Timings of the stages that have ended."""
    entered_at: float
    """When its stage began; Unix time, UTC, seconds."""
    ended: RunEnd | None = None
    """None while it is in RUN."""
    images: dict[str, str] = {}
    """See `SessionResult.images`."""


async def adoptable(
    kept: Iterable[KeptSandbox], unclosed: Collection[AttemptKey], finished: Collection[AttemptKey]
) -> list[tuple[AttemptNote, KeptSandbox]]:
    """Returns the attempts from before the restart that can continue. Stops every other kept sandbox.

    unclosed: attempts whose end is not in the journal. finished: attempts whose result is being delivered.
    """
    found: list[tuple[AttemptNote, KeptSandbox]] = []
    for sandbox in kept:
        note = _read(sandbox)
        key = None if note is None else AttemptKey(note.lease.session_id, note.lease.attempt)
        if note is not None and key in unclosed and key not in finished:
            found.append((note, sandbox))
        else:
            await sandbox.stop()
    return found


def _read(sandbox: KeptSandbox) -> AttemptNote | None:
    try:
        return msgspec.msgpack.decode(sandbox.note or b"", type=AttemptNote)
    except msgspec.MsgspecError as error:
        log.error("session.not_adopted runtime=%s message=%s", sandbox.runtime_id, error)
        return None


async def run_harness(
    sandbox: Sandbox, launch: Launch | AgentRun, note: AttemptNote | None, max_output_bytes: int
) -> ExecResult:
    """Run the harness to its end. It survives a restart of the node if the sandbox can and the agent is not in the
    node.

    note: None if the session cannot continue after a restart.
    """
    if not isinstance(launch, Launch):
        return await launch()
    request = ExecRequest(command=launch.command, env=launch.env, stdin=launch.stdin, max_output_bytes=max_output_bytes)
    if note is None or not isinstance(sandbox, KeptSandbox):
        return await sandbox.run(request)
    return await sandbox.run_lasting(request, msgspec.msgpack.encode(note))


async def rejoin(sandbox: Sandbox) -> ExecResult:
    """Returns the result of a harness that was started before the node's restart. Raises: RuntimeFailed."""
    assert isinstance(sandbox, KeptSandbox)
    return await sandbox.rejoin()


async def annotate(sandbox: Sandbox, note: AttemptNote | None) -> None:
    """Replace the note for a restart of the node; None removes it. Raises: RuntimeFailed."""
    if isinstance(sandbox, KeptSandbox):
        await sandbox.annotate(None if note is None else msgspec.msgpack.encode(note))


def tell_spent(sandbox: Sandbox, spent_s: float) -> None:
    """Report how much of RUN's budget is used, for a restart of the node."""
    if isinstance(sandbox, KeptSandbox):
        sandbox.tell_spent(spent_s)
