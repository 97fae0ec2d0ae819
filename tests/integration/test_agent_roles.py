"""Roles that a client names by a header: recorded with each call, carried to rows, rewarded and compared apart."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gangline.cli.tasks.files import validated
from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import TurnSpan
from gangline.node.sessions.attempt import Attempt
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from gangline.serving.scripted.server import scripted_server
from gangline.train.collecting.groups import Group
from gangline.train.learning.credit.roles import role_rewards
from gangline.train.learning.samples import make_samples
from gangline.train.run.experiment import read_experiment
from support.node.attempt import lease_of, node_parts
from support.node.proxy import proxied_engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "self_play"
ASKED: list[Any] = [{"role": "user", "content": "hi"}]


def solver(number: int) -> dict[str, str]:
    return {"x-gangline-role": f"solver-{number}"}


def spans(completions: list[Completion]) -> list[TurnSpan]:
    built = PrefixMergingBuilder().build(CompletionTree(completions), session_id="s1", task_id="t1")
    return [span for trace in built.traces for span in trace.spans]


async def test_roles_are_recorded_in_every_dialect_and_reach_the_rows() -> None:
    async with scripted_server({"default": {"text": "x"}}) as engine, proxied_engine(engine) as running:
        async with running.client(default_headers=solver(0)) as client:
            await client.chat.completions.create(model="m", messages=ASKED)
            await client.responses.create(model="m", input="hello", extra_headers=solver(1))
        async with running.client() as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "nobody"}])
        root = running.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=running.session.key, max_retries=0) as client:
            await client.messages.create(model="m", max_tokens=5, messages=ASKED, extra_headers=solver(2))
    roles = [span.agent_role for span in spans(running.journal.completions)]
    assert roles == ["solver-0", "solver-1", None, "solver-2"]


async def test_a_role_in_metadata_counts_where_no_header_names_one() -> None:
    script = {"default": {"text": "x"}}
    async with scripted_server(script) as engine, proxied_engine(engine) as running, running.client() as client:
        chat, responses = client.chat.completions, client.responses
        await chat.create(model="m", messages=ASKED, metadata={"role": "judge", "run": "7"})
        await responses.create(model="m", input="hello", metadata={"role": "coder"})
        await responses.create(model="m", input="you", metadata={"role": "coder"}, extra_headers=solver(1))
        await chat.create(model="m", messages=[*ASKED, *ASKED], metadata={"role": "the head of it all"})
    roles = [span.agent_role for span in spans(running.journal.completions)]
    assert roles == ["judge", "coder", "solver-1", None]


async def test_the_same_words_of_two_roles_are_two_calls() -> None:
    """One would otherwise be taken for a retry of the other, which is in flight."""
    script = {"default": {"text": "x", "delay_s": 0.3}}
    async with scripted_server(script) as engine, proxied_engine(engine) as running, running.client() as client:
        calls = (
            client.chat.completions.create(model="m", messages=ASKED, extra_headers=solver(number)) for number in (0, 1)
        )
        await asyncio.gather(*calls)
    assert sorted(str(one.metadata["agent_role"]) for one in running.journal.completions) == ["solver-0", "solver-1"]


@pytest.mark.parametrize("role", ["two words", "x" * 65, "-x", ""])
async def test_what_is_no_name_is_refused_in_the_clients_format(role: str) -> None:
    headers = {"x-gangline-role": role}
    async with scripted_server({"default": {"text": "x"}}) as engine, proxied_engine(engine) as running:
        async with running.client() as client:
            with pytest.raises(openai.BadRequestError, match="x-gangline-role"):
                await client.chat.completions.create(model="m", messages=ASKED, extra_headers=headers)
        root = running.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=running.session.key, max_retries=0) as client:
            with pytest.raises(anthropic.BadRequestError, match="x-gangline-role"):
                await client.messages.create(model="m", max_tokens=5, messages=ASKED, extra_headers=headers)
    assert running.journal.completions == []


def example_task() -> dict[str, Any]:
    """The first task of the self-play example, by this interpreter and without a sandbox."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        from tasks import build_tasks
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("tasks", None)
    task = next(build_tasks(1, runtime="process"))
    validated(task, "the example")
    text = json.dumps({key: value for key, value in task.items() if key != "task_id"})
    return json.loads(text.replace('"python3"', json.dumps(sys.executable)))


async def episode(folder: Path, session_id: str, question: str, answer: str) -> SessionResult:
    script = {"rules": [{"pattern": "Set a sum", "text": question}, {"pattern": "What is", "text": answer}]}
    async with node_parts(folder, script=script) as parts:
        return await Attempt(lease_of(session_id, **example_task()), parts).live()


async def test_the_self_play_example_rewards_its_players_apart(tmp_path: Path) -> None:
    """The first solver is right, the second wrong: what one player gains in the group, the other loses."""
    solved, unsolved, refused = await asyncio.gather(
        episode(tmp_path / "a", "s1", "2 + 3", "5"),
        episode(tmp_path / "b", "s2", "2 + 3", "6"),
        episode(tmp_path / "c", "s3", "a hard one", "?"),
    )
    assert [one.reward for one in (solved, unsolved, refused)] == [1.0, 0.0, 0.0], solved.failure
    found = [_rewards(one) for one in (solved, unsolved, refused)]
    assert found == [{"proposer": 0.0, "solver": 1.0}, {"proposer": 1.0, "solver": 0.0}, {"proposer": 0.0}]
    (tmp_path / "experiment.yaml").write_text((EXAMPLE / "experiment.yaml").read_text())
    algorithm = read_experiment(tmp_path / "experiment.yaml").algorithm.resolve()
    samples = make_samples(Group("t1", (solved, unsolved)), algorithm)
    advantages = [round(float(sample.advantages[0]), 3) for sample in samples]
    assert advantages == [-1.0, 1.0, 1.0, -1.0], "proposer and solver of each session"


def _rewards(result: SessionResult) -> dict[str, float]:
    assert result.trajectory is not None
    return role_rewards(result, result.trajectory.traces)
