"""`on_unparsed`: a session whose tool call nobody could read is trained on as a failure, by every trainer alike."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gangline.domain.contracts import Reward
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.trajectory import Trajectory
from gangline.interop.polar.sessions import needs_of_ours
from gangline.node.sessions.attempt import Attempt
from gangline.rows.rewards import lowered_where_unparsed
from gangline.rows.rows import rows_of
from gangline.train.collecting.degenerates import DegenerateSettings, why_degenerate
from gangline.train.collecting.groups import Group, why_invalid
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.parts import rewards_of_parts
from gangline.train.learning.samples import make_samples
from gangline.train.trainers.contract import rows_of as trainer_rows
from support.node.attempt import lease_of, node_parts
from support.training.samples import EXACT, session, trace

BROKEN = '<tool_call>\n{"name": "run", "arguments": {"command": \n</tool_call>'
"""What the published filter looks for: a tag on its own line, and no structured call."""
SCRIPT = {"rules": [{"pattern": "break it", "text": BROKEN}, {"pattern": ".", "text": "done"}]}
AGENT = """
import json, os, sys, urllib.request
tool = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
messages = []
for said in sys.argv[1:]:
    messages.append({"role": "user", "content": said})
    body = {"model": "m", "messages": messages, "tools": [tool]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    messages.append(json.load(urllib.request.urlopen(asked))["choices"][0]["message"])
"""


def agent_of(*said: str) -> dict[str, Any]:
    return {"harness": "shell", "settings": {"command": [sys.executable, "-c", AGENT, *said]}}


async def ended(folder: Path, *said: str, session_id: str = "s1", **task: Any) -> SessionResult:
    async with node_parts(folder, script=SCRIPT) as parts:
        return await Attempt(lease_of(session_id, agent=agent_of(*said), **task), parts).live()


def scored(most: Any = "keep", strategy: str = "session_completed", **config: Any) -> dict[str, Any]:
    return {"strategy": strategy, "config": config, "on_unparsed": most}


@pytest.mark.parametrize(
    ("said", "most", "config", "reward"),
    [
        (("break it", "go on"), "keep", {}, 1.0),
        (("break it", "go on"), 0, {}, 0.0),
        (("go on", "break it"), -0.5, {}, -0.5),
        (("go on",), 0, {}, 1.0),
        (("break it",), 0, {"completed": -1.0}, -1.0),
    ],
)
async def test_a_session_with_an_unreadable_call_earns_at_most_what_its_task_says(
    tmp_path: Path, said: tuple[str, ...], most: Any, config: dict[str, Any], reward: float
) -> None:
    result = await ended(tmp_path, *said, evaluator=scored(most, **config))
    assert (result.outcome, result.reward) == ("completed", reward), result.failure
    assert {row.reward for row in rows_of(result)} == {reward}, "exports"
    assert {row.session_reward for row in rows_of(result)} == {reward}
    assert why_invalid(result) is None
    assert all(row.loss_mask.any() for row in rows_of(result)), "it is trained on"
    is_lowered = most != "keep" and "break it" in said
    graded = config.get("completed", 1.0)
    assert result.reward_details.get("on_unparsed") == ({"num_turns": 1, "graded": graded} if is_lowered else None)


async def test_trainers_see_it_as_a_failure_among_its_group(tmp_path: Path) -> None:
    bad = await ended(tmp_path / "a", "break it", evaluator=scored(0))
    good = await ended(tmp_path / "b", "go on", session_id="s2", evaluator=scored(0))
    group = Group("t1", (bad, good))
    assert [(one.reward, one.session_reward) for one in trainer_rows(group, 2)] == [(0.0, 0.0), (1.0, 1.0)]
    advantages = [float(one.advantages[0]) for one in make_samples(group, algorithm("grpo"))]
    assert advantages[0] < 0 < advantages[1]
    assert why_degenerate(bad, DegenerateSettings(drop_unparsed=True)) == "tool calls that could not be read"
    assert why_degenerate(good, DegenerateSettings(drop_unparsed=True)) is None


async def test_parts_of_a_lowered_reward_are_no_way_around(tmp_path: Path) -> None:
    parts = [{"strategy": "session_completed", "name": "ends"}]
    result = await ended(tmp_path, "break it", evaluator=scored(0, "composite", parts=parts))
    assert result.reward == 0.0
    assert result.reward_details["parts"]["ends"]["reward"] == 1.0, "the evidence stays"
    assert rewards_of_parts(Group("t1", (result,)))["ends"].tolist() == [0.0]


async def test_steps_with_an_unreadable_call_earn_no_more_together(tmp_path: Path) -> None:
    def step(name: str, does: str) -> dict[str, Any]:
        return {"name": name, "instruction": does, "evaluator": scored(0)}

    agent = agent_of("{instruction}")
    async with node_parts(tmp_path, script=SCRIPT) as parts:
        lease = lease_of(agent=agent, steps=[step("one", "go on"), step("two", "break it")])
        result = await Attempt(lease, parts).live()
    assert [one["reward"] for one in result.reward_details["steps"]] == [1.0, 0.0]
    assert result.reward == 0.0, "its mean would reward the rows of the second step"


def test_traces_that_the_evaluator_rewarded_apart_keep_it_where_they_have_no_such_call() -> None:
    unread = trace(certificates=(msgspec.structs.replace(EXACT, parse="partial"),))
    found = session("s0", 1.0, trace(), unread).trajectory
    assert isinstance(found, Trajectory)
    reward = Reward(reward=1.0, trace_rewards={"s0/0": 0.7, "s0/1": 0.9}, turn_scores={"c0000": 0.5})
    lowered = lowered_where_unparsed(reward, found, 0.0)
    assert (lowered.reward, lowered.trace_rewards) == (0.0, {"s0/0": 0.7, "s0/1": 0.0})
    assert lowered.turn_scores == reward.turn_scores


def test_calls_of_models_that_are_not_trained_cost_nothing() -> None:
    unread = trace(
        loss_mask=np.zeros(3, np.int8),
        certificates=(msgspec.structs.replace(EXACT, parse="failed", engine_role="big"),),
    )
    found = session("s0", 1.0, unread).trajectory
    assert found is not None
    assert lowered_where_unparsed(Reward(reward=1.0), found, 0.0) == Reward(reward=1.0)


def test_a_gateway_of_polars_is_not_given_such_a_task() -> None:
    agent = {"harness": "codex"}
    asked = {"instruction": "x", "runtime": {"backend": "docker", "network": "full"}, "agent": agent}
    before, after = (
        needs_of_ours(TaskRequest.model_validate({**asked, "evaluator": evaluator}))
        for evaluator in ({}, {"on_unparsed": 0})
    )
    assert set(after) - set(before) == {"evaluator.on_unparsed"}
