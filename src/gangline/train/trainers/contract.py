"""The contract with trainers: an adapter's input, its output, and its errors.

An adapter (`gangline.train.trainers`) turns groups into the batch type of its trainer. It keeps three promises:

    1. Nothing is lost, changed or put in another order: each trainable trace arrives once, with its exact ids, mask,
       log-probs, versions and reward, ordered by group, session and trace (as returned by `rows_of`). Content that the
       trainer's type cannot represent is rejected, not dropped. Turns whose log-probs do not belong to the distribution
       they were sampled from (top-p, penalties, grammars, raw log-probs at a temperature) are masked.
    2. An incomplete group is refused (`require_whole`) before the trainer receives any of it.
    3. If the trainer transfers its weights to the engines itself, the gates of all nodes are closed for the transfer
       and opened with the new version (`updating`). `gangline.train.weights.update` does all of it through a folder.

`gangline.testing.trainer_conformance` checks an adapter. Source: Polar and NeMo RL, the collector's boundary.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from gangline.domain.completion import CompletionTree
from gangline.domain.errors import InvalidGroup, NodeError
from gangline.domain.evidence.experts import EXPERTS
from gangline.domain.evidence.masks import MASKS
from gangline.domain.experts import ExpertArray, ExpertsMissing
from gangline.domain.lifecycle import Outcome
from gangline.domain.masks import SamplingMask
from gangline.domain.node_views import GateMode, GateState
from gangline.domain.session import SessionResult
from gangline.domain.tokens import Logprobs, LossMask, TokenIds, Versions
from gangline.domain.trajectory import Trace
from gangline.rows.comparability import scoring_temperature
from gangline.train.collecting.groups import (
    Group,
    require_no_images,
    require_no_masks,
    trainable_traces,
    why_invalid,
)

CONTRACT_VERSION = 3
"""Increases when existing adapters no longer fulfil the contract."""


@dataclass(frozen=True, eq=False)
class TrainerRow:
    """The data of one trace that a trainer must receive. Arrays except `prompt_ids` are [T], T = len(response_ids)."""

    task_id: str
    session_id: str
    trace_id: str
    prompt_ids: TokenIds
    """The whole prompt, even if the `tree` builder shared its beginning."""
    response_ids: TokenIds
    loss_mask: LossMask
    logprobs: Logprobs
    """As reported by the engine; 0.0 if masked."""
    versions: Versions
    """-1 if masked."""
    reward: float
    """The trace's own reward if the evaluator rewards traces separately, otherwise the session's. Shaping, credit and
    advantages are not applied; they belong to the algorithm.
    """
    session_reward: float
    """The session's reward, by which sessions of a group are compared."""
    outcome: Outcome
    """Outcome of the session."""
    trace: Trace
    """For other fields that a trainer can use. It has the whole prompt and the row's mask."""
    routed_experts: ExpertArray | None = None
    """[P + T - 1, layers, chosen] for prompt and response except the last token; None if no replay needs it."""
    sampling_mask: SamplingMask | None = None
    """The mask of the response's T tokens, with 0 ids where `loss_mask` is 0 or nothing was cut off; `logprobs` are
    relative to the kept ids. None if no replay needs it.
    """

    @classmethod
    def of(cls, trace: Trace, session: SessionResult, task_id: str) -> TrainerRow:
        """trace: with its whole prompt. session: must have a reward."""
        assert session.reward is not None
        return cls(
            task_id=task_id,
            session_id=session.session_id,
            trace_id=trace.trace_id,
            prompt_ids=trace.prompt_ids,
            response_ids=trace.response_ids,
            loss_mask=trace.loss_mask,
            logprobs=trace.response_logprobs,
            versions=trace.response_versions,
            reward=session.reward if trace.reward is None else trace.reward,
            session_reward=session.reward,
            outcome=session.outcome,
            trace=trace,
        )


class GroupSource(Protocol):
    """A collector (`gangline.train.collecting.collector`)."""

    async def collect(self, num_groups: int) -> list[Group]: ...


def require_whole(group: Group, num_samples: int) -> None:
    """num_samples: the task's number of sessions. Raises: InvalidGroup, with the problem of each session."""
    wrong = {one.session_id: why for one in group.sessions if (why := why_invalid(one)) is not None}
    times = Counter(session.session_id for session in group.sessions)
    wrong |= {session_id: f"it is there {number} times" for session_id, number in times.items() if number > 1}
    num_valid = len(times) - len(wrong)
    if num_valid == num_samples == len(group.sessions):
        return
    why = "; ".join(f"{session_id}: {reason}" for session_id, reason in wrong.items())
    raise InvalidGroup(
        f"{group.task_id} was refused before the trainer saw it: valid_sessions={num_valid} "
        f"group_sessions={num_samples} ({why or f'it has {len(group.sessions)} sessions'}). Judge groups as they are "
        "collected (`ValiditySettings`), and hand over those that are kept."
    )


