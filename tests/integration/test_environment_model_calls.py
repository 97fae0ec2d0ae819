"""Model calls of an environment, such as a simulated user's: answered and recorded, but never the agent's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.completion import OF_ENVIRONMENT, CompletionTree
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.sessions.attempt import session_spec
from gangline.rows.audit import audit
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from support.node.attempt import lease_of
from support.node.environments import calls_of, played, using
from support.node.proxy import proxied
from support.requirements import need_command, need_module
from support.store.completions import completion

SERVER = """
import json, os, urllib.error, urllib.request
from mcp.server import MCPServer

server = MCPServer("counter")

def post(path, body, **headers):
    url, key = os.environ["GANGLINE_BASE_URL"], os.environ["GANGLINE_API_KEY"]
    headers |= {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code

@server.tool()
def ask(question: str) -> str:
    messages = [{"role": "system", "content": "You are the customer."}, {"role": "user", "content": question}]
    answers = []
    for number in range(3):
        reply = post("/v1/chat/completions", {"model": "m", "messages": messages}, **{"x-gangline-role": "user"})
        answers.append(reply["choices"][0]["message"]["content"])
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": f"and {number}?"}]
    return " ".join(answers)

@server.tool()
def cheat() -> str:
    params = {"name": "ask", "arguments": {"question": "?"}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    return str(post("/mcp/game", call))

@server.tool()
def variables() -> str:
    return ",".join(sorted(name for name in os.environ if name.startswith("GANGLINE_")))

server.run()
"""
CUSTOMER: list[dict[str, Any]] = [
    {"pattern": "the customer", "where": "any", "text": "a customer's long and wordy answer"}
]

TOOL_CALL = """
import json, os, urllib.request
url, key = os.environ["GANGLINE_BASE_URL"], os.environ["GANGLINE_API_KEY"]
call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "ask", "arguments": {"question": "?"}}}
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
print(urllib.request.urlopen(urllib.request.Request(url + "/mcp/game", json.dumps(call).encode(), headers)).read())
"""


@pytest.fixture(autouse=True)
def _needed() -> None:
    need_module("mcp", "pip install 'gangline[mcp]'")
    need_command("bwrap", "apt-get install bubblewrap")


def counter(network: str = "proxy") -> dict[str, Any]:
    prepare = [{"type": "write", "path": "server.py", "content": SERVER}]
    runtime = {"backend": "sandbox", "network": network, "prepare": prepare}
    return {"kind": "mcp", "config": {"command": [sys.executable, "server.py"]}, "runtime": runtime}


def asking(*questions: str) -> list[dict[str, Any]]:
    return [*CUSTOMER, *using([{"question": one} for one in questions], tool="game__ask")]


def traces_by_role(result: SessionResult) -> dict[str, Any]:
    assert result.trajectory is not None, result.failure
    assert audit(result.trajectory, result.completions).violations == ()
    found = {trace.role: trace for trace in result.trajectory.traces}
    assert len(found) == len(result.trajectory.traces)
    return found


async def test_its_calls_are_recorded_apart_and_not_trained_on(tmp_path: Path) -> None:
    result = await played(tmp_path, counter(), asking("hello?"))
    assert result.outcome == "completed", result.failure
    (call,) = calls_of(result)
    assert call.text == " ".join(["a customer's long and wordy answer"] * 3)
    traces = traces_by_role(result)
    assert [(span.agent_role, span.role) for span in traces["main"].spans] == [(None, "main")] * 2
    assert traces["main"].untrainable is None
    assert traces["main"].loss_mask.any()
    customer = traces["sub_agent"]
    assert [span.agent_role for span in customer.spans] == ["user"] * 3
    assert customer.untrainable == "call of an environment, not of the agent"
    assert not customer.loss_mask.any()
    assert [one.of_environment for one in result.completions].count(True) == 3
    assert [one.trainable for one in result.completions if one.of_environment] == [False] * 3


async def test_they_count_against_no_limit_of_the_agents(tmp_path: Path) -> None:
    result = await played(tmp_path, counter(), asking("hello?"))
    of_agent = [one for one in result.completions if not one.of_environment]
    num_tokens = sum(len(one.sampled_ids) for one in of_agent)
    agent: dict[str, Any] = {"harness": "native", "settings": {"tools": []}}
    agent |= {"max_turns": 2, "max_sampled_tokens": num_tokens}
    again = await played(tmp_path / "again", counter(), asking("hello?"), agent=agent)
    assert (again.outcome, len(again.completions)) == ("completed", 5)


async def test_a_program_whose_environment_alone_called_a_model_made_no_model_call(tmp_path: Path) -> None:
    agent = {"harness": "shell", "settings": {"command": f"{sys.executable} - <<'END'\n{TOOL_CALL}\nEND"}}
    result = await played(tmp_path, counter(), CUSTOMER, agent=agent)
    assert len(calls_of(result)) == 1, result.artifacts["harness.stderr"]
    assert result.outcome == "no_model_call"


async def test_its_key_opens_model_calls_alone(tmp_path: Path) -> None:
    rules = using([{}], tool="game__cheat")
    result = await played(tmp_path, counter(), rules)
    (call,) = calls_of(result)
    assert call.text == "401"


async def test_a_sandbox_that_does_not_reach_the_node_has_no_key(tmp_path: Path) -> None:
    rules = using([{}], tool="game__variables")
    shown: list[str] = []
    for network in ("proxy", "none"):
        result = await played(tmp_path / network, counter(network), rules)
        shown += [call.text for call in calls_of(result)]
    assert shown == ["GANGLINE_API_KEY,GANGLINE_BASE_URL", ""]


async def test_a_role_with_engines_of_its_own_plays_it_and_can_be_trained(tmp_path: Path) -> None:
    rules = using([{"question": "hello?"}], tool="game__ask")
    result = await played(tmp_path, counter(), rules, role_scripts={"user": {"default": {"text": "another model"}}})
    (call,) = calls_of(result)
    assert call.text == " ".join(["another model"] * 3)
    assert traces_by_role(result)["sub_agent"].untrainable == "engine of role user"
    builder = PrefixMergingBuilder(PrefixMergingConfig(engine_role="user", strict=True))
    built = builder.build(CompletionTree(result.completions), session_id="s1", task_id="t1")
    assert audit(built, result.completions).violations == ()
    trained = {trace.role for trace in built.traces if trace.untrainable is None}
    assert trained == {"sub_agent"}, json.dumps([trace.untrainable for trace in built.traces])


async def test_a_session_that_goes_on_counts_the_agents_earlier_calls_alone() -> None:
    """A later step's limits are added to what the agent used before, which an environment's calls are no part of."""
    agents = completion(0, session="s2")
    others = [
        msgspec.structs.replace(completion(number, session="s2"), started_at=number, metadata={OF_ENVIRONMENT: True})
        for number in (2, 3)
    ]
    async with proxied({"rules": CUSTOMER}) as running:
        spec = SessionSpec(session_id="s2", attempt=1, key="gls-other")
        session = ModelSession(spec, running.engine, running.journal, completions=[agents, *others])
        assert session.num_calls == 1


@pytest.mark.parametrize("of_environment", [False, True])
def test_a_later_step_may_use_as_many_tokens_as_the_first(of_environment: bool) -> None:
    before = msgspec.structs.replace(completion(0), metadata={OF_ENVIRONMENT: True} if of_environment else {})
    lease = lease_of(
        agent={"harness": "shell", "settings": {"command": "true"}, "max_turns": 4, "max_sampled_tokens": 9}
    )
    spec = session_spec(lease, TaskRequest.model_validate(lease.task), "gls-key", [before])
    assert (spec.max_turns, spec.max_sampled_tokens) == ((4, 9) if of_environment else (5, 11))
