"""Evaluator `function`: only functions of the operator's run, and what is not a reward gives none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError, InvalidRequest
from gangline.domain.ids import new_id
from gangline.settings import plugins
from support.node.folder_runtime import FolderRuntime
from support.training.evaluation_samples import a_context, a_trace, said

HERE = f"{__name__}:rewarding"
RETURNED: dict[str, Any] = {
    "number": 0.5,
    "dict": {"reward": 1, "trace_rewards": {"t0": 0.25}, "note": "x"},
    "reward": Reward(reward=2.0),
    "none": None,
    "text": "1",
    "infinite": float("inf"),
    "boolean": True,
    "without": {"note": "x"},
}


def rewarding(session: dict[str, Any], kind: str = "number") -> Any:
    assert session["traces"][0]["response_messages"] == [{"role": "assistant", "content": "42"}]
    return RETURNED[kind]


async def waiting(session: dict[str, Any]) -> float:
    return float(session["session_id"] == "s1")


def breaking(_: dict[str, Any]) -> float:
    raise KeyError("oh")


def slow(_: dict[str, Any]) -> float:
    time.sleep(0.3)
    return 1.0


async def graded(tmp_path: Path, function: str, allowed: str | None = None, **config: Any) -> Reward:
    context = a_context(FolderRuntime(tmp_path / new_id("r")), traces=(a_trace(said("assistant", "42")),))
    context = msgspec.structs.replace(context, functions=frozenset([allowed or function]))
    return await plugins.make_evaluator("function", {"function": function, **config}).evaluate(context)


async def test_a_function_sees_the_recorded_session(tmp_path: Path) -> None:
    assert (await graded(tmp_path, HERE)).reward == 0.5
    result = await graded(tmp_path, HERE, arguments={"kind": "dict"})
    assert result == Reward(reward=1.0, trace_rewards={"t0": 0.25}, details={"note": "x"})
    assert (await graded(tmp_path, HERE, arguments={"kind": "reward"})).reward == 2.0
    assert (await graded(tmp_path, HERE, arguments={"kind": "boolean"})).reward == 1.0
    assert (await graded(tmp_path, f"{__name__}:waiting")).reward == 1.0


@pytest.mark.parametrize("kind", ["none", "text", "infinite", "without"])
async def test_a_function_that_returns_no_reward_gives_none(tmp_path: Path, kind: str) -> None:
    with pytest.raises(EvaluatorError, match="rewarding returned"):
        await graded(tmp_path, HERE, arguments={"kind": kind})


async def test_a_function_that_fails_or_is_slow_gives_no_reward(tmp_path: Path) -> None:
    with pytest.raises(EvaluatorError, match="breaking failed: KeyError: 'oh'"):
        await graded(tmp_path, f"{__name__}:breaking")
    with pytest.raises(EvaluatorError, match=r"slow was not done in 0\.05 s"):
        await graded(tmp_path, f"{__name__}:slow", timeout_seconds=0.05)


asked: list[str] = []


def asking(session: dict[str, Any]) -> float:
    """Asks a service that is away for a moment."""
    asked.append(session.pop("session_id"))
    if len(asked) == 2:
        raise ConnectionError("the judge is away")
    return 1.0


async def test_an_agent_pays_nothing_for_a_functions_service_that_was_away_for_a_moment(tmp_path: Path) -> None:
    """Its control, a moment later, would find a grader that works, and blame the agent."""
    asked.clear()
    for _ in range(2):
        assert (await graded(tmp_path, f"{__name__}:asking")).reward == 1.0
    assert len(asked) == 3


def needing(session: dict[str, Any]) -> float:
    return float(session["traces"][0]["response_messages"].pop()["content"] == "42")


async def test_a_control_of_a_function_is_what_it_graded_before(tmp_path: Path) -> None:
    """Without a session that was graded well nobody knows whether the function works."""
    memory: dict[bytes, bytes] = {}
    evaluator = plugins.make_evaluator("function", {"function": f"{__name__}:needing"})
    good = a_context(FolderRuntime(tmp_path / "r"), traces=(a_trace(said("assistant", "42")),))
    good = msgspec.structs.replace(good, functions=frozenset([f"{__name__}:needing"]), graded_before=memory)
    control = msgspec.structs.replace(
        good, is_control=True, trajectory=msgspec.structs.replace(good.trajectory, traces=())
    )
    with pytest.raises(EvaluatorError, match="IndexError"):
        await evaluator.evaluate(control)
    assert (await evaluator.evaluate(good)).reward == 1.0
    assert (await evaluator.evaluate(control)).reward == 1.0
    with pytest.raises(EvaluatorError, match="IndexError"):
        await evaluator.evaluate(msgspec.structs.replace(control, task_digest="another task's"))


async def test_a_function_that_the_operator_did_not_list_is_not_imported(tmp_path: Path) -> None:
    with pytest.raises(EvaluatorError, match="'os:system' is not on the node's list `reward_functions`; it has: a:b"):
        await graded(tmp_path, "os:system", allowed="a:b")
    with pytest.raises(EvaluatorError, match="cannot be imported"):
        await graded(tmp_path, "no_such_module:f")


def test_a_name_without_an_entry_point_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"function: .*unknown reward 'none_such'"):
        plugins.make_evaluator("function", {"function": "none_such"})
