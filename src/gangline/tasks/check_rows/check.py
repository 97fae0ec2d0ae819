"""Checks one file: converts records to samples, applies the rules, counts findings.

Also checks how turns begin: a header that was trained as if it had been sampled has log-probs of exactly 0.0, but so do
the first tokens of a confident model. The rest of the file decides: if log-probs of 0.0 are rare, several of them at
the beginning of a turn are not a coincidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from gangline.domain.errors import InvalidRequest
from gangline.domain.tokens import Logprobs, TokenIds
from gangline.tasks.check_rows.call_forms import (
    atif_trajectory,
    nemo_gym_entries,
    openenv_trace,
    verifiers_trace,
)
from gangline.tasks.check_rows.history import History
from gangline.tasks.check_rows.kinds import KINDS, Finding
from gangline.tasks.check_rows.row_forms import (
    COLUMNS,
    conversations,
    gangline_rows,
    named_rows,
    slime_samples,
    trl_rows,
    verl_rows,
)
from gangline.tasks.check_rows.rules import Vocabulary, judge
from gangline.tasks.check_rows.samples import Sample, spans_of

_MOST_UNREADABLE = 100
"""Stop reading a file if this many records, and no others, were unreadable."""

Score = Callable[[TokenIds, float], Logprobs]
"""(ids [T], temperature) -> log-prob of each id given the ids before it [T]."""

FORMS: dict[str, Callable[[Mapping[str, Any], int], Iterator[Sample]]] = {
    "gangline": gangline_rows,
    "trl": trl_rows,
    "openenv": openenv_trace,
    "verifiers": verifiers_trace,
    "nemo_gym": nemo_gym_entries,
    "slime": slime_samples,
    "verl": verl_rows,
    "atif": atif_trajectory,
    "messages": conversations,
}

_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gangline", ("trace_id", "response_ids", "loss_mask")),
    ("openenv", ("per_token_logps",)),
    ("openenv", ("turns", "schema_version")),
    ("verifiers", ("nodes", "task")),
    ("verifiers", ("traces", "task")),
    ("gangline", ("input_ids", "assistant_masks")),
    ("atif", ("steps", "agent")),
    ("atif", ("trajectory", "session_id")),
    ("nemo_gym", ("generation_token_ids",)),
    ("nemo_gym", ("response", "responses_create_params")),
    ("slime", ("tokens", "response_length")),
    ("slime", ("samples",)),
    ("trl", ("input_ids", "completion_mask")),
    ("trl", ("prompt_ids", "completion_ids")),
    ("verl", ("responses", "response_mask")),
    ("verl", ("response_ids", "response_mask")),
    ("verl", ("batch",)),
    ("nemo_gym", ("output",)),
    ("messages", ("messages",)),
    ("messages", ("chosen", "rejected")),
)
"""Fields that identify a record's form, in order."""

_LEAST = 2
_CHANCE = 1e-3
"""Expected number of such beginnings in the whole file above which they may be a coincidence."""
_KEPT = 10_000


class Openings:
    """Collects the turns of a file and judges them at the end. Memory is bounded by keeping only the first suspicious
    ones.
    """

    def __init__(self) -> None:
        self._num_spans = self._num_tokens = self._num_zeros = 0
        self._found: list[tuple[int, Finding]] = []

    def add(self, sample: Sample) -> None:
        """Spans with no other log-prob are `logprobs_zero`, or not informative."""
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


class Report(msgspec.Struct, kw_only=True):
    """The result of a check. Findings beyond the limit are only counted."""

    forms: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Form -> number of records."""
    given_up: bool = False
    """The first records were all unreadable, and the others were not tried."""
    num_records: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_trained: int = 0
    counts: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Kind -> number of findings."""
    findings: list[Finding] = msgspec.field(default_factory=list[Finding])
    recomputed_tokens: int = 0
    mean_difference: float | None = None
    """Mean |recomputed - recorded| log-prob; None without a model."""

    @property
    def ok(self) -> bool:
        return not self.counts


def form_of(record: Any) -> str | None:
    """The form of a record, identified by its fields; None if unknown."""
    if not isinstance(record, Mapping):
        return None
    return next((form for form, names in _MARKS if all(name in record for name in names)), None)


