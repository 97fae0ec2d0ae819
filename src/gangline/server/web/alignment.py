"""Aligns the samples of a task: their common beginning, and how each continues.

The tokens of each sample's own calls are compared, without sub-agents: new tokens of each prompt, and its reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np

from gangline.domain.lifecycle import Outcome
from gangline.domain.tokens import TokenIds, common_prefix_len
from gangline.server.web.outline import OpenedSession
from gangline.server.web.tokens import TokenBytes

_SHOWN_IDS = 40


class AlignedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One of a sample's own calls."""

    number: int
    preview: str
    """The beginning of the reply's text, on one line."""
    tools: tuple[str, ...]
    num_sampled_ids: int


class AlignedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample, from the point where the samples differ."""

    session_id: str
    sample_index: int
    outcome: Outcome | None
    reward: float | None
    advantage: float | None
    """Reward minus the mean of the samples with a reward."""
    num_calls: int
    num_sampled_ids: int
    leaves_in_call: int | None
    """Number of the first call in which the samples differ; None if this sample ends earlier."""
    leaves_at_token: int | None
    """Index of the first differing token in that call's tokens: new context, then sampled ids."""
    is_sampled: bool
    """Whether that token was sampled; otherwise the prompts differ."""
    next_ids: tuple[int, ...]
    """The following tokens, at most 40."""
    next_text: str
    """Their text; empty if unknown."""
    nearest: int | None
    """Index of the earlier sample with the longest common beginning; None for the first."""
    num_like_nearest: int
    """Number of tokens in common with it."""
    calls: tuple[AlignedCall, ...]
    """From the first differing call on."""


class AlignedSamples(msgspec.Struct, frozen=True, kw_only=True):
    """A group, or a part of it."""

    task_id: str
    num_alike_ids: int
    """Number of tokens with which all of these samples begin."""
    samples: tuple[AlignedSample, ...]


def align(task_id: str, group: Sequence[tuple[int, OpenedSession, TokenBytes]]) -> AlignedSamples:
    """group: (sample index, session, known bytes of its token ids). Blocking; milliseconds per million tokens."""
    ids = [_own_ids(session) for _, session, _ in group]
    num_alike = min((common_prefix_len(ids[0], other) for other in ids), default=0)
    rewards = [session.outline.reward for _, session, _ in group if session.outline.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    samples: list[AlignedSample] = []
    for position, (index, session, known) in enumerate(group):
        likeness = [(common_prefix_len(ids[position], ids[other]), group[other][0]) for other in range(position)]
        num_like, nearest = max(likeness, key=lambda found: found[0], default=(0, None))
        samples.append(_aligned(index, session, known, ids[position], num_alike, mean, nearest, num_like))
    return AlignedSamples(task_id=task_id, num_alike_ids=num_alike, samples=tuple(samples))


def _aligned(
    index: int,
    session: OpenedSession,
    known: TokenBytes,
    ids: TokenIds,
    num_alike: int,
    mean: float | None,
    nearest: int | None,
    num_like: int,
) -> AlignedSample:
    outline = session.outline
    lines = [outline.calls[number] for number in _own_calls(session)]
    ends = list(accumulate(line.num_new_ids + line.num_sampled_ids for line in lines))
    at = next((position for position, end in enumerate(ends) if end > num_alike), None)
    token = None if at is None else num_alike - (ends[at - 1] if at else 0)
    following = ids[num_alike : num_alike + _SHOWN_IDS].tolist()
    return AlignedSample(
        session_id=outline.session_id,
        sample_index=index,
        outcome=outline.outcome,
        reward=outline.reward,
        advantage=None if outline.reward is None or mean is None else outline.reward - mean,
        num_calls=len(outline.calls),
        num_sampled_ids=sum(line.num_sampled_ids for line in outline.calls),
        leaves_in_call=None if at is None else lines[at].number,
        leaves_at_token=token,
        is_sampled=at is not None and token is not None and token >= lines[at].num_new_ids,
        next_ids=tuple(following),
        next_text=b"".join(known.get(one, b"") for one in following).decode(errors="replace"),
        nearest=nearest,
        num_like_nearest=num_like,
        calls=tuple(
            AlignedCall(
                number=line.number, preview=line.preview, tools=line.tools, num_sampled_ids=line.num_sampled_ids
            )
            for line in lines[len(lines) if at is None else at :]
        ),
    )


def _own_calls(session: OpenedSession) -> list[int]:
    """Numbers of the calls with the same role as the first."""
    lines = session.outline.calls
    return [line.number for line in lines if line.role == lines[0].role]


def _own_ids(session: OpenedSession) -> TokenIds:
    calls = [session.calls[number] for number in _own_calls(session)]
    pieces = [ids for call in calls for ids in (call.prompt_suffix_ids, call.sampled_ids)]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
