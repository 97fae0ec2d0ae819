"""Roles that engines of their own answer: their own tokens, apart from the policy's calls, rows and weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from gangline.cli.machine.checks_service import check_service
from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.errors import Conflict, EngineUnavailable, InvalidRequest, NotFound
from gangline.domain.session import Heartbeat
from gangline.domain.trajectory import Trajectory
from gangline.node.backends.by_role import BackendsByRole
from gangline.node.backends.engine import BackendSpec
from gangline.node.backends.pool import BackendPool
from gangline.node.calls.session import ModelSession
from gangline.rows.audit import audit
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.conversations.conversation import main_conversation
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.settings.machine import Settings
from gangline.settings.node import NodeSettings, RoleEngines
from gangline.wire.client.server import ServerClient
from support.node.backends import KillableEngine
from support.node.node import TOKEN, running_node
from support.node.proxy import MemoryJournal, Proxied, proxied_engine
from support.node.weights import agent, sampler_of, save, weights_of
from support.service.cli_process import gangline
from support.service.running import any_plugin

POLICY: dict[str, Any] = {"default": {"text": "I am the policy and this is my answer"}}
CRITIC: dict[str, Any] = {"default": {"text": "I am the critic"}}
AS_CRITIC = {"x-gangline-role": "critic"}


class MirroredTokenizer(TinyTokenizer):
    """Other ids for the same text."""

    def encode(self, text: str) -> list[int]:
        return [self.num_ids - 1 - one for one in super().encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([self.num_ids - 1 - one for one in ids])


class Episode:
    """A solver and its critic in one session, each with its own conversation."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.client = client
        self._said: dict[str | None, list[Any]] = {}

    async def turn(self, text: str, role: str | None = None) -> str:
        messages = self._said.setdefault(role, [])
        messages.append({"role": "user", "content": text})
        headers = {} if role is None else {"x-gangline-role": role}
        reply = await self.client.chat.completions.create(model="m", messages=messages, extra_headers=headers)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return str(reply.choices[0].message.content)


@asynccontextmanager
async def two_models(
    session_of: dict[str, Any] | None = None, wait_s: float = 60.0
) -> AsyncGenerator[tuple[Proxied, BackendsByRole, list[str]]]:
    """A session before a policy and a critic, whose tokenizer is another. session_of: options of the session."""
    async with AsyncExitStack() as stack:
        policy = await stack.enter_async_context(scripted_server(POLICY))
        critic = await stack.enter_async_context(scripted_server(CRITIC, MirroredTokenizer()))
        backends = BackendsByRole(partial(BackendPool, 3600.0, wait_s=wait_s))
        stack.push_async_callback(backends.close)
        await backends.add(BackendSpec(policy))
        await backends.add(BackendSpec(critic, role="critic"))
        running = await stack.enter_async_context(
            proxied_engine(
                backends.policy.engine_for("s1", "t"),
                engine_of=partial(backends.engine_for, session_id="s1", task_id="t"),
                **(session_of or {}),
            )
        )
        yield running, backends, [policy, critic]


def built(completions: Sequence[Completion], engine_role: str | None = None) -> Trajectory:
    builder = PrefixMergingBuilder(PrefixMergingConfig(engine_role=engine_role, strict=True))
    return builder.build(CompletionTree(completions), session_id="s1", task_id="t1")


async def test_two_roles_of_one_session_are_exact_each_in_its_own_tokens() -> None:
    async with two_models() as (running, _, _), running.client() as client:
        episode = Episode(client)
        for text in ("hello", "and this?", "done"):
            assert await episode.turn(text) == POLICY["default"]["text"]
            assert await episode.turn(text, "critic") == CRITIC["default"]["text"]
        (critic,) = (await client.models.list(extra_headers=AS_CRITIC)).data
        assert critic.id == "scripted"
    tree = CompletionTree(running.journal.completions)
    for role, tokenizer in ((None, TinyTokenizer()), ("critic", MirroredTokenizer())):
        turns = [one for one in tree if one.certificate.engine_role == role]
        assert [one.certificate.context for one in turns] == ["first", "exact", "exact"]
        assert [one.certificate.prompt_source for one in turns[1:]] == ["stitched", "stitched"]
        text = tokenizer.decode(tree.context_ids(turns[-1]).tolist())
        assert text.startswith("<|im_start|>user\nhello<|im_end|>")
        assert text.count("I am the ") == 3
    assert len({one.certificate.tokenizer_digest for one in tree}) == 2
    assert {one.metadata.get("agent_role") for one in tree} == {None, "critic"}


