"""Polar's `prefix_merging` as it is published, restated from its description.

Source: Polar (arXiv 2605.24220), 3.4.2; the description at the top of
`src/polar/trajectory/builder/prefix_merging.py` of NVIDIA-NeMo/ProRL-Agent-Server, at 93a0f75. It says:

- A call joins the chain whose last prompt its own prompt begins with; of several, the one with the longest last prompt.
  Only prompts are compared. A call that joins none begins a chain.
- A chain's end of turn is the last sampled id of its first reply that ended by itself, unless one is configured.
- A row is a chain: the first prompt, then sampled ids, and between two replies what follows the first end of turn in
  the rest of the later prompt, with that end where the reply lacks it.
- Where that rest has no end of turn, the row ends; the chain's later calls are in no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["LoggedCall", "PublishedRow", "published_rows"]


@dataclass(frozen=True)
class LoggedCall:
    """What an engine read and sampled."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    ended: bool
    """By itself, not by a limit."""


@dataclass
class PublishedRow:
    """`places`: (number of the call, where its first sampled id is in `response_ids`)."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list[int])
    loss_mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    dropped: list[int] = field(default_factory=list[int])
    """Numbers of the chain's calls that are in no row."""

    def _add_context(self, ids: list[int]) -> None:
        self.response_ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def _add_reply(self, number: int, call: LoggedCall) -> None:
        self.places.append((number, len(self.response_ids)))
        self.response_ids += call.sampled_ids
        self.loss_mask += [1] * len(call.sampled_ids)
        self.logprobs += call.logprobs

    @classmethod
    def of_chain(cls, calls: Sequence[LoggedCall], chain: Sequence[int], end_id: int | None) -> PublishedRow:
        row = cls(list(calls[chain[0]].prompt_ids))
        row._add_reply(chain[0], calls[chain[0]])
        for position, (before, number) in enumerate(pairwise(chain), 1):
            context = _context_between(calls[before], calls[number], end_id)
            if context is None:
                row.dropped = list(chain[position:])
                break
            row._add_context(context)
            row._add_reply(number, calls[number])
        return row


def published_rows(calls: Sequence[LoggedCall], end_id: int | None = None) -> list[PublishedRow]:
    """calls: of one session, in the order in which they ended. end_id: the configured end of turn."""
    chains: list[list[int]] = []
    for number, call in enumerate(calls):
        tips = [chain for chain in chains if _begins_with(call.prompt_ids, calls[chain[-1]].prompt_ids)]
        if tips:
            max(tips, key=lambda chain: len(calls[chain[-1]].prompt_ids)).append(number)
        else:
            chains.append([number])
    return [
        PublishedRow.of_chain(calls, chain, _end_of_turn(calls, chain) if end_id is None else end_id)
        for chain in chains
    ]


def _begins_with(prompt: list[int], start: list[int]) -> bool:
    return bool(start) and prompt[: len(start)] == start


def _end_of_turn(calls: Sequence[LoggedCall], chain: Sequence[int]) -> int | None:
    return next((calls[one].sampled_ids[-1] for one in chain if calls[one].ended and calls[one].sampled_ids), None)


def _context_between(before: LoggedCall, call: LoggedCall, end_id: int | None) -> list[int] | None:
    rest = call.prompt_ids[len(before.prompt_ids) :]
    if end_id not in rest:
        return None
    end = rest.index(end_id)
    return rest[end + 1 :] if before.sampled_ids[-1:] == [end_id] else rest[end:]
