"""The published merging alongside ours, over one recorded session: rows, and what became of each sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gangline.domain.trajectory import Trace
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from support.merging.published import PublishedRow, published_rows
from support.merging.sessions import Recorded

__all__ = ["Row", "Tally", "as_row", "ours", "published", "tally"]


@dataclass(frozen=True)
class Row:
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    """As float32, which is what rows hold."""
    places: tuple[tuple[int, int], ...]
    """(number of the call, where its first sampled id is in `response_ids`)."""


@dataclass
class Tally:
    """Numbers of rows and sampled tokens."""

    rows: int = 0
    lost: int = 0
    """Sampled tokens that no row trains."""
    elsewhere: int = 0
    """Trained behind other ids than the engine had read."""

    def __iadd__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, self.lost + other.lost, self.elsewhere + other.elsewhere)


def published(recorded: Recorded) -> list[PublishedRow]:
    return published_rows(recorded.log)


def as_row(row: PublishedRow) -> Row:
    values = np.asarray(row.logprobs, np.float32).tolist()
    return Row(tuple(row.prompt_ids), tuple(row.response_ids), tuple(row.loss_mask), tuple(values), tuple(row.places))


def ours(recorded: Recorded, on_divergence: Literal["split", "splice"]) -> list[Row]:
    builder = PrefixMergingBuilder(PrefixMergingConfig(on_divergence=on_divergence))
    numbers = {completion.completion_id: number for number, completion in enumerate(recorded.tree)}
    built = builder.build(recorded.tree, session_id="session", task_id="task")
    return [_of_trace(trace, numbers) for trace in built.traces]


def _of_trace(trace: Trace, numbers: dict[str, int]) -> Row:
    return Row(
        tuple(trace.prompt_ids.tolist()),
        tuple(trace.response_ids.tolist()),
        tuple(trace.loss_mask.tolist()),
        tuple(trace.response_logprobs.tolist()),
        tuple((numbers[span.completion_id], span.start) for span in trace.spans),
    )


def tally(recorded: Recorded, rows: Sequence[Row]) -> Tally:
    found = Tally(rows=len(rows))
    kept = 0
    for row in rows:
        for number, start in row.places:
            call = recorded.log[number]
            num_kept = sum(row.loss_mask[start : start + len(call.sampled_ids)])
            kept += num_kept
            is_behind = [*row.prompt_ids, *row.response_ids[:start]] == call.prompt_ids
            found.elsewhere += 0 if is_behind else num_kept
    found.lost = sum(len(call.sampled_ids) for call in recorded.log) - kept
    return found