async def test_a_conversation_that_a_role_takes_over_begins_anew_with_its_model() -> None:
    """The same messages in other ids: neither the engine's prompt nor the record has any of the policy's."""
    async with two_models() as (running, _, _), running.client() as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        reply = await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
        messages += [{"role": "user", "content": "is this the answer?"}]
        await client.chat.completions.create(model="m", messages=messages, extra_headers=AS_CRITIC)
    _, critic = running.journal.completions
    assert (critic.parent_id, critic.certificate.context, critic.lineage.relation) == (None, "first", "root")
    assert "is this the answer?" in MirroredTokenizer().decode(critic.prompt_suffix_ids.tolist())


async def test_only_the_model_that_is_asked_for_is_trained_on() -> None:
    async with two_models() as (running, _, _), running.client() as client:
        episode = Episode(client)
        for text in ("hello", "and this?"):
            await episode.turn(text)
            await episode.turn(text, "critic")
    completions = running.journal.completions
    for wanted, why in ((None, "engine of role critic"), ("critic", "engine of the policy")):
        trajectory = built(completions, wanted)
        assert audit(trajectory, completions).violations == ()
        trained, left_out = sorted(trajectory.traces, key=lambda trace: trace.untrainable or "")
        assert (trained.untrainable, left_out.untrainable) == (None, why)
        assert trained.loss_mask.any()
        assert not left_out.loss_mask.any()
        assert {one.engine_role for one in trained.certificates} == {wanted}
        assert {span.model for span in trained.spans} == {"scripted"}
    assert [one.trainable for one in completions] == [True, False, True, False]


async def test_the_audit_refuses_rows_that_train_two_models() -> None:
    async with two_models() as (running, _, _), running.client() as client:
        episode = Episode(client)
        await episode.turn("hello")
        await episode.turn("hello", "critic")
    completions = running.journal.completions
    policy, critic = built(completions).traces
    both = replace(built(completions), traces=(policy, built(completions, "critic").traces[1]))
    (violation,) = audit(both, completions).violations
    assert (violation.rule, "role critic, the policy" in violation.message) == ("mask", True)
    assert critic.untrainable is not None


async def test_a_role_of_another_model_is_never_the_sessions_main_conversation() -> None:
    async with two_models() as (running, _, _), running.client() as client:
        episode = Episode(client)
        await episode.turn("hello")
        for text in ("look at this", "and this", "and this too"):
            await episode.turn(text, "critic")
    traces = {trace.certificates[0].engine_role: trace for trace in built(running.journal.completions).traces}
    assert (traces[None].role, traces["critic"].role) == ("main", "sub_agent")
    main = main_conversation(running.journal.completions)
    assert main is not None
    assert main.last.certificate.engine_role is None


async def test_a_role_goes_on_exactly_after_a_restart_of_the_node() -> None:
    journal = MemoryJournal()
    async with two_models({"journal": journal}) as (running, backends, _), running.client() as client:
        episode = Episode(client)
        await episode.turn("hello", "critic")
        again = ModelSession(
            replace(running.session.spec, session_id="s2"),
            backends.policy.engine_for("s2", "t"),
            journal,
            completions=list(journal.completions),
            engine_of=partial(backends.engine_for, session_id="s2", task_id="t"),
        )
        running.proxy.add(again)
        async with running.client(base_url=running.base_url.replace("/s1/", "/s2/")) as other:
            episode.client = other
            await episode.turn("and this?", "critic")
        await again.fence("the test is over")
    assert [one.certificate.context for one in journal.completions] == ["first", "exact"]
    assert journal.completions[1].certificate.engine_role == "critic"