def rows_of(
    group: Group,
    num_samples: int,
    *,
    temperature: float = 1.0,
    takes_images: bool = False,
    replays_experts: bool = False,
    replays_masks: bool = False,
) -> list[TrainerRow]:
    """The rows of a whole group, ordered by session and by trace as the session made them.

    temperature: the trainer's divisor of logits. takes_images: the adapter passes on the pixels of a row.
    replays_experts: the trainer routes tokens as they were routed during sampling. replays_masks: the trainer's
    log-probs are relative to the ids kept by top-k and top-p. Raises: as `require_whole`; InvalidGroup if log-probs are
    of another temperature, so that the trainer's would be of another distribution, if a row has images or masks that
    the adapter would drop, or if experts or masks to replay are not known.
    """
    require_whole(group, num_samples)
    rows = [row for session in group.sessions for row in _rows(group.task_id, session)]
    for row in rows:
        _require_temperature(row, temperature)
        if not takes_images:
            require_no_images(row.trace)
        if not replays_masks:
            require_no_masks(row.trace)
    for replay in [*([_mask] if replays_masks else []), *([_experts] if replays_experts else [])]:
        trees = {session.session_id: CompletionTree(session.completions) for session in group.sessions}
        rows = [replay(trees[row.session_id], row) for row in rows]
    return rows


def _mask(tree: CompletionTree, row: TrainerRow) -> TrainerRow:
    try:
        mask = MASKS.column(tree, row.trace).mask()
    except ValueError as why:
        raise InvalidGroup(f"{row.trace_id} cannot be trained with its sampling masks: {why}.") from why
    return replace(row, sampling_mask=mask.only(row.loss_mask != 0))


def _experts(tree: CompletionTree, row: TrainerRow) -> TrainerRow:
    try:
        return replace(row, routed_experts=EXPERTS.column(tree, row.trace).array())
    except ExpertsMissing as why:
        raise InvalidGroup(
            f"{row.trace_id} cannot be trained with replayed routing, for the experts of its tokens are not known: "
            f"{why}. Sample its task with capture.routed_experts, or switch the replay off."
        ) from why


def _require_temperature(row: TrainerRow, temperature: float) -> None:
    """Check that the row's log-probs are of this temperature."""
    for span, certificate in zip(row.trace.spans, row.trace.certificates, strict=True):
        if not row.loss_mask[span.start : span.end].any():
            continue
        what = f"{span.completion_id} in {row.trace_id}"
        certified = scoring_temperature(certificate)
        if not math.isclose(certified, temperature, rel_tol=1e-6):
            raise InvalidGroup(
                f"the log-probs of {what} are of temperature {certified:g}, and the trainer's are of {temperature:g}: "
                "train at the temperature that was sampled at, or set the nodes' sampling policy."
            )


def _rows(task_id: str, session: SessionResult) -> Iterator[TrainerRow]:
    if session.reward is not None:
        for trace in trainable_traces(session):
            yield TrainerRow.of(trace, session, task_id)


class Gate(Protocol):
    """A node's gate, such as `gangline.wire.client.NodeClient`."""

    async def pause(self, mode: GateMode = "drain", lease_s: float = 600.0) -> GateState: ...

    async def resume(self) -> GateState: ...

    async def set_version(self, version: int) -> GateState: ...


async def close_gates(gates: Sequence[Gate], *, lease_s: float = 600.0) -> None:
    """Hold new model calls and wait until calls in flight end, at all nodes at once.

    lease_s: after which gates open by themselves if the trainer dies. Raises: NodeError if a node does not drain in
    that time, ServerUnavailable if a node does not answer; the gates are then open again.
    """
    answers = await asyncio.gather(*(gate.pause("drain", lease_s) for gate in gates), return_exceptions=True)
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    states = [answer for answer in answers if not isinstance(answer, BaseException)]
    if not errors and all(state.is_drained for state in states):
        return
    await asyncio.gather(*(gate.resume() for gate in gates), return_exceptions=True)
    if errors:
        raise errors[0]
    raise NodeError(f"model calls were still in flight after {lease_s:g} s: give the update a longer lease.")


async def open_gates(gates: Sequence[Gate], *, version: int | None = None) -> None:
    """Resume model calls. version: the policy version of tokens sampled from now on, if it changed.

    Every gate is called, even if others fail. Raises: the first error.
    """
    answers = await asyncio.gather(*(_open(gate, version) for gate in gates), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer


async def _open(gate: Gate, version: int | None) -> None:
    if version is not None:
        await gate.set_version(version)
    await gate.resume()


@asynccontextmanager
async def updating(gates: Sequence[Gate], version: int, *, lease_s: float = 600.0) -> AsyncGenerator[None]:
    """Load weights inside the block: the gates are closed, and opened with the new version, or with the old one if
    loading fails.

    Raises: as `close_gates` and `open_gates`.
    """
    await close_gates(gates, lease_s=lease_s)
    try:
        yield
    except BaseException:
        await open_gates(gates)
        raise
    await open_gates(gates, version=version)
