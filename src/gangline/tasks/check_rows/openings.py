"""How turns begin: a header that was trained as if it had been sampled has log-probs of exactly 0.0.

So do the first tokens of a model that is sure of them. The rest of the file decides: where log-probs of 0.0 are rare,
several at the beginning of a turn are no chance.
"""

from __future__ import annotations

import numpy as np

from gangline.tasks.check_rows.kinds import KINDS, Finding
from gangline.tasks.check_rows.samples import Sample, spans_of

__all__ = ["Openings"]

_LEAST = 2
_CHANCE = 1e-3
"""Expected number of such beginnings in the whole file, from which on they may be chance."""
_KEPT = 10_000


class Openings:
    """Gathers the turns of a file; judges them at its end. Memory is bounded by the first suspicious ones."""

    def __init__(self) -> None:
        self._num_spans = self._num_tokens = self._num_zeros = 0
        self._found: list[tuple[int, Finding]] = []

    def add(self, sample: Sample) -> None:
        """Spans that have no other log-prob are `logprobs_zero`, or say nothing."""
        if sample.logprobs is None:
            return
        for start, end in spans_of(sample.mask):
            part = sample.logprobs[start:end]
            others = np.flatnonzero(part)
            self._num_spans += 1
            if not len(others):
                continue
            num = int(others[0])
            self._num_tokens += len(part) - num
            self._num_zeros += len(part) - num - len(others)
            if num >= _LEAST and len(self._found) < _KEPT:
                self._found.append((num, _finding(sample, start, num)))

    def findings(self) -> list[Finding]:
        rate = (self._num_zeros + 0.5) / (self._num_tokens + 1)
        return [finding for num, finding in self._found if self._num_spans * rate**num < _CHANCE]


def _finding(sample: Sample, start: int, num: int) -> Finding:
    kind, detail = "header_trained", f"the turn begins with {num} log-probs of exactly 0.0"
    severity = KINDS[kind].severity
    return Finding(kind=kind, severity=severity, row=sample.row, sample=sample.number, position=start, detail=detail)
