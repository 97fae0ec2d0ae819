"""`composite`, `staged`, `shaped` and `per_turn`: their arithmetic, and the checks of what is nested in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.conversation import Message, Text, ToolCall, ToolResult
from gangline.domain.errors import EvaluatorError, GraderUnavailable, InvalidRequest
from gangline.domain.ids import new_id
from gangline.domain.tokens import token_ids
from gangline.domain.trajectory import Trace, TurnSpan
from gangline.rows.rewards import apply_reward
from gangline.settings import plugins
from support.node.folder_runtime import FolderRuntime
from support.training.evaluation_samples import a_context, a_trace, said


@pytest.fixture
def context(tmp_path: Path) -> EvaluationContext:
    return a_context(FolderRuntime(tmp_path / "runtime"), stdout=b"42", traces=(turns_trace(),))


def turns_trace() -> Trace:
    """Three turns of five tokens: a failed call, the same call again with a result, an answer."""
    call = ToolCall("c1", "bash", '{"command": "ls"}')
    again = ToolCall("c2", "bash", '{"command": "ls"}')
    trace = a_trace(
        Message("assistant", (call,)),
        Message("tool", (ToolResult("c1", (Text("Error: no such file"),)),)),
        Message("assistant", (again,)),
        Message("tool", (ToolResult("c2", (Text("a.txt"),)),)),
        said("assistant", "It is a.txt"),
    )
    ends = [(f"k{number}", 5 * number, 5 * number + 5) for number in range(3)]
    return msgspec.structs.replace(
        trace,
        response_ids=token_ids(list(range(15))),
        loss_mask=np.ones(15, np.uint8),
        response_logprobs=np.zeros(15, np.float32),
        response_versions=np.zeros(15, np.int32),
        spans=tuple(TurnSpan(*end) for end in ends),
    )


def says(value: str) -> dict[str, Any]:
    return {"strategy": "test_on_output", "config": {"checks": [{"kind": "contains", "value": value}]}}


def worth(value: float) -> dict[str, Any]:
    return {"strategy": "session_completed", "config": {"completed": value}}


async def graded(context: EvaluationContext, strategy: str, **config: Any) -> Reward:
    return await plugins.make_evaluator(strategy, config).evaluate(context)


async def test_a_composite_is_the_weighted_sum_of_its_parts(context: EvaluationContext) -> None:
    parts = [says("42") | {"weight": 0.6, "name": "right"}, says("43") | {"weight": 0.3, "name": "wrong"}, worth(0.5)]
    result = await graded(context, "composite", parts=parts)
    assert result.reward == pytest.approx(0.6 + 0.5)
    assert result.details["parts"]["wrong"]["reward"] == 0.0
    assert (await graded(context, "composite", parts=parts, average=True)).reward == pytest.approx(1.1 / 1.9)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.01, 5)), min_size=1, max_size=6))
async def test_an_average_lies_between_its_parts(pairs: list[tuple[float, float]]) -> None:
    parts = [worth(value) | {"weight": weight, "name": f"p{at}"} for at, (value, weight) in enumerate(pairs)]
    evaluator = plugins.make_evaluator("composite", {"parts": parts, "average": True})
    reward = (await evaluator.evaluate(a_context(None))).reward  # type: ignore[arg-type]
    assert min(value for value, _ in pairs) - 1e-9 <= reward <= max(value for value, _ in pairs) + 1e-9


@pytest.mark.parametrize(("values", "reward"), [((1, 1, 1), 1.0), ((1, 1, 0), 0.5), ((1, 0, 1), 0.1), ((0, 1, 1), 0.0)])
async def test_the_last_gate_that_is_passed_gives_the_reward(
    context: EvaluationContext, values: tuple[float, ...], reward: float
) -> None:
    worths = zip(values, (0.1, 0.5, 1.0), strict=True)
    stages = [worth(value) | {"name": f"g{gate}", "reward": gate} for value, gate in worths]
    stages = [{**stage, "name": f"gate{number}"} for number, stage in enumerate(stages)]
    result = await graded(context, "staged", stages=stages)
    assert result.reward == reward
    assert len(result.details["stages"]) == min((*values, 0).index(0) + 1, 3)


async def test_a_gate_may_give_its_own_reward(context: EvaluationContext) -> None:
    assert (await graded(context, "staged", stages=[worth(0.7) | {"at_least": 0.5}])).reward == 0.7
    assert (await graded(context, "staged", stages=[worth(0.4) | {"at_least": 0.5}], otherwise=-1)).reward == -1


@pytest.mark.parametrize(
    ("shape", "reward"),
    [
        ({"length_scaling": {"target_tokens": 60, "alpha": 0.5}}, 2.0),
        ({"length_penalty": {"target_tokens": 10, "max_tokens": 20}}, 0.5),
        ({"overlong_penalty": {"max_tokens": 20, "margin_tokens": 10}}, 0.5),
        ({"turns": {"max_turns": 4, "weight": 0.2}}, 1.05),
        ({"tool_errors": {"each": 0.05}}, 0.95),
        ({"tool_errors": {"each": 5, "at_most": 0.5}}, 0.5),
    ],
)
async def test_a_reward_is_shaped_by_the_recorded_conversation(
    context: EvaluationContext, shape: dict[str, Any], reward: float
) -> None:
    result = await graded(context, "shaped", evaluator=worth(1.0), **shape)
    assert result.reward == pytest.approx(reward)
    assert (result.details["num_sampled_tokens"], result.details["num_turns"]) == (15, 3)


async def test_giving_up_at_once_earns_nothing_for_its_few_turns(context: EvaluationContext) -> None:
    assert (await graded(context, "shaped", evaluator=worth(0.0), turns={})).reward == 0.0


async def test_turns_are_scored_by_rules_and_traces_by_their_turns(context: EvaluationContext) -> None:
    rules = [
        {"when": "tool_error", "score": -0.3},
        {"when": "tool_success", "score": 0.3},
        {"when": "repeated_call", "score": -0.1},
        {"when": "contains", "value": "a.txt", "score": 0.5},
        {"when": "tool_call", "tools": ["python"], "score": 9},
    ]
    result = await graded(context, "per_turn", evaluator=worth(1.0), rules=rules)
    assert result.turn_scores == pytest.approx({"k0": -0.3, "k1": 0.2, "k2": 0.5})
    assert (result.reward, result.trace_rewards) == (1.0, {"t0": pytest.approx(1.0 + 0.4 / 3)})
    (trace,) = apply_reward(context.trajectory, result).traces
    assert [span.score for span in trace.spans] == pytest.approx([-0.3, 0.2, 0.5])


async def test_turns_that_cannot_be_told_apart_have_no_scores(context: EvaluationContext) -> None:
    trace = msgspec.structs.replace(turns_trace(), response_messages=(said("assistant", "a"),))
    context = msgspec.structs.replace(context, trajectory=msgspec.structs.replace(context.trajectory, traces=(trace,)))
    result = await graded(context, "per_turn", evaluator=worth(1.0), rules=[{"when": "no_tool_call", "score": 1}])
    assert (result.turn_scores, result.details["unscored_traces"]) == ({}, ["t0"])


@pytest.mark.parametrize(
    ("strategy", "config", "told"),
    [
        ("composite", {"parts": []}, "parts: Tuple should have at least 1 item"),
        ("composite", {"parts": [{"strategy": "mth"}]}, r"parts\.0\.strategy: .*unknown evaluator 'mth'.*'math'"),
        ("composite", {"parts": [says("a"), {"strategy": "script"}]}, r"parts\.1\.config\.command: Field required"),
        ("composite", {"parts": [says("a"), says("b")]}, "parts: .*two evaluators are called 'test_on_output'"),
        ("composite", {"parts": [worth(1) | {"weight": -1}], "average": True}, "weights whose sum is above 0"),
        (
            "staged",
            {"stages": [{"strategy": "script", "config": {"comand": "x"}}]},
            r"stages\.0\.config\.comand: Extra",
        ),
        (
            "shaped",
            {"evaluator": {"strategy": "composite", "config": {"parts": [{"strategy": "script"}]}}, "turns": {}},
            r"evaluator\.config\.parts\.0\.config\.command: Field required",
        ),
        ("shaped", {"evaluator": worth(1)}, "give at least one of length_scaling"),
        ("per_turn", {"evaluator": worth(1), "rules": [{"when": "never", "score": 1}]}, r"rules\.0\.when"),
    ],
)
def test_a_mistake_in_a_nested_evaluator_names_its_field(strategy: str, config: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        plugins.make_evaluator(strategy, config)


async def test_a_part_without_a_reward_leaves_none_and_is_named(tmp_path: Path) -> None:
    broken = {"strategy": "script", "config": {"command": "exit 3"}}
    context = a_context(FolderRuntime(tmp_path / new_id("r")), stdout=b"42")
    with pytest.raises(EvaluatorError, match="script: the grading command exited with 3") as caught:
        await graded(context, "composite", parts=[says("42"), broken])
    assert not isinstance(caught.value, GraderUnavailable)


async def test_the_failure_of_a_part_without_a_control_asks_for_none(context: EvaluationContext) -> None:
    cancelled = msgspec.structs.replace(context, outcome="cancelled")
    with pytest.raises(GraderUnavailable, match="session_completed: outcome cancelled"):
        await graded(cancelled, "composite", parts=[worth(1.0), says("42")])


async def test_in_a_control_only_parts_that_have_one_are_asked(context: EvaluationContext) -> None:
    control = msgspec.structs.replace(context, outcome="cancelled", is_control=True)
    assert (await graded(control, "composite", parts=[worth(1.0), says("42")])).reward == 1.0


@pytest.mark.parametrize("scores", [{"k9": 1.0}, {"k0": float("inf")}])
def test_scores_of_turns_fit_the_trajectory(context: EvaluationContext, scores: dict[str, float]) -> None:
    with pytest.raises(EvaluatorError):
        apply_reward(context.trajectory, Reward(reward=1.0, turn_scores=scores))
