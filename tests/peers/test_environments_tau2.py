"""Tasks of tau2-bench in sessions. Its own runner and evaluator judge, at commit a2c0247, in a Python of their own.

GANGLINE_TAU2 is the folder of a Python environment with tau2-bench, whose checkout lies inside of it:

    python3.12 -m venv tau2
    git clone https://github.com/sierra-research/tau2-bench tau2/tau2-bench
    git -C tau2/tau2-bench checkout a2c024725189473d2d7cea3a5cfdbcc67478e41f
    tau2/bin/pip install -e tau2/tau2-bench
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.session import SessionResult
from gangline.interop.environments import kinds
from gangline.machine.reading.imported import Choices, Imported
from gangline.tasks.importers.source import Wanted, read_source
from support.compared import same
from support.node.environments import calls_of, directly, need_python, played
from support.node.proxy import proxied

HELLO, THANKS = "Hello, please do what I need.", "Thank you. ###STOP###"
VERDICT = '{"results": [{"expectedOutcome": "all", "reasoning": "so", "metExpectation": true}]}'
OTHERS: list[dict[str, Any]] = [
    {"pattern": "expectedOutcomes", "where": "any", "text": VERDICT},
    {"pattern": "<scenario>", "where": "any", "turn": 0, "text": HELLO},
    {"pattern": "<scenario>", "where": "any", "text": THANKS},
]
"""The judge, and the user: one greeting, and the end of the talk as soon as the agent says a word."""

# Tasks that the checkout has the data of, and the steps of two agents in each.
PLANS = """
import os
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LOGURU_LEVEL": "ERROR"}
from tau2.registry import registry
def steps_of(task):
    criteria = task.evaluation_criteria
    actions = [[one.name, one.arguments] for one in (criteria.actions or []) if one.requestor == "assistant"]
    said = " ".join(criteria.communicate_info or []) or "It is done."
    return {"oracle": [*actions, ["respond", {"message": said}]], "nothing": [["done", {}]]}
tasks_of, plans = {}, []
for domain, most in (("mock", 10), ("retail", 14), ("airline", 14)):
    try:
        registry.get_env_constructor(domain)()
        tasks = registry.get_tasks_loader(domain)()[:most]
    except FileNotFoundError:
        continue  # a checkout that lacks large files
    tasks_of[domain] = {one.id: one for one in tasks if one.evaluation_criteria is not None}
    for task in tasks_of[domain].values():
        plans += [[domain, task.id, name, steps] for name, steps in steps_of(task).items()]
"""

# tau2's side: its runner, with its own agent kind that takes the steps, and nothing of ours.
THEIRS = """
from tau2.agent.base_agent import HalfDuplexAgent
from tau2.data_model.message import AssistantMessage, ToolCall
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.registry import registry
from tau2.runner.simulation import run_simulation
from tau2.user.user_simulator import UserSimulator
import tau2.evaluator.evaluator_nl_assertions as judge

class Scripted(HalfDuplexAgent):
    def get_init_state(self, message_history=None):
        return list(steps)
    def generate_next_message(self, message, state):
        name, arguments = state[0] if state else ("done", {})
        if name in ("respond", "done"):
            said = AssistantMessage(role="assistant", content=arguments.get("message", "###STOP###"))
        else:
            said = AssistantMessage(role="assistant", tool_calls=[ToolCall(id="1", name=name, arguments=arguments)])
        return said, state[1:]
    @classmethod
    def is_stop(cls, message):
        return "###STOP###" in (message.content or "")

calls = {"api_base": given["url"] + "/v1", "api_key": given["key"], "temperature": 0.0}
judge.DEFAULT_LLM_NL_ASSERTIONS, judge.DEFAULT_LLM_NL_ASSERTIONS_ARGS = "openai/judge", calls
theirs = []
for domain, task_id, name, steps in plans:
    environment = registry.get_env_constructor(domain)()
    task = tasks_of[domain][task_id]
    user_tools = environment.get_user_tools(include=task.user_tools) if environment.user_tools else None
    user = UserSimulator(llm="openai/user", llm_args=calls, tools=user_tools or None, instructions=task.user_scenario)
    agent = Scripted(environment.get_tools(), environment.get_policy())
    try:
        run = run_simulation(Orchestrator(domain, agent, user, environment, task, max_steps=200))
    except ValueError as error:  # an assertion of the task that its own evaluator stumbles over
        theirs.append(str(error))
        continue
    breakdown = run.reward_info.model_dump(mode="json")["reward_breakdown"]
    theirs.append([run.reward_info.reward, breakdown, run.termination_reason.value])
