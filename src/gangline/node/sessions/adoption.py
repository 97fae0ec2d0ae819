"""The note that an attempt leaves with its sandbox for the node's next start, and the continuation of the attempt.

Laws
- An attempt is adopted from the begin of its harness to the begin of an evaluation that works in the agent's own
  sandbox: a second evaluation there could see the files of the first. In a clean runtime it is simply repeated.
- The note lies in the keeper's memory and is gone with the sandbox. It has the digest of the session's key, never the
  key; calls that the journal has are not in it.
- The token streams are the journal's: a session's records were durable before they were answered.
- An agent that runs in the node dies with it, and so do a session's environments: there is no note, and the session is
  retried.
- RUN's budget continues from its last report, without the time that the node was away.
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
    """How RUN ended, and was judged."""

    outcome: Outcome
    failure: Failure | None
    harness_exit: HarnessExit | None
    artifacts: dict[str, bytes]
    ended_at: float
    """Unix time, UTC, seconds."""
    usage: Usage | None = None
    """Resources of the agent's sandbox until then; None where it had none."""


class RunClock:
    """How much of RUN's budget is used: without the time that the gate held the session, or that the node was away."""

    def __init__(self, meter: GateMeter, spent_before_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._clock = clock
        self._began = clock() - spent_before_s - meter.held_s

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began - self._meter.held_s


class AttemptNote(msgspec.Struct, frozen=True, kw_only=True):
    """All that the journal does not know of an attempt in RUN, or in POSTRUN."""

    lease: Lease
    key_digest: bytes
    timings: tuple[StageTiming, ...]
    """Timings of the stages that are over."""
    entered_at: float
    """When its stage began; Unix time, UTC, seconds."""
    ended: RunEnd | None = None
    """None while it is in RUN."""


async def adoptable(
    kept: Iterable[KeptSandbox], unclosed: Collection[AttemptKey], finished: Collection[AttemptKey]
) -> list[tuple[AttemptNote, KeptSandbox]]:
    """Attempts of the node's earlier life that can continue; any other kept sandbox is stopped.

    unclosed: attempts whose end the journal does not have. finished: those whose result is on its way.
    """
    found: list[tuple[AttemptNote, KeptSandbox]] = []
    for handle in kept:
        note = _read(handle)
        key = None if note is None else AttemptKey(note.lease.session_id, note.lease.attempt)
        if note is not None and key in unclosed and key not in finished:
            found.append((note, handle))
        else:
            await handle.stop()
    return found


def _read(handle: KeptSandbox) -> AttemptNote | None:
    try:
        return msgspec.msgpack.decode(handle.note or b"", type=AttemptNote)
    except msgspec.MsgspecError as error:
        log.error("session.not_adopted runtime=%s message=%s", handle.runtime_id, error)
        return None


async def run_harness(
    handle: Sandbox, launch: Launch | AgentRun, note: AttemptNote | None, max_output_bytes: int
) -> ExecResult:
    """The harness's whole run; where the sandbox can outlive the node, so does it, unless the agent is in the node.

    note: None where the session cannot continue in the node's next life.
    """
    if not isinstance(launch, Launch):
        return await launch()
    request = ExecRequest(command=launch.command, env=launch.env, stdin=launch.stdin, max_output_bytes=max_output_bytes)
    if note is None or not isinstance(handle, KeptSandbox):
        return await handle.run(request)
    return await handle.run_lasting(request, msgspec.msgpack.encode(note))


async def rejoin(handle: Sandbox) -> ExecResult:
    """The end of a harness that an earlier life of the node began. Raises: RuntimeFailed."""
    assert isinstance(handle, KeptSandbox)
    return await handle.rejoin()


async def annotate(handle: Sandbox, note: AttemptNote | None) -> None:
    """Change the note for the node's next start; with None there is none. Raises: RuntimeFailed."""
    if isinstance(handle, KeptSandbox):
        await handle.annotate(None if note is None else msgspec.msgpack.encode(note))


def tell_spent(handle: Sandbox, spent_s: float) -> None:
    """Pass on to the node's next life how much of RUN's budget is used."""
    if isinstance(handle, KeptSandbox):
        handle.tell_spent(spent_s)
