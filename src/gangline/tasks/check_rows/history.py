"""Rules across samples: splices, retries, and tokens that are trained twice. Memory is bounded by windows."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from gangline.tasks.check_rows.samples import Ints, Sample, spans_of

_CALLS = 64
"""Number of earlier calls of a session that a call may continue."""
_SESSIONS = 64
_DIGESTS = 200_000
_CANDIDATES = 8
_MIN_SAME = 16
"""Shorter replies may be equal by coincidence."""


class _Window:
    """The last digests, and where each was seen."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()

    def earlier(self, digest: int, row: int) -> int | None:
        found = self._seen.get(digest)
        if found is None:
            self._seen[digest] = row
            if len(self._seen) > _DIGESTS:
                self._seen.popitem(last=False)
        return found


class History:
    """Compares each sample with the earlier ones."""

    def __init__(self) -> None:
        self._rows = _Window()
        self._spans = _Window()
        self._values: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Digest of a row's log-probs -> digest of its trained ids, and the row."""
        self._calls: OrderedDict[str, deque[tuple[Ints, int]]] = OrderedDict()

    def judge(self, sample: Sample) -> None:
        """Add findings to the sample."""
        if sample.is_call and sample.session is not None:
            self._continues(sample, sample.session)
        if not self._doubled(sample):
            self._again(sample)

    def _continues(self, sample: Sample, session: str) -> None:
        calls = self._calls.setdefault(session, deque(maxlen=_CALLS))
        self._calls.move_to_end(session)
        if len(self._calls) > _SESSIONS:
            self._calls.popitem(last=False)
        prompt = sample.ids[: sample.num_prompt]
        self._judge_context(sample, prompt, calls)
        calls.append((sample.ids, sample.num_prompt))

    @staticmethod
    def _judge_context(sample: Sample, prompt: Ints, calls: deque[tuple[Ints, int]]) -> None:
        """A call continues the earlier call with the longest matching prompt, and must contain its sampled ids. If the
        trainer joins all calls into one row, it must contain the sampled ids of every earlier call.
        """
        if sample.must_continue and calls and not _begins(prompt, calls[-1][0]):
            at = _shared(prompt, calls[-1][0])
            sample.add("splice", at, f"the call before it goes on differently after {at} ids, or for longer")
        if sample.must_continue:
            return
        origins = [(ids, num) for ids, num in reversed(calls) if _begins(prompt, ids[:num])]
        longest = max((num for _, num in origins), default=0)
        origins = [(ids, num) for ids, num in origins if num == longest]
        if any(_begins(prompt, ids) for ids, _ in origins):
            return
        if origins and len(prompt) == longest:
            if sample.mask.any():
                sample.add("retry_trained", longest, "an earlier call of the session has this prompt")
        elif origins:
            at = _shared(prompt, origins[0][0])
            sample.add("splice", at, f"an earlier call's stream goes on differently after {at} ids")

    def _doubled(self, sample: Sample) -> bool:
        """Whether a row contains the same sampled tokens twice: next to each other, or as two turns."""
        if sample.logprobs is None:
            return False
        seen: set[int] = set()
        for start, end in spans_of(sample.mask):
            if end - start < _MIN_SAME // 2:
                continue
            one, again = _digest(sample, start, end), _repeated(sample, start, end)
            if again is not None or one in seen:
                at = start if again is None else again
                sample.add("tokens_doubled", at, "the same ids with the same log-probs")
                return True
            seen.add(one)
        return False

    def _again(self, sample: Sample) -> None:
        """Long replies with exactly equal log-probs are the same reply."""
        if sample.logprobs is None or np.count_nonzero(sample.mask) < _MIN_SAME:
            return
        chosen = sample.logprobs[sample.mask]
        if len(np.unique(chosen)) > _MIN_SAME // 2:
            values, ids = hash(chosen.tobytes()), hash(sample.ids[sample.mask].tobytes())
            first = self._values.setdefault(values, (ids, sample.row))
            if len(self._values) > _DIGESTS:
                self._values.popitem(last=False)
            if first[0] != ids:
                sample.add("logprobs_copied", None, f"those of row {first[1]}, which has other tokens")
                return
        row = self._rows.earlier(
            hash((sample.ids.tobytes(), sample.mask.tobytes(), sample.logprobs.tobytes())), sample.row
        )
        if row is not None:
            sample.add("trained_twice", None, f"the same row as row {row}")
            return
        if sample.session is None:
            return
        for start, end in spans_of(sample.mask):
            if end - start >= _MIN_SAME:
                row = self._spans.earlier(hash((sample.session, _digest(sample, start, end))), sample.row)
                if row is not None:
                    sample.add("trained_twice", start, f"trained in row {row} already")
                    return


def _begins(ids: Ints, start: Ints) -> bool:
    return len(ids) >= len(start) and bool(np.array_equal(ids[: len(start)], start))


def _shared(one: Ints, other: Ints) -> int:
    num = min(len(one), len(other))
    differs = np.flatnonzero(one[:num] != other[:num])
    return int(differs[0]) if len(differs) else num


def _digest(sample: Sample, start: int, end: int) -> int:
    assert sample.logprobs is not None
    return hash((sample.ids[start:end].tobytes(), sample.logprobs[start:end].tobytes()))


def _repeated(sample: Sample, start: int, end: int) -> int | None:
    """Start of a span's ending that occurs twice in a row; None if there is no such repetition."""
    assert sample.logprobs is not None
    ids, logprobs = sample.ids[start:end], sample.logprobs[start:end]
    for at in np.flatnonzero(logprobs[:-1] == logprobs[-1])[-_CANDIDATES:].tolist():
        num = len(ids) - 1 - at
        if num < _MIN_SAME // 2 or at + 1 < num or not np.count_nonzero(logprobs[-num:]):
            continue
        same_ids = np.array_equal(ids[-num:], ids[at + 1 - num : at + 1])
        if same_ids and np.array_equal(logprobs[-num:], logprobs[at + 1 - num : at + 1]):
            return end - num
    return None