async def test_a_role_whose_engines_are_down_fails_and_never_asks_the_policy() -> None:
    async with KillableEngine(POLICY) as policy, KillableEngine(CRITIC) as critic, AsyncExitStack() as stack:
        backends = BackendsByRole(partial(BackendPool, 3600.0, wait_s=0.1))
        stack.push_async_callback(backends.close)
        await backends.add(BackendSpec(policy.url))
        (added,) = [await backends.add(BackendSpec(critic.url, role="critic"))]
        running = await stack.enter_async_context(
            proxied_engine(
                backends.policy.engine_for("s1", "t"),
                engine_of=partial(backends.engine_for, session_id="s1", task_id="t"),
            )
        )
        client = await stack.enter_async_context(running.client())
        episode = Episode(client)
        await critic.kill()
        with pytest.raises(openai.InternalServerError, match="for role critic"):
            await episode.turn("hello", "critic")
        assert [view.state for view in backends.views()] == ["healthy", "unhealthy"]
        await backends.remove(added.backend_id)
        with pytest.raises(openai.InternalServerError, match="no backend for role critic"):
            await episode.turn("hello", "critic")
        assert running.journal.completions == []
        assert await episode.turn("hello") == POLICY["default"]["text"]


@pytest.mark.parametrize("role", ["Critic", "critic.", "critic-1", "policy", "None", "b2"])
async def test_a_name_that_no_operator_listed_is_a_label_and_nothing_more(role: str) -> None:
    async with two_models() as (running, backends, _), running.client() as client:
        assert await Episode(client).turn("hello", role) == POLICY["default"]["text"]
        assert len(backends.views()) == 2
    (completion,) = running.journal.completions
    assert (completion.certificate.engine_role, completion.metadata["agent_role"]) == (None, role)


async def test_nothing_in_a_call_takes_a_listed_role_to_the_policy() -> None:
    """Neither the model's name nor a second role in its body, and a body can name a listed role as a header does."""
    async with two_models() as (running, _, urls), running.client() as client:
        create, asked = client.chat.completions.create, [{"role": "user", "content": "hello"}]
        for number, body in enumerate(({"metadata": {"role": "policy"}}, {"model": "policy"}, {"model": urls[0]})):
            fields: Any = {"model": "m", "messages": [{"role": "user", "content": f"hello {number}"}]} | body
            await create(**fields, extra_headers=AS_CRITIC)
        messages: Any = asked
        await create(model="m", messages=messages, metadata={"role": "critic"})
    assert {one.certificate.engine_role for one in running.journal.completions} == {"critic"}


async def test_a_weight_update_neither_reaches_nor_holds_the_engines_of_a_role(tmp_path: Path) -> None:
    async with KillableEngine(POLICY) as policy, KillableEngine(CRITIC) as critic:
        engines = {"critic": RoleEngines(urls=(critic.url,))}
        async with running_node(tmp_path, policy.url, role_engines=engines) as node:
            await weights_of(tmp_path, node).push(save, 3)
            assert (sampler_of(policy).weight_version, sampler_of(critic).weight_version) == (3, 0)
            opened = await node.client.open_session()
            async with agent(opened) as client:
                episode = Episode(client)
                await node.client.hold("keep", 60.0)
                waiting = asyncio.create_task(episode.turn("hello"))
                assert await episode.turn("hello", "critic") == CRITIC["default"]["text"]
                assert not waiting.done()
                await node.client.resume()
                await waiting
            result = await node.client.finalize(opened.session_id)
    assert result.trajectory is not None
    spans = {one.engine_role: one.version_spans for trace in result.trajectory.traces for one in trace.certificates}
    assert [span.version for span in spans[None]] == [3]
    assert 3 not in [span.version for span in spans["critic"]]