def check_records(
    records: Iterable[Any],
    *,
    form: str | None = None,
    columns: Mapping[str, str] | None = None,
    vocabulary: Vocabulary | None = None,
    score: Score | None = None,
    temperature: float = 1.0,
    tolerance: float = 0.05,
    limit: int = 1000,
) -> Report:
    """Check records in order, with constant memory.

    columns: one of COLUMNS -> its name in the records, which then have no known form.
    Raises: InvalidRequest for an unknown form, or insufficient columns.
    """
    read = _reader(form, columns)
    report, history, openings = Report(), History(), Openings()
    counts: Counter[str] = Counter()
    forms: Counter[str] = Counter()
    total, has_logprobs = 0.0, None
    for row, record in enumerate(records, start=1):
        name = "columns" if columns else form or form_of(record)
        report.num_records += 1
        forms[name or "unknown"] += 1
        for sample in _samples(record, name, row, read):
            judge(sample, vocabulary or Vocabulary())
            history.judge(sample)
            openings.add(sample)
            if not sample.findings and sample.logprobs is None and has_logprobs:
                sample.add("logprobs_missing", None, "no log-probs")
            has_logprobs = sample.logprobs is not None if has_logprobs is None else has_logprobs
            if score is not None:
                num, difference = _recompute(sample, score, temperature, tolerance)
                report.recomputed_tokens += num
                total += difference
            report.num_samples += 1
            report.num_tokens += len(sample.ids)
            report.num_trained += int(np.count_nonzero(sample.mask))
            counts.update(finding.kind for finding in sample.findings)
            report.findings += sample.findings[: max(0, limit - len(report.findings))]
        if row == _MOST_UNREADABLE == counts["unreadable"]:
            report.given_up = True
            break
    suspicious = openings.findings()
    counts.update(finding.kind for finding in suspicious)
    report.findings += suspicious[: max(0, limit - len(report.findings))]
    report.counts, report.forms = dict(counts.most_common()), dict(forms)
    if score is not None and report.recomputed_tokens:
        report.mean_difference = total / report.recomputed_tokens
    return report


def _reader(form: str | None, columns: Mapping[str, str] | None) -> Callable[[Any, int], Iterator[Sample]] | None:
    """None if each record's form is to be detected. Raises: InvalidRequest."""
    if columns:
        if unknown := sorted(columns.keys() - set(COLUMNS)):
            raise InvalidRequest(f"there is no column {unknown[0]!r} to name; there are: {', '.join(COLUMNS)}")
        if "ids" not in columns and "response" not in columns:
            raise InvalidRequest("name the column of the token ids: ids (prompt and response), or prompt and response")
        return partial(named_rows, columns)
    if form is not None and form not in FORMS:
        raise InvalidRequest(f"there is no form {form!r}; there are: {', '.join(FORMS)}")
    return None if form is None else FORMS[form]


def _samples(
    record: Any, form: str | None, row: int, read: Callable[[Any, int], Iterator[Sample]] | None
) -> Iterator[Sample]:
    if form is None:
        fields = cast("Mapping[Any, Any]", record) if isinstance(record, Mapping) else (type(record).__name__,)
        names = ", ".join(sorted(map(str, fields)))
        yield _unreadable(row, f"of no known form ({names}); there are: {', '.join(FORMS)}"[:300])
        return
    try:
        yield from (read or FORMS[form])(record, row)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        yield _unreadable(row, f"not of the form {form}: {type(error).__name__}: {error}"[:300])


def _unreadable(row: int, words: str) -> Sample:
    empty = np.zeros(0, np.int64)
    sample = Sample(row=row, ids=empty, mask=empty.astype(np.bool_), logprobs=None, num_prompt=0)
    sample.add("unreadable", None, words)
    assert sample.findings[0].kind in KINDS
    return sample


def _recompute(sample: Sample, score: Score, temperature: float, tolerance: float) -> tuple[int, float]:
    """Returns the number of trained tokens compared, and the sum of |differences|; reports a shift by one position.
    Log-probs among kept ids are excluded, because they come from a different distribution than the model's full one.
    """
    compared = sample.mask if sample.among_kept is None else sample.mask & ~sample.among_kept
    if sample.logprobs is None or not compared[1:].any():
        return 0, 0.0
    places = 1 + np.flatnonzero(compared[1:])
    again = score(sample.ids.astype(np.int32), temperature).astype(np.float64)
    differences = np.abs(again[places] - sample.logprobs[places])
    mean = float(differences.mean())
    if not mean <= tolerance:
        later = np.abs(again[places[:-1]] - sample.logprobs[places[1:]]).mean() if len(places) > 1 else np.inf
        earlier = np.abs(again[places[1:]] - sample.logprobs[places[:-1]]).mean() if len(places) > 1 else np.inf
        if min(later, earlier) <= tolerance:
            words = "one position too late" if later <= earlier else "one position too early"
            sample.add("logprobs_shifted", int(places[0]), f"recomputed: {words}")
        else:
            worst = int(places[int(np.argmax(differences))])
            sample.add("model_disagrees", worst, f"by {mean:.3g} nats a token on average, most here")
    return (len(places), float(differences.sum())) if np.isfinite(mean) else (0, 0.0)
