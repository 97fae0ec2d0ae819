"""A pool of frozen models alongside the policy: a provider's API under the name `pool/NAME`, as one more role."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from aiohttp import web
from openai.types.chat import completion_create_params

from gangline.domain.completion import CompletionTree
from gangline.domain.errors import GanglineError
from gangline.domain.session import SessionResult
from gangline.domain.tokens import encode_json
from gangline.models.engine_server.app import serving
from gangline.rows.audit import audit
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.serving.scripted.server import scripted_server
from gangline.settings.node import NodeSettings, RoleEngines
from gangline.train.collecting.groups import trainable_traces
from support.node.node import RunningNode, running_node
from support.node.weights import agent

KEY = "sk-of-the-provider"
POLICY: dict[str, Any] = {"default": {"text": "I am the policy"}}
KNOWN = completion_create_params.CompletionCreateParamsBase.__annotations__.keys() | {"stream"}
ASKED: list[Any] = [{"role": "user", "content": "hello"}]


@dataclass
class Provider:
    """Lists several models, wants a key, refuses fields that it does not know, and reports no ids."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_now: int = 0
    most: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def models(self, request: web.Request) -> web.Response:
        return self._denied(request) or web.json_response({"data": [{"id": "small"}, {"id": "big-2026"}]})

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if (denied := self._denied(request)) is not None:
            return denied
        if unknown := body.keys() - KNOWN:
            return _error(400, f"Unrecognized request argument supplied: {', '.join(unknown)}")
        self.asked.append(body)
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        await self.go.wait()
        self.num_now -= 1
        message = {"role": "assistant", "content": f"I am {body['model']}"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        return web.json_response({"id": "x", "object": "chat.completion", "choices": choices, "usage": usage})

    def _denied(self, request: web.Request) -> web.Response | None:
        given = request.headers.get("Authorization")
        return None if given == f"Bearer {KEY}" else _error(401, "Incorrect API key provided")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


@asynccontextmanager
async def provider() -> AsyncGenerator[Provider]:
    made = Provider()
    made.go.set()
    app = web.Application()
    app.router.add_get("/v1/models", made.models)
    app.router.add_post("/v1/chat/completions", made.chat)
    async with serving(app) as made.url:
        yield made


def pool_of(url: str, **fields: Any) -> dict[str, RoleEngines]:
    given: dict[str, Any] = {
        "urls": (f"{url}/v1",),
        "kind": "openai_text",
        "key_env": "PROVIDER_KEY",
        "options": {"model": "big-2026"},
        "capture": "text",
    }
    return {"big": RoleEngines(**(given | fields))}


@asynccontextmanager
async def node_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> AsyncGenerator[tuple[RunningNode, Provider]]:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    async with (
        provider() as made,
        scripted_server(POLICY) as policy,
        running_node(folder, policy, role_engines=pool_of(made.url, **fields)) as node,
    ):
        yield node, made


async def test_an_agent_reaches_a_model_of_the_pool_by_its_name_and_only_the_policy_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_before(tmp_path, monkeypatch) as (node, made):
        opened = await node.client.open_session()
        async with agent(opened) as client:
            reply = await client.chat.completions.create(model="m", messages=ASKED)
            assert reply.choices[0].message.content == "I am the policy"
            for stream in (False, True):
                found: Any = await client.chat.completions.create(model="pool/big", messages=ASKED, stream=stream)
                if stream:
                    parts = [chunk.choices[0].delta.content or "" async for chunk in found if chunk.choices]
                    assert "".join(parts) == "I am big-2026"
                else:
                    assert (found.choices[0].message.content, found.model) == ("I am big-2026", "pool/big")
        result = await node.client.finalize(opened.session_id, completions=True)
    assert [body["model"] for body in made.asked] == ["big-2026"] * 2
    assert KEY.encode() not in encode_json(result)
    _only_the_policy_is_trained(result)


def _only_the_policy_is_trained(result: SessionResult) -> None:
    assert result.trajectory is not None
    tree = CompletionTree(result.completions)
    for engine_role in (None, "big"):
        builder = PrefixMergingBuilder(PrefixMergingConfig(engine_role=engine_role, strict=True))
        built = builder.build(tree, session_id=result.session_id, task_id="t")
        trained = trainable_traces(msgspec.structs.replace(result, trajectory=built))
        assert audit(built, result.completions).violations == ()
        texts = [message.parts[0].text for one in trained for message in one.response_messages]  # type: ignore[union-attr]
        assert texts == (["I am the policy"] if engine_role is None else []), "no setting trains on text without ids"
    roles = {one.certificate.engine_role for one in result.completions}
    assert roles == {None, "big"}


async def test_a_role_in_the_call_stays_a_label_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that asks the pool plays the solver, and no role takes a call for the pool to the policy."""
    async with node_before(tmp_path, monkeypatch) as (node, _):
        opened = await node.client.open_session()
        async with agent(opened) as client:
            headers = {"x-gangline-role": "solver"}
            reply = await client.chat.completions.create(model="pool/big", messages=ASKED, extra_headers=headers)
            assert reply.choices[0].message.content == "I am big-2026"
            again = await client.chat.completions.create(
                model="m", messages=ASKED, extra_headers={"x-gangline-role": "big"}
            )
            assert again.choices[0].message.content == "I am big-2026"
        result = await node.client.finalize(opened.session_id, completions=True)
    assert [one.metadata["agent_role"] for one in result.completions] == ["solver", "big"]
    assert {one.certificate.engine_role for one in result.completions} == {"big"}


@pytest.mark.parametrize("model", ["pool/", "pool/Big", "pool/other", "pool/big/", "pool/ big", "pool/pool/big"])
async def test_a_model_that_the_pool_has_not_is_refused_and_never_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    async with node_before(tmp_path, monkeypatch) as (node, made):
        opened = await node.client.open_session()
        async with agent(opened) as client:
            for headers in ({}, {"x-gangline-role": "big"}):
                with pytest.raises(openai.NotFoundError, match="does not exist"):
                    await client.chat.completions.create(model=model, messages=ASKED, extra_headers=headers)
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.responses.create(model=model, input="hello")
        root = opened.base_urls["anthropic"]
        async with anthropic.AsyncAnthropic(base_url=root, api_key=opened.api_key, max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                await client.messages.create(model=model, max_tokens=9, messages=ASKED)
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
                await client.messages.count_tokens(model=model, messages=ASKED)
        assert made.asked == []


async def test_calls_to_a_model_of_the_pool_are_limited_over_all_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_before(tmp_path, monkeypatch, max_calls=2) as (node, made):
        made.go.clear()
        opened = [await node.client.open_session() for _ in range(3)]
        async with agent(opened[0]) as one, agent(opened[1]) as two, agent(opened[2]) as three:
            calls = [
                asyncio.create_task(
                    client.chat.completions.create(
                        model="pool/big", messages=[{"role": "user", "content": f"hello {number}"}]
                    )
                )
                for client in (one, two, three)
                for number in range(3)
            ]
            async with asyncio.timeout(20):
                while made.num_now < 2:
                    await asyncio.sleep(0.005)
            policy = await three.chat.completions.create(model="m", messages=ASKED)
            assert policy.choices[0].message.content == "I am the policy", "the policy waits for nobody"
            assert made.num_now == 2
            calls[0].cancel()
            made.go.set()
            ended = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(not isinstance(one, BaseException) for one in ended) == 8, "one that gave up holds no place"
        assert made.most == 2


async def test_what_a_task_asks_of_the_policys_sampling_does_not_break_a_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`top_k: -1` keeps all ids, which is what a server without `top_k` does."""
    async with node_before(tmp_path, monkeypatch) as (node, made):
        opened = await node.client.open_session(capture={"sampling": {"top_k": {"override": -1}}})
        async with agent(opened) as client:
            await client.chat.completions.create(model="pool/big", messages=ASKED)
    assert "top_k" not in made.asked[0]


async def test_a_server_without_ids_is_still_refused_where_the_role_does_not_ask_for_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GanglineError, match="no token ids"):
        async with node_before(tmp_path, monkeypatch, capture=None):
            pass


async def test_an_engine_of_the_pool_is_remembered_with_its_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    async with provider() as made, scripted_server(POLICY) as policy, scripted_server(POLICY) as second:
        engines = pool_of(made.url)
        async with running_node(tmp_path, policy, role_engines=engines) as node:
            await node.client.add_backend(second)
        kept = json.loads((tmp_path / "nodes" / "n1" / "backends.json").read_bytes())
        assert [one.get("capture") for one in kept["members"]] == [None, None, "text"]
        assert KEY not in json.dumps(kept)
        async with running_node(tmp_path, policy, role_engines=engines) as node:
            assert {view.role for view in await node.client.backends()} == {None, "big"}


@pytest.mark.parametrize(
    ("fields", "why"), [({"max_calls": 0}, "max_calls"), ({"capture": "none"}, "capture"), ({"key": KEY}, "key")]
)
def test_mistakes_in_a_pool_are_named(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        NodeSettings.model_validate({"role_engines": {"big": {"urls": ["http://h"], **fields}}})