async def test_engines_of_roles_come_and_go_while_the_node_runs(tmp_path: Path) -> None:
    async with scripted_server(POLICY) as policy, scripted_server(CRITIC, MirroredTokenizer()) as critic:
        async with running_node(tmp_path, policy) as node:
            opened = await node.client.open_session()
            async with agent(opened) as client:
                assert await Episode(client).turn("hello", "critic") == POLICY["default"]["text"]
                with pytest.raises(Conflict, match="another tokenizer"):
                    await node.client.add_backend(critic)
                with pytest.raises(InvalidRequest):
                    await node.client.add_backend(critic, role="no role")
                added = await node.client.add_backend(critic, role="critic")
                assert (added.role, added.backend_id) == ("critic", "b2")
                with pytest.raises(Conflict, match="already in"):
                    await node.client.add_backend(policy, role="critic")
                with pytest.raises(Conflict, match="already in"):
                    await node.client.add_backend(critic)
                assert await Episode(client).turn("hello again", "critic") == CRITIC["default"]["text"]
                assert (await node.client.open_session()).model == "scripted"
            with pytest.raises(NotFound, match="solver"):
                await node.client.clear_backends("solver")
            await node.client.clear_backends()
            assert [(view.url, view.role) for view in await node.client.backends()] == [(critic, "critic")]
            await node.client.add_backend(policy)
        async with running_node(tmp_path, policy) as node:
            assert {view.url: view.role for view in await node.client.backends()} == {policy: None, critic: "critic"}
            await node.client.clear_backends("critic")
            assert [view.role for view in await node.client.backends()] == [None]


async def test_a_role_engine_that_does_not_answer_at_the_start_is_named(tmp_path: Path) -> None:
    nowhere = {"critic": RoleEngines(urls=("http://127.0.0.1:9",))}
    async with scripted_server(POLICY) as policy:
        with pytest.raises(EngineUnavailable, match="--role-engines"):
            async with running_node(tmp_path, policy, role_engines=nowhere, engine_wait_s=0.0):
                pass


async def test_a_failed_first_engine_gives_a_role_nothing() -> None:
    async with two_models() as (_, backends, _):
        with pytest.raises(EngineUnavailable):
            await backends.add(BackendSpec("http://127.0.0.1:9", role="judge"))
        assert backends.engine_for("judge", "s1", "t") is None


@pytest.mark.parametrize(
    ("engines", "why"),
    [
        ({"two words": {"urls": ["http://h"]}}, "no role"),
        ({"critic": {"urls": []}}, "at least 1"),
        ({"critic": {"urls": ["h:80"]}}, "pattern"),
        ({"critic": {"url": "http://h"}}, "urls"),
    ],
)
def test_what_is_no_engine_of_a_role_is_a_mistake_of_the_settings(engines: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        NodeSettings.model_validate({"role_engines": engines})


async def test_list_and_doctor_name_the_role_of_an_engine(tmp_path: Path) -> None:
    async with KillableEngine(POLICY) as policy, KillableEngine(CRITIC) as critic:
        engines = {"critic": RoleEngines(urls=(critic.url,))}
        async with (
            serving(data_dir=tmp_path / "server", control_token=TOKEN, check_task=any_plugin) as running,
            running_node(tmp_path / "node", policy.url, server_url=running.url, role_engines=engines) as node,
            ServerClient(running.url, TOKEN) as client,
        ):
            options = ("backend", "list", "--node", node.url)
            shown = await asyncio.to_thread(gangline, *options, env={"GANGLINE_TOKEN": TOKEN, "COLUMNS": "200"})
            assert [line.split() for line in shown.stdout.splitlines() if "role" in line] == [["role", "critic"]]
            answer = (await node.ask("GET", "/v1/backends"))[1]
            answer[1] |= {"state": "unhealthy", "error": "it is gone"}
            heard = Heartbeat(node_id="n2", url=node.url, sessions={}, capacity=1, backends=tuple(answer))
            await client.heartbeat(heard)
            settings = Settings(data_dir=tmp_path, server_url=running.url, control_token=TOKEN)
            check = await asyncio.to_thread(check_service, settings)
    assert f"engine {critic.url} for role critic of node n2 is unhealthy: it is gone" in check.advice
