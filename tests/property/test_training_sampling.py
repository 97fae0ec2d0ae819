"""Laws of samplers: the same history gives the same task, nothing is repeated or left out silently."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.domain.errors import InvalidRequest, OutOfTasks
from gangline.train.collecting.sampling.history import Measurement, SamplingHistory
from gangline.train.collecting.sampling.sampler import UNSEEN, Chooser, DifficultyPools, Stages, TaskSampler, chooser_of
from gangline.train.collecting.sampling.settings import DifficultyPoolSettings, StageSettings

TASKS: list[dict[str, Any]] = [{"metadata": {"level": level}} for level in ["a", "b", "a", "c", "b", "a", "c"]]
POOLS = DifficultyPoolSettings(kind="difficulty_pool")
STAGES = StageSettings.model_validate(
    {
        "kind": "stages",
        "key": "level",
        "stages": [
            {"shares": {"a": 1}, "until": 0.6, "window": 3},
            {"shares": {"a": 1, "b": 3}, "most_tasks": 8},
            {"shares": {"b": 1, "c": 1}},
        ],
    }
)
rewards = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=40, max_size=40)
samplers = st.sampled_from([POOLS, STAGES])
seeds = st.integers(0, 50)


def sampler(chosen: DifficultyPoolSettings | StageSettings, seed: int, path: Path | None = None) -> TaskSampler:
    return TaskSampler(chooser_of(chosen, TASKS, seed=seed), SamplingHistory(path), len(TASKS))


def steps(found: TaskSampler, outcomes: list[float], numbers: Iterable[int]) -> list[int]:
    """Batches of three: drawn, then measured, as in `sync` mode."""
    tasks = list[int]()
    for first in numbers:
        tasks += [found.task(number) for number in range(first, first + 3)]
        for number in range(first, first + 3):
            found.measure(number, [outcomes[number]])
    return tasks


@given(samplers, seeds, rewards, st.integers(0, 6), st.integers(0, 3), st.binary(max_size=20))
@settings(max_examples=40)
def test_a_killed_run_draws_what_it_would_have_drawn(
    chosen: Any, seed: int, outcomes: list[float], killed_after: int, num_measured: int, rest: bytes
) -> None:
    """Killed in a batch, with some of it measured, and with a part of a line on the disk."""
    straight = steps(sampler(chosen, seed), outcomes, range(0, 30, 3))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sampled.jsonl"
        first, begun = sampler(chosen, seed, path), 3 * killed_after
        steps(first, outcomes, range(0, begun, 3))
        for number in range(begun, begun + 3):
            first.task(number)
        for number in range(begun, begun + num_measured):
            first.measure(number, [outcomes[number]])
        with path.open("ab") as file:
            file.write(b'{"ev' + rest.replace(b"\n", b""))
        again = sampler(chosen, seed, path)
        assert steps(again, outcomes, range(0, 30, 3)) == straight
        numbers = range(30)
        assert sampler(chosen, seed, path).metrics(numbers) == again.metrics(numbers)


@given(seeds, rewards, st.randoms())
def test_the_order_in_which_measurements_arrive_does_not_matter(seed: int, outcomes: list[float], random: Any) -> None:
    one, other = sampler(POOLS, seed), sampler(POOLS, seed)
    for found, order in ((one, list(range(20))), (other, random.sample(range(20), 20))):
        for number in range(20):
            found.task(number)
        for number in order:
            found.measure(number, [outcomes[number]])
    assert [one.task(number) for number in range(20, 24)] == [other.task(number) for number in range(20, 24)]
    assert one.metrics(()) == other.metrics(())


@given(seeds, st.booleans())
def test_every_task_comes_before_one_comes_again(seed: int, shuffle: bool) -> None:
    history = SamplingHistory()
    found = TaskSampler(DifficultyPools(POOLS, 5, seed=seed, shuffle=shuffle), history, 5)
    drawn = [found.task(number) for number in range(15)]
    assert all(sorted(drawn[start : start + 5]) == list(range(5)) for start in range(11))
    assert shuffle or drawn[:5] == list(range(5))


@given(samplers, seeds, rewards)
def test_the_task_that_was_drawn_longest_ago_comes_next_of_its_kind(
    chosen: Any, seed: int, outcomes: list[float]
) -> None:
    history, chooser = SamplingHistory(), chooser_of(chosen, TASKS, seed=seed)
    for number in range(30):
        draw = chooser.choose(history)
        beside = _beside(chooser, history, draw.pool)
        assert draw.task in beside
        assert history.last_draw.get(draw.task, -1) == min(history.last_draw.get(task, -1) for task in beside)
        history.draw(draw)
        history.measure(Measurement(number=number, reward=outcomes[number]))


def _beside(chooser: Chooser, history: SamplingHistory, pool: str) -> list[int]:
    if isinstance(chooser, Stages):
        return [number for number, task in enumerate(TASKS) if task["metadata"]["level"] == pool]

    def pool_of(reward: float | None) -> str:
        return UNSEEN if reward is None else "hard" if reward <= 0.25 else "normal" if reward <= 0.75 else "easy"

    return [task for task in range(len(TASKS)) if pool_of(history.last_reward.get(task)) == pool]


@given(seeds, rewards)
def test_stages_follow_one_another_and_draw_from_their_own_labels(seed: int, outcomes: list[float]) -> None:
    history, chooser = SamplingHistory(), chooser_of(STAGES, TASKS, seed=seed)
    for number in range(40):
        history.draw(chooser.choose(history))
        history.measure(Measurement(number=number, reward=outcomes[number]))
    stages = [draw.stage or 0 for draw in history.draws]
    assert stages == sorted(stages)
    labels = {stage: {draw.pool for draw in history.draws if draw.stage == stage} for stage in (0, 1, 2)}
    assert labels[0] <= {"a"} and labels[1] <= {"a", "b"} and labels[2] <= {"b", "c"}  # noqa: PT018 - one law
    assert stages.count(1) in (8, 0) or stages[-1] == 1
    if 1 in stages:
        ended = stages.index(1)
        assert sum(outcomes[ended - 3 : ended]) / 3 >= 0.6
        assert all(sum(outcomes[at - 3 : at]) / 3 < 0.6 for at in range(3, ended))


def test_tasks_are_drawn_by_the_weights_of_their_pools() -> None:
    """Of ten tasks each, always solved, sometimes and never."""
    outcome = [1.0] * 10 + [0.5] * 10 + [0.0] * 10
    found = TaskSampler(DifficultyPools(POOLS, 30, seed=1), SamplingHistory(), 30)
    for number in range(3000):
        found.measure(number, [outcome[found.task(number)]])
    drawn = found.metrics(range(300, 3000)).drawn
    assert drawn["normal"] / 2700 == pytest.approx(1 / 1.4, abs=0.03)
    assert drawn["easy"] / 2700 == pytest.approx(0.2 / 1.4, abs=0.03)
    assert found.metrics(()).sizes == {UNSEEN: 0, "hard": 10, "normal": 10, "easy": 10}


def test_a_pool_without_weight_is_counted_and_a_run_with_nothing_else_ends_with_the_way_out() -> None:
    retired = {"kind": "difficulty_pool", "pools": {"open": {"threshold": 0.9, "weight": 1}}}
    retired["pools"] |= {"done": {"threshold": 1.0, "weight": 0}}  # type: ignore[operator]
    chosen = DifficultyPoolSettings.model_validate(retired)
    found = TaskSampler(DifficultyPools(chosen, 3, seed=0), SamplingHistory(), 3)
    for number in range(3):
        assert found.metrics(()).num_never_drawn == 3 - number
        found.task(number)
        found.measure(number, [1.0])
    assert found.metrics([0, 1]).sizes == {UNSEEN: 0, "open": 0, "done": 3}
    with pytest.raises(OutOfTasks, match=r"pools of weight 0: done \(3\)"):
        found.task(3)


def test_a_task_counts_by_its_first_measurement_of_a_number() -> None:
    found = sampler(POOLS, 0)
    found.task(0)
    for reward in (1.0, 0.0):
        found.measure(0, [reward])
    found.measure(0, [])
    assert found.metrics(()).sizes["easy"] == 1


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ([{"shares": {"a": 1, "b": 1}}], "task 4 has level 'c'"),
        ([{"shares": {"a": 1, "b": 1, "c": 1, "d": 1}}], "no task has level d"),
    ],
    ids=["a task would be left out", "a label without tasks"],
)
def test_stages_that_do_not_fit_the_tasks_are_refused(stages: list[Any], problem: str) -> None:
    chosen = StageSettings.model_validate({"kind": "stages", "key": "level", "stages": stages})
    with pytest.raises(InvalidRequest, match=problem):
        chooser_of(chosen, TASKS, seed=0)


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("stages", {"stages": [{"shares": {"a": 1}}, {"shares": {"b": 1}}]}, "never begins"),
        ("stages", {"stages": [{"shares": {"a": 1}, "until": 1.0}]}, "lasts to the end"),
        ("stages", {"stages": [{"shares": {"a": 0}}]}, "shares must be above 0"),
        ("difficulty_pool", {"pools": {"a": {"threshold": 1, "weight": 0}}}, "at least one pool"),
        ("difficulty_pool", {"pools": {"unseen": {"threshold": 1, "weight": 1}}}, "another name"),
        (
            "difficulty_pool",
            {"pools": {"a": {"threshold": 1, "weight": 1}, "b": {"threshold": 0.5, "weight": 1}}},
            "thresholds must rise",
        ),
    ],
    ids=str,
)
def test_settings_without_a_sense_are_refused(kind: str, changes: dict[str, Any], problem: str) -> None:
    chosen = StageSettings if kind == "stages" else DifficultyPoolSettings
    with pytest.raises(ValueError, match=problem):
        chosen.model_validate({"kind": kind, **changes})
