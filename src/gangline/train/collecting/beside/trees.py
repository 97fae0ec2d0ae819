"""Trees: sessions of a group are forked at some of their turns, and the forks join the group.

The turns to sample again are chosen by the entropy of their tokens, estimated from the sampled log-probs, or evenly.
Earlier calls are replayed from the record, so only later calls cost sampled tokens. Algorithms with `branches` credit
the turns that sessions share. Sources: Tree-GRPO (arXiv 2509.21240), TreeRL (arXiv 2506.11902: entropy).

Laws: ids of fork tasks are derived from their sessions' ids, so a restarted trainer finds them again. A fork that
cannot be made or is not valid is left out and logged; the group is then compared as if it had not been tried. First
turns are not sampled again: that would be just another session of the task.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
from pydantic import Field

from gangline.domain.errors import Conflict, GanglineError, NotFound
from gangline.domain.session import SessionResult
from gangline.domain.views import Submitted
from gangline.machine.event_loop import call_all
from gangline.rows.forks.calls import REPLAYED, RecordedCall, recorded_calls
from gangline.train.collecting.groups import Fork, Group, why_invalid
from gangline.train.options import TrainingOptions
from gangline.wire.client.rollouts import RolloutClient, answered

_log = logging.getLogger(__name__)


class TreeSettings(TrainingOptions):
    branches: int = Field(default=2, ge=1)
    """Forks per chosen state."""
    turns: int = Field(default=1, ge=1)
    """Turns per session that are sampled again in each round."""
    choose: Literal["entropy", "evenly"] = "entropy"
    """entropy: turns whose sampled tokens had the largest mean surprise. evenly: spread over the session."""
    rounds: int = Field(default=1, ge=1, le=8)
    """From the second round on, forks are forked too."""
    max_sampled_tokens: int | None = Field(default=None, ge=1)
    """Budget of a group, including its first sessions: a fork is made if it fits, assuming it samples as many tokens as
    its parent did from that turn on. None: every chosen state is forked.
    """


class State(NamedTuple):
    """A session before one of its turns."""

    session_id: str
    turn: int
    """The last call that forks replay, from 1; the call after it is sampled again."""
    samples: int
    num_turns: int
    """Turns in the session's traces up to `turn`."""


class ForkingClient(RolloutClient, Protocol):
    async def fork(self, session_id: str, turn: int, *, samples: int = 1, task_id: str | None = None) -> Submitted: ...


class TreeRuns:
    """The forks of all tasks of one run."""

    def __init__(self, service: ForkingClient, settings: TreeSettings, *, retry_s: float = 0.5) -> None:
        self.service = service
        self.settings = settings
        self.retry_s = retry_s

    def of_task(self) -> TreeOfTask:
        return TreeOfTask(self)


class TreeOfTask:
    """The forks of one group, from its first sessions to the last round."""

    def __init__(self, runs: TreeRuns) -> None:
        self._runs = runs
        self._open = set[str]()
        """Tasks that the service may still be running."""

    async def grow(self, group: Group) -> Group:
        """The group with its valid forks appended. Raises: the service's errors."""
        done = set[tuple[str, int]]()
        for _ in range(self._runs.settings.rounds):
            states = chosen_states(group, self._runs.settings, done)
            done |= {(state.session_id, state.turn) for state in states}
            forks = await call_all([self._forked(state) for state in states])
            for state, sessions in zip(states, forks, strict=True):
                group = _with_forks(group, state, sessions)
        return group

    async def _forked(self, state: State) -> list[SessionResult]:
        runs, task_id = self._runs, f"{state.session_id}.t{state.turn}"
        self._open.add(task_id)  # before the call: it may reach the server even if it is cancelled here
        fork = partial(runs.service.fork, state.session_id, samples=state.samples, task_id=task_id)
        try:
            await answered(fork, state.turn, runs.retry_s)
        except (Conflict, NotFound) as error:
            self._open.discard(task_id)
            _log.warning("tree.not_forked session_id=%s turn=%d message=%s", state.session_id, state.turn, error)
            return []
        await runs.service.wait(task_id)
        sessions = await answered(runs.service.result, task_id, runs.retry_s)
        self._open.discard(task_id)
        return sessions

    async def cancel(self) -> None:
        """Cancel the tasks that the service may still be running."""
        for task_id in self._open:
            # Unknown, already gone, or the server does not answer: the sessions end by their own budgets.
            with contextlib.suppress(GanglineError):
                await self._runs.service.cancel(task_id)
        self._open.clear()