"""

# Our program of the environment, without the session around it.
OURS = """
import contextlib
sys.path.insert(0, given["programs"])
os.environ |= {"GANGLINE_BASE_URL": given["url"], "GANGLINE_API_KEY": given["key"]}
from in_sandbox import tau2_talk
from in_sandbox.protocol import Refused
ours = []
for domain, task_id, name, steps in plans:
    talk = tau2_talk.begin({**given["config"], "domain": domain, "task": task_id})
    tools = {tool.name: tool.call for tool in talk.tools}
    rewards = []
    try:
        for tool, arguments in steps:
            with contextlib.suppress(Refused):
                rewards.append(tools[tool](arguments).reward)
    except ValueError as error:
        ours.append(str(error))
        continue
    finish = tools["finish"]({})
    parts = json.loads(finish.text)
    rewards = [one for one in [*rewards, finish.reward] if one is not None]
    ours.append([*rewards, parts.get("reward_breakdown"), parts.get("termination_reason")])
result = {"plans": plans, "theirs": theirs, "ours": ours}
"""


@pytest.fixture(scope="module")
def python() -> str:
    return need_python("GANGLINE_TAU2", "tau2", "tau2", "tau2.orchestrator")


def talk(python: str, task: str, domain: str = "mock", network: str = "proxy", **config: Any) -> dict[str, Any]:
    return {
        "kind": "tau2",
        "config": {"domain": domain, "task": task, **config},
        "runtime": {"backend": "sandbox", "python": python, "network": network},
        "start_timeout_seconds": 240,
        "call_timeout_seconds": 240,
    }


@pytest.mark.timeout(1500)
async def test_an_agent_earns_what_tau2s_own_runner_gives_it(python: str) -> None:
    config = kinds.Tau2Config(domain="-", task="-").model_dump(mode="json")
    programs = str(Path(kinds.__file__).parent)
    async with proxied({"rules": OTHERS, "context_length": 1 << 18}) as running:
        given = {"url": running.base_url.removesuffix("/v1"), "key": running.session.key}
        code = PLANS + THEIRS + OURS
        found = await asyncio.to_thread(directly, python, code, **given, programs=programs, config=config)
    names = [tuple(plan[:3]) for plan in found["plans"]]
    keys = [(f"{domain} {task}", name) for domain, task, name in names]
    same("tau2-bench", *(dict(zip(keys, found[side], strict=True)) for side in ("theirs", "ours")))
    theirs = dict(zip(names, found["theirs"], strict=True))
    assert len({(domain, task) for domain, task, _ in names}) >= 20
    earned = {name: [theirs[one][0] for one in names if one[2] == name] for name in ("oracle", "nothing")}
    assert earned["oracle"].count(1.0) >= 18
    assert earned["nothing"].count(0.0) >= 15


def rules_of(*steps: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    calls = [
        {"turn": turn, "pattern": ".", "tool_calls": [{"name": f"game__{tool}", "arguments": arguments}]}
        for turn, (tool, arguments) in enumerate(steps)
    ]
    return [*OTHERS, *calls, {"pattern": ".", "text": "Goodbye."}]


async def talked(folder: Path, environment: dict[str, Any], *steps: tuple[str, dict[str, Any]]) -> SessionResult:
    return await played(folder, environment, rules_of(*steps), init_timeout_seconds=400)


MAKE = ("create_task", {"user_id": "user_1", "title": "Important Meeting"})
TELL = ("respond", {"message": "It is done."})


async def test_a_session_has_the_reward_its_parts_and_the_users_calls_apart(tmp_path: Path, python: str) -> None:
    result = await talked(tmp_path, talk(python, "create_task_1_with_env_assertions"), MAKE, TELL)
    assert (result.outcome, result.reward) == ("completed", 1.0), result.failure
    assert [(call.tool, call.reward, call.done) for call in calls_of(result)] == [
        ("create_task", None, False),
        ("respond", 1.0, True),
    ]
    parts = json.loads(result.reward_details["finish"][0]["text"])
    assert parts == {
        "reward": 1.0,
        "reward_basis": ["DB", "ENV_ASSERTION"],
        "reward_breakdown": {"DB": 1.0, "ENV_ASSERTION": 1.0},
        "termination_reason": "user_stop",
    }
    assert result.trajectory is not None
    agent, user = sorted(result.trajectory.traces, key=lambda trace: trace.role)
    assert "Mock Domain Policy" in str(agent.prompt_messages)
    assert HELLO in str(agent.prompt_messages), "the user speaks first"
    assert {tool.name for tool in agent.tools} >= {"game__create_task", "game__respond", "game__done"}
    assert [(span.agent_role, span.score) for span in agent.spans] == [(None, None), (None, 1.0), (None, None)]
    assert [span.agent_role for span in user.spans] == ["user", "user"]
    assert (agent.role, user.role) == ("main", "sub_agent")
    assert (agent.untrainable, user.untrainable) == (None, "call of an environment, not of the agent")
    assert "Important Meeting" in str(user.prompt_messages), "the scenario"
    assert "Important Meeting" not in str(agent.prompt_messages)


async def test_another_model_plays_the_user_where_its_role_has_engines(tmp_path: Path, python: str) -> None:
    others = {"user": {"default": {"text": "I am another model ###STOP###"}, "context_length": 1 << 17}}
    result = await played(
        tmp_path, talk(python, "create_task_1"), rules_of(), init_timeout_seconds=400, role_scripts=others
    )
    assert (result.outcome, result.reward) == ("completed", 0.0), "the user ended the talk at once"
    assert [one.certificate.engine_role for one in result.completions] == ["user", None]
    assert json.loads(result.reward_details["finish"][0]["text"])["termination_reason"] == "user_stop"


async def test_the_user_has_tools_over_the_same_database(tmp_path: Path, python: str) -> None:
    scenario = {"pattern": "<scenario>", "where": "any"}
    dismiss = {"name": "dismiss_notification", "arguments": {"notification_id": "notif_1"}}
    user = [{**scenario, "turn": 0, "text": HELLO}, {**scenario, "turn": 1, "tool_calls": [dismiss]}]
    update = ("update_task_status", {"task_id": "task_1", "status": "completed"})
    rules = [*user, *rules_of(update, TELL)]
    environment = talk(python, "update_task_with_user_tools")
    result = await played(tmp_path, environment, rules, init_timeout_seconds=400)
    assert (result.outcome, result.reward) == ("completed", 0.0), result.failure
    parts = json.loads(result.reward_details["finish"][0]["text"])
    # The assertion wants the notification dismissed; tau2's reference actions forget it, so both cannot be had.
    assert parts["reward_breakdown"] == {"DB": 0.0, "ACTION": 1.0, "ENV_ASSERTION": 1.0}
    assert [call.tool for call in calls_of(result)] == ["update_task_status", "respond"]
    assert result.trajectory is not None
    assert {trace.role: len(trace.spans) for trace in result.trajectory.traces} == {"main": 3, "sub_agent": 3}


async def test_the_judge_of_assertions_is_a_role_too(tmp_path: Path, python: str) -> None:
    result = await talked(tmp_path, talk(python, "2", "retail"), ("done", {}))
    assert result.outcome == "completed", result.failure
    roles = [one.metadata.get("agent_role") for one in result.completions]
    assert (roles.count("user"), roles.count("judge"), roles.count(None)) == (1, 1, 2)
    parts = json.loads(result.reward_details["finish"][0]["text"])
    assert parts["reward_breakdown"] == {"DB": 0.0, "NL_ASSERTION": 1.0}
    assert result.reward == 0.0


async def test_a_talk_that_nobody_ended_and_a_tools_error(tmp_path: Path, python: str) -> None:
    wrong = ("create_task", {"user_id": "nobody", "title": "x"})
    result = await talked(tmp_path, talk(python, "create_task_1"), wrong)
    (call,) = calls_of(result)
    assert (call.is_error, "nobody" in call.text) == (True, True)
    assert (result.outcome, result.reward) == ("completed", 0.0)
    assert "neither the agent nor the user ended the talk" in result.reward_details["finish"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"domain": "moon", "task": "1"}, "tau2-bench has no domain 'moon'; it has: mock, "),
        ({"task": "cook"}, "domain 'mock' has no task 'cook'; its tasks are: create_task_1, "),
        ({"task": "create_task_1", "network": "none"}, "give the environment's `runtime` the network `proxy`"),
    ],
    ids=["domain", "task", "network"],
)
async def test_what_is_missing_is_named(tmp_path: Path, python: str, fields: dict[str, Any], said: str) -> None:
    result = await talked(tmp_path, talk(python, **fields))
    assert result.outcome == "infra_error"
    assert result.failure is not None
    assert said in result.failure.message


def imported(source: str, python: str, **wanted: Any) -> list[Imported]:
    found = list(read_source(Path(source), Wanted(choices=Choices(python=python), **wanted)))
    return [one for one in found if isinstance(one, Imported)]


async def test_tasks_are_imported_and_played(tmp_path: Path, python: str) -> None:
    one, *others = imported("tau2:mock", python)
    assert one.name == "mock-create_task_1"
    assert len(others) == 9
    test_split = {task.name for task in imported("tau2:retail@test", python, filters=("retail-*",))}
    assert test_split
    assert test_split < {task.name for task in imported("tau2:retail", python)}
    body = dict(one.body)
    environment = body["environments"].pop("tau2")
    body["environments"] = {"game": environment}
    body["runtime"] = {"backend": "process"}
    result = await played(tmp_path, environment, rules_of(MAKE, TELL), **body)
    assert (result.outcome, result.reward) == ("completed", 1.0), result.failure


@pytest.mark.parametrize(
    ("source", "said"),
    [("tau2:moon", "there is no domain 'moon'; there are: mock, "), ("tau2:retail@x", "no split 'x'; it has: train, ")],
)
def test_an_import_names_what_there_is(python: str, source: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        imported(source, python)
