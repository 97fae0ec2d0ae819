"""How a run looks: steps and evaluations, in a terminal and as a picture."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from gangline.train.commands.view import LearningView, draw_curves, notes_on, remaining_s, reward_chart, shown_reward
from gangline.train.runs.records import EvaluationRecord, StepRecord
from support.training.fakes import PROFILE


def step(number: int, reward: float) -> StepRecord:
    return StepRecord(
        step=number,
        version=number,
        wall_s=1.0,
        reward_mean=reward,
        reward_deviation=0.5,
        collected_reward_mean=None,
        num_groups=2,
        num_one_reward=0,
        num_sessions=4,
        num_trained_tokens=8,
        left_out={},
        lag={0: 8},
        num_not_admitted=0,
        num_invalid=0,
        num_stale=0,
        waited_s=0.1,
        trained_s=0.2,
        checkpoint_s=0.0,
        update=PROFILE,
        learner={},
    )


def evaluation(number: int, reward: float, error: float | None = 0.05) -> EvaluationRecord:
    return EvaluationRecord(
        step=number,
        version=number + 1,
        wall_s=1.0,
        reward_mean=reward,
        standard_error=error,
        task_means=(reward,) * 32,
        num_tasks=32,
        num_sessions=64,
        num_invalid=0,
        took_s=2.0,
    )


STEPS = [step(1, 0.25), step(2, 0.5)]
EVALUATIONS = [evaluation(0, 0.21), evaluation(2, 0.79)]


def printed(found: object) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(found)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_evaluations_stand_where_they_were_made() -> None:
    rows = [line.replace("held out", "held-out").split()[:2] for line in printed(reward_chart(STEPS, EVALUATIONS))]
    assert rows[1:] == [["held-out", "0.21"], ["1", "0.25"], ["2", "0.50"], ["held-out", "0.79"]]


def test_without_a_terminal_each_is_a_line() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LearningView(console, num_steps=2, evaluations_before=EVALUATIONS[:1]) as view:
        view.add(STEPS[0])
        view.add_evaluation(EVALUATIONS[1])
    assert isinstance(console.file, io.StringIO)
    first, last = console.file.getvalue().splitlines()
    assert first.startswith("step 1/2: reward 0.250")
    assert last.startswith("held out, after step 2/2: reward 0.79 ± 0.05, 64 sessions")
    assert view.evaluations == EVALUATIONS


def test_the_estimate_counts_the_steps_and_the_evaluations_that_are_left() -> None:
    a_step_s = 0.1 + 0.2 + PROFILE.total_s
    assert remaining_s([], EVALUATIONS[:1], num_steps=4, num_evaluations=2) is None
    left_s = remaining_s(STEPS, EVALUATIONS[:1], num_steps=4, num_evaluations=2)
    assert left_s == pytest.approx(2 * a_step_s + EVALUATIONS[0].took_s)
    assert remaining_s(STEPS, EVALUATIONS, num_steps=2, num_evaluations=2) == 0.0


def test_a_terminal_shows_a_bar_and_an_estimate_while_a_run_learns() -> None:
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    slow = msgspec.structs.replace(STEPS[0], waited_s=50.0, trained_s=10.0)
    with LearningView(console, num_steps=3, num_evaluations=2) as view:
        view.add_evaluation(EVALUATIONS[0])
        view.add(slow)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "step 2 of 3" in shown
    assert "min left" in shown
    assert "━" in shown


def test_tokens_that_must_not_be_trained_on_are_named_with_the_reason() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LearningView(console, num_steps=2) as view:
        view.add(msgspec.structs.replace(STEPS[0], left_out={"sampled with top_p 0.9: set it to 1": 40}))
    assert isinstance(console.file, io.StringIO)
    _, note = console.file.getvalue().splitlines()
    assert note == "step 1/2: 40 sampled tokens were not trained on: sampled with top_p 0.9: set it to 1"


def test_sessions_that_did_not_complete_are_counted_by_cause() -> None:
    """A reward of 0 may come from that."""
    console = Console(file=io.StringIO(), width=200)
    with LearningView(console, num_steps=2) as view:
        view.add_evaluation(
            msgspec.structs.replace(
                EVALUATIONS[0], num_invalid=1, early_ends={"token_limit (full)": 60, "cancelled": 1}
            )
        )
    assert isinstance(console.file, io.StringIO)
    _, note = console.file.getvalue().splitlines()
    assert note.endswith("step 0/2: 61 of 65 sessions did not complete: 1 cancelled, 60 token_limit (full)")
    one = msgspec.structs.replace(STEPS[0], early_ends={"agent_error": 2})
    assert notes_on(one) == ["2 of 4 sessions did not complete: 2 agent_error"]


def test_groups_that_teach_nothing_are_counted_and_a_step_of_nothing_else_says_that_weights_stay() -> None:
    some = msgspec.structs.replace(STEPS[0], num_groups=10, num_one_reward=8)
    assert notes_on(some) == ["8 of 10 groups had one reward: nothing to learn"]
    sampled = msgspec.structs.replace(STEPS[0], num_groups=2, num_not_admitted=8)
    assert notes_on(sampled) == ["8 of 10 groups had one reward: nothing to learn"]
    nothing = msgspec.structs.replace(STEPS[0], num_one_reward=2, update=None, version=7)
    of_groups, of_weights = notes_on(nothing)
    assert of_groups.endswith("2 groups had one reward: nothing to learn")
    assert of_weights == "no weights were pushed, the policy stays at version 7"
    assert notes_on(STEPS[0]) == []
    assert printed(reward_chart([nothing]))


def test_a_phase_that_took_most_of_a_weight_update_is_told() -> None:
    assert STEPS[0].update is not None
    slow = msgspec.structs.replace(STEPS[0].update, transfer_s=227.3, load_s=3.2)
    (note,) = notes_on(msgspec.structs.replace(STEPS[0], update=slow))
    assert note.startswith("227.3 of the 230.6 seconds of a weight update were the phase transfer: writing the weights")


def test_a_mean_without_an_error_claims_none() -> None:
    assert shown_reward(evaluation(0, 0.5, None)) == "0.50"


def test_a_picture_has_the_evaluations_too(tmp_path: Path) -> None:
    plain = draw_curves({"one": STEPS}, tmp_path / "plain.png", title="run").read_bytes()
    evaluated = draw_curves({"one": STEPS}, tmp_path / "one.png", title="run", evaluations={"one": EVALUATIONS})
    assert evaluated.read_bytes() != plain
