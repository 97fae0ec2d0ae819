from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import EvaluatorError, InvalidRequest
from gangline.settings import plugins
from support.node.folder_runtime import FolderRuntime
from support.training.evaluation_samples import a_context, a_trace, said


@pytest.fixture
def runtime(tmp_path: Path) -> FolderRuntime:
    return FolderRuntime(tmp_path / "r1")


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [("completed", 1.0), ("agent_timeout", 0.0), ("turn_limit", 0.0), ("agent_error", 0.0)],
)
async def test_completing_is_worth_one_and_nothing_else_is(runtime: FolderRuntime, outcome: Any, reward: float) -> None:
    evaluator = plugins.make_evaluator("session_completed", {})
    assert (await evaluator.evaluate(a_context(runtime, outcome=outcome))).reward == reward


async def test_the_values_of_completing_can_be_set(runtime: FolderRuntime) -> None:
    evaluator = plugins.make_evaluator("session_completed", {"completed": 0.25, "otherwise": -1})
    assert (await evaluator.evaluate(a_context(runtime))).reward == 0.25
    assert (await evaluator.evaluate(a_context(runtime, outcome="turn_limit"))).reward == -1


@pytest.mark.parametrize("outcome", ["infra_error", "cancelled"])
async def test_our_own_fault_is_never_scored(runtime: FolderRuntime, outcome: Any) -> None:
    with pytest.raises(EvaluatorError):
        await plugins.make_evaluator("session_completed", {}).evaluate(a_context(runtime, outcome=outcome))


async def reward_of(runtime: FolderRuntime, output: bytes, *checks: dict[str, Any], **config: Any) -> float:
    evaluator = plugins.make_evaluator("test_on_output", {"checks": list(checks), **config})
    return (await evaluator.evaluate(a_context(runtime, stdout=output))).reward


@pytest.mark.parametrize(
    ("output", "check", "holds"),
    [
        (b" 42\n", {"kind": "equals", "value": "42"}, True),
        (b"42.", {"kind": "equals", "value": "42"}, False),
        (b"a.c", {"kind": "equals", "value": "a.c"}, True),
        (b"abc", {"kind": "contains", "value": "a.c"}, False),
        (b"the answer is Yes", {"kind": "contains", "value": "yes"}, False),
        (b"the answer is Yes", {"kind": "contains", "value": "yes", "ignore_case": True}, True),
        (b"took 12 ms", {"kind": "regex", "value": r"\b\d+ ms\Z"}, True),
        (b"TOOK", {"kind": "regex", "value": "took"}, False),
        (b"TOOK", {"kind": "regex", "value": "took", "ignore_case": True}, True),
        (b"\xff42", {"kind": "contains", "value": "42"}, True),
    ],
)
async def test_one_check(runtime: FolderRuntime, output: bytes, check: dict[str, Any], holds: bool) -> None:
    assert await reward_of(runtime, output, check) == float(holds)


async def test_checks_count_by_their_weights(runtime: FolderRuntime) -> None:
    right = {"kind": "contains", "value": "a", "weight": 3}
    wrong = {"kind": "regex", "value": "^z", "weight": 1}
    assert await reward_of(runtime, b"abc", right, wrong) == 0.75


async def test_blanks_stay_when_they_are_not_to_be_stripped(runtime: FolderRuntime) -> None:
    assert await reward_of(runtime, b"42\n", {"kind": "equals", "value": "42"}, strip=False) == 0.0


async def test_only_the_last_line_may_count(runtime: FolderRuntime) -> None:
    check = {"kind": "equals", "value": "42"}
    assert await reward_of(runtime, b"thinking...\n 42 \n\n", check, part="last_line") == 1.0
    assert await reward_of(runtime, b"42\nno\n", check, part="last_line") == 0.0
    assert await reward_of(runtime, b"", check, part="last_line") == 0.0


async def test_a_file_of_the_agent_may_be_what_counts(runtime: FolderRuntime) -> None:
    runtime.file("answer.txt").write_text("42\n")
    check, source = {"kind": "equals", "value": "42"}, {"source": "file", "path": "answer.txt"}
    assert await reward_of(runtime, b"", check, **source) == 1.0
    assert await reward_of(runtime, b"", check, **source, max_bytes=2) == 0.0


async def test_an_output_that_the_agent_did_not_make_fails_every_check(runtime: FolderRuntime) -> None:
    runtime.file("link").symlink_to("/etc/passwd")
    anything = {"kind": "regex", "value": ""}
    assert await reward_of(runtime, b"x", anything, source="file", path="nowhere") == 0.0
    assert await reward_of(runtime, b"x", anything, source="file", path="link") == 0.0
    assert await reward_of(runtime, b"x", anything, source="last_message") == 0.0


async def test_the_last_message_is_the_main_lines_last_answer(runtime: FolderRuntime) -> None:
    main = a_trace(said("assistant", "ls"), said("user", "files"), said("assistant", "done"), said("user", "thanks"))
    side = a_trace(said("assistant", "a title"), role="side", name="t1")
    config = {"source": "last_message", "checks": [{"kind": "equals", "value": "done"}]}
    evaluator = plugins.make_evaluator("test_on_output", config)
    assert (await evaluator.evaluate(a_context(runtime, traces=(main, side)))).reward == 1.0


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"checks": []},
        {"checks": [{"kind": "regex", "value": "("}]},
        {"checks": [{"kind": "equals", "value": "a", "weight": 0}]},
        {"checks": [{"kind": "equals", "value": "a"}], "source": "file"},
        {"checks": [{"kind": "equals", "value": "a"}], "path": "x"},
        {"checks": [{"kind": "equals", "value": "a"}], "sorce": "stdout"},
    ],
)
def test_wrong_checks_are_refused_when_the_task_is_checked(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        plugins.make_evaluator("test_on_output", config)
