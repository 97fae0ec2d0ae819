"""Every built-in evaluator keeps the promises that `gangline.testing.evaluator_conformance` asks of anyone's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from aiohttp import web
from pydantic import BaseModel, ConfigDict

from gangline.domain.contracts import EvaluationContext, GraderEngine, Reward
from gangline.domain.ids import new_id
from gangline.settings import plugins
from gangline.testing.evaluator_conformance import Check, Subject, checks, run_check
from support.node.folder_runtime import FolderRuntime
from support.requirements import need_module
from support.training.evaluation_samples import a_context, a_trace, said

COMPLETED = {"strategy": "session_completed"}
CONFIGS: dict[str, dict[str, Any]] = {
    "cases": {"cases": [{"input": "2", "output": "4"}]},
    "composite": {"parts": [COMPLETED, {"strategy": "script", "config": {"command": "echo 1 > reward.txt"}}]},
    "function": {"function": "json:dumps_length"},
    "judge": {"engine": "grader", "rubric": "Is it done?", "tries": 1},
    "math": {"answer": "42"},
    "per_turn": {"evaluator": COMPLETED, "rules": [{"when": "no_tool_call", "score": 1.0}]},
    "reward_model": {"engine": "grader", "tries": 1},
    "script": {"command": "echo 1 > reward.txt"},
    "session_completed": {},
    "shaped": {"evaluator": COMPLETED, "turns": {}},
    "staged": {"stages": [COMPLETED]},
    "test_on_output": {"checks": [{"kind": "regex", "value": "42"}]},
}
MODEL_ANSWER = {"choices": [{"message": {"content": '{"reason": "yes", "score": 10}'}}], "reward": 1.0}


def dumps_length(session: dict[str, Any]) -> float:
    return float(len(session["traces"]))


@pytest.fixture
async def model() -> Any:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(MODEL_ANSWER)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def subject_of(name: str, folder: Path, model: str) -> Subject:
    async def context() -> EvaluationContext:
        agents, clean = FolderRuntime(folder / new_id("agents")), FolderRuntime(folder / new_id("clean"))
        agents.file("solution.py").write_text("print(int(input()) ** 2)")
        made = a_context(agents, fresh=clean, stdout=b"42", traces=(a_trace(said("assistant", "It is 42")),))
        engines = {"grader": GraderEngine(url=model)}
        return msgspec.structs.replace(made, engines=engines, functions=frozenset(["json:dumps_length"]))

    return Subject(evaluator=plugins.load("evaluator", name), config=CONFIGS[name], context=context)


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", CONFIGS)
async def test_a_built_in_evaluator(
    name: str, check: Check, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "math":
        need_module("math_verify", "pip install 'gangline[math]'")
    import json

    monkeypatch.setattr(json, "dumps_length", dumps_length, raising=False)
    await run_check(check, subject_of(name, tmp_path, model))


class _Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Bad:
    """Breaks one promise after another, by its flag."""

    name: ClassVar[str] = "bad"
    Config: ClassVar[type[BaseModel]] = _Anything
    how: ClassVar[str] = ""
    calls: ClassVar[int] = 0

    def __init__(self, config: Any) -> None:
        pass

    async def evaluate(self, context: EvaluationContext) -> Reward:
        type(self).calls += 1
        if self.how == "blocks":
            import time

            time.sleep(1.2)
        if self.how == "swallows":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return Reward(reward=0.0)
        if self.how == "breaks":
            raise KeyError("x")
        if self.how == "writes":
            context.artifacts["../x"] = b""
        trace = {"elsewhere": 1.0} if self.how == "invents" else {}
        return Reward(reward=float(self.calls if self.how == "counts" else 1), trace_rewards=trace)


@pytest.mark.parametrize(
    ("how", "check"),
    [
        ("", "its_configuration_is_checked_and_travels"),
        ("blocks", "it_leaves_the_event_loop_to_others"),
        ("swallows", "it_ends_when_it_is_cancelled"),
        ("breaks", "it_grades_a_session_without_calls_or_says_why_not"),
        ("writes", "its_evidence_can_be_kept"),
        ("invents", "its_reward_fits_the_session"),
        ("counts", "it_grades_equal_sessions_equally"),
    ],
)
async def test_an_evaluator_that_breaks_a_promise_is_found(how: str, check: str, tmp_path: Path) -> None:
    bad = type("Bad", (_Bad,), {"how": how, "calls": 0})
    subject = Subject(evaluator=bad, config={}, context=subject_of("math", tmp_path, "").context)
    found = next(one for one in checks() if one.__name__ == check)
    with pytest.raises(AssertionError):
        await run_check(found, subject)