def _with_forks(group: Group, state: State, sessions: Sequence[SessionResult]) -> Group:
    reasons = {one.session_id: why for one in sessions if (why := why_invalid(one)) is not None}
    if reasons:
        _log.warning("tree.forks_left_out task_id=%s reasons=%s", group.task_id, reasons)
    valid = [one for one in sessions if one.session_id not in reasons]
    fork = Fork(state.session_id, state.num_turns)
    return replace(
        group,
        sessions=(*group.sessions, *valid),
        forks={**group.forks, **{one.session_id: fork for one in valid}},
    )


def num_own_sampled(session: SessionResult) -> int:
    """Tokens that engines sampled for the session, without replayed tokens, which were sampled for its parent."""
    return sum(len(one.sampled_ids) for one in session.completions if REPLAYED not in one.metadata)


def chosen_states(group: Group, settings: TreeSettings, done: set[tuple[str, int]] | None = None) -> list[State]:
    """The states to fork next. done: (session id, turn) of states that were already forked."""
    candidates = [one for session in group.sessions for one in _of_session(session, group, settings, done or set())]
    if settings.choose == "entropy":
        candidates.sort(key=lambda one: -one.surprise)
    if settings.max_sampled_tokens is None:
        return [one.state(settings.branches) for one in candidates]
    left = settings.max_sampled_tokens - sum(num_own_sampled(session) for session in group.sessions)
    states = list[State]()
    for one in candidates:
        samples = min(settings.branches, max(left, 0) // one.num_tokens)
        if samples:
            left -= samples * one.num_tokens
            states.append(one.state(samples))
    return states


class _Candidate(NamedTuple):
    session_id: str
    turn: int
    num_turns: int
    surprise: float
    """Nats per token of the call after the turn."""
    num_tokens: int
    """Tokens that the session sampled after the turn, at least 1."""

    def state(self, samples: int) -> State:
        return State(self.session_id, self.turn, samples, self.num_turns)


def _of_session(
    session: SessionResult, group: Group, settings: TreeSettings, done: set[tuple[str, int]]
) -> list[_Candidate]:
    found = [one for one in _candidates(session) if (one.session_id, one.turn) not in done]
    if settings.choose == "entropy":
        return sorted(found, key=lambda one: -one.surprise)[: settings.turns]
    num = min(settings.turns, len(found))
    return [found[int((number + 0.5) * len(found) / num)] for number in range(num)]


def _candidates(session: SessionResult) -> Iterator[_Candidate]:
    """Turns that the session sampled itself, except the first of them, in order."""
    calls = recorded_calls(session.completions)
    placed = _placed_ids(session)
    first_own = next((at for at, call in enumerate(calls) if not _is_repeated(call)), len(calls))
    for at in range(first_own + 1, len(calls)):
        yield _Candidate(
            session.session_id,
            at,
            sum(choice.completion_id in placed for call in calls[:at] for choice in call.choices),
            _surprise(calls[at]),
            max(1, sum(len(choice.sampled_ids) for call in calls[at:] for choice in call.choices)),
        )


def _placed_ids(session: SessionResult) -> set[str]:
    traces = () if session.trajectory is None else session.trajectory.traces
    return {span.completion_id for trace in traces for span in trace.spans}


def _is_repeated(call: RecordedCall) -> bool:
    return REPLAYED in call.first.metadata


def _surprise(call: RecordedCall) -> float:
    """Mean of -log p over the sampled tokens: estimates their entropy if sampling follows the policy."""
    logprobs = call.first.logprobs
    return float(-np.mean(logprobs)) if len(logprobs) else 0.0
