"""The report of an evaluation: figures over all sessions, and by keys of their tasks' metadata."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from gangline.tasks.evals.records import SessionRecord
from gangline.tasks.evals.statistics import Estimate, estimate_of, pass_at_k, pass_hat_k


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a set of sessions."""

    name: str
    """Their common value of the key, or `all`."""
    num_tasks: int
    num_sessions: int
    num_counted: int
    """Sessions with a reward. The others are excluded from every mean, never counted as 0."""
    reward: Estimate | None
    passed: Estimate | None
    """Fraction of the sessions whose reward reaches the bar."""
    pass_at: dict[int, Estimate]
    """k -> pass@k, over tasks with at least k counted sessions."""
    pass_hat: dict[int, Estimate]
    """k -> pass^k, over the same tasks."""
    outcomes: dict[str, int]
    failures: dict[str, int]
    """`boundary: code` -> number of sessions."""
    turns: float | None
    """Mean over the counted sessions."""
    prompt_tokens: float | None
    sampled_tokens: float | None
    seconds: float | None
    cost: float | None
    """Sum over all sessions; None without prices."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A session of a task."""

    session_id: str
    outcome: str
    reward: float | None
    """None where it does not count."""
    cause: str
    """`boundary: code` of its failure; empty where it has none."""
    turns: int
    sampled_tokens: int
    seconds: float


class TaskLine(msgspec.Struct, frozen=True, kw_only=True):
    """A task and its sessions."""

    task: str
    mean: float | None
    """Over the sessions that count; None where none does."""
    samples: tuple[Sample, ...]
    outcomes: dict[str, int] = {}
    """`outcome (boundary: code)` -> number of sessions, the most frequent first."""
    turns: float = 0.0
    """Mean over all its sessions."""
    sampled_tokens: float = 0.0
    seconds: float = 0.0

    def always_passes(self, bar: float) -> bool:
        return all(sample.reward is not None and sample.reward >= bar for sample in self.samples)

    @property
    def worst(self) -> Sample:
        return min(self.samples, key=lambda one: (one.reward is not None, one.reward or 0.0))


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The results of an evaluation."""

    name: str
    bar: float
    """Minimum reward of a passed session."""
    num_samples: int
    whole: Slice
    by: dict[str, list[Slice]]
    """Metadata key -> a slice for each of its values, sorted by value."""
    tasks: dict[str, float]
    """Task -> mean reward of its counted sessions."""
    lines: tuple[TaskLine, ...] = ()
    """Every task with its sessions, the worst first; tasks of which no session counts before all others."""
    evaluation_id: str = ""
    """`NAME-DIGEST`, the beginning of its tasks' ids; empty in a file of an earlier version."""
    num_left: int = 0
    """Tasks that have not ended."""


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices per million tokens, in any currency."""

    prompt: float
    sampled: float


def make_report(
    name: str,
    records: Iterable[SessionRecord],
    *,
    num_samples: int,
    ks: Sequence[int] = (1,),
    bar: float = 1.0,
    by: Sequence[str] = (),
    prices: Prices | None = None,
    evaluation_id: str = "",
    num_left: int = 0,
) -> Report:
    """ks: for pass@k and pass^k. by: metadata keys of the tasks, dotted for nested ones."""
    records = list(records)
    sliced = {key: _sliced(records, key) for key in by}
    return Report(
        name=name,
        bar=bar,
        num_samples=num_samples,
        whole=_slice("all", records, ks, bar, prices),
        by={key: [_slice(value, mine, ks, bar, prices) for value, mine in found] for key, found in sliced.items()},
        tasks=task_means(records),
        lines=_lines(records),
        evaluation_id=evaluation_id,
        num_left=num_left,
    )


def _lines(records: Sequence[SessionRecord]) -> tuple[TaskLine, ...]:
    means, samples = task_means(records), defaultdict[str, list[Sample]](list)
    for record in records:
        cause = "" if record.boundary is None else f"{record.boundary}: {record.code}"
        shared = {name: getattr(record, name) for name in Sample.__struct_fields__ if name != "cause"}
        samples[record.task].append(Sample(cause=cause, **shared))
    lines = [_line(task, means.get(task), mine) for task, mine in samples.items()]
    return tuple(sorted(lines, key=lambda line: (line.mean is not None, line.mean or 0.0)))


def _line(task: str, mean: float | None, samples: Sequence[Sample]) -> TaskLine:
    outcomes = Counter(one.outcome + (f" ({one.cause})" if one.cause else "") for one in samples)
    sums = {name: sum(getattr(one, name) for one in samples) for name in ("turns", "sampled_tokens", "seconds")}
    means = {name: total / len(samples) for name, total in sums.items()}
    return TaskLine(task=task, mean=mean, samples=tuple(samples), outcomes=dict(outcomes.most_common()), **means)


def task_means(records: Iterable[SessionRecord]) -> dict[str, float]:
    return {task: sum(rewards) / len(rewards) for task, rewards in _by_task(records).items()}


def _by_task(records: Iterable[SessionRecord]) -> dict[str, list[float]]:
    found = defaultdict[str, list[float]](list)
    for record in records:
        if record.reward is not None:
            found[record.task].append(record.reward)
    return dict(found)


def _sliced(records: Sequence[SessionRecord], key: str) -> list[tuple[str, list[SessionRecord]]]:
    found = defaultdict[str, list[SessionRecord]](list)
    for record in records:
        found[_value(record.metadata, key)].append(record)
    return sorted(found.items())


def _value(metadata: object, key: str) -> str:
    for part in key.split("."):
        metadata = metadata.get(part) if isinstance(metadata, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return "(none)" if metadata is None else str(metadata)  # pyright: ignore[reportUnknownArgumentType]


def _slice(name: str, records: Sequence[SessionRecord], ks: Sequence[int], bar: float, prices: Prices | None) -> Slice:
    rewards = _by_task(records)
    passed = {task: (len(mine), sum(one >= bar for one in mine)) for task, mine in rewards.items()}
    counted = [record for record in records if record.reward is not None]
    failed = Counter(f"{one.boundary}: {one.code}" for one in records if one.boundary is not None)
    return Slice(
        name=name,
        num_tasks=len({record.task for record in records}),
        num_sessions=len(records),
        num_counted=len(counted),
        reward=estimate_of([sum(mine) / len(mine) for mine in rewards.values()]),
        passed=estimate_of([good / num for num, good in passed.values()], is_share=True),
        pass_at={k: found for k in ks if (found := _estimated(passed.values(), k, every=False)) is not None},
        pass_hat={k: found for k in ks if (found := _estimated(passed.values(), k, every=True)) is not None},
        outcomes=dict(Counter(record.outcome for record in records)),
        failures=dict(failed),
        turns=_mean([one.turns for one in counted]),
        prompt_tokens=_mean([one.prompt_tokens for one in counted]),
        sampled_tokens=_mean([one.sampled_tokens for one in counted]),
        seconds=_mean([one.seconds for one in counted]),
        cost=None if prices is None else sum(cost_of(one, prices) for one in records),
    )


def _estimated(passed: Iterable[tuple[int, int]], k: int, *, every: bool) -> Estimate | None:
    estimator = pass_hat_k if every else pass_at_k
    return estimate_of([estimator(num, good, k) for num, good in passed if num >= k], is_share=True)


def cost_of(record: SessionRecord, prices: Prices) -> float:
    return (record.prompt_tokens * prices.prompt + record.sampled_tokens * prices.sampled) / 1e6


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
