"""A chat template that refuses messages however they are fitted, and an agent's own bad request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text, ToolDefinition
from gangline.domain.errors import EngineRefused, EngineUnavailable, GanglineError, MessagesRefused
from gangline.domain.tokens import TokenIds
from gangline.models.engines.contract import EngineReply, EngineRequest
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from support.engines.families import FamilyEngine, Turn, family
from support.engines.pooled import pooled
from support.node.proxy import MemoryJournal


class Strict(FamilyEngine):
    """Its template takes no message that says `no`, and answers `status`; its chat route takes no high temperature."""

    status = 400

    async def chat(self, request: EngineRequest) -> EngineReply:
        if request.call.sampling.temperature == 99.0:
            raise EngineRefused("temperature is too high", status=400)
        self._rendered(request.call.messages, request.call.tools, request.call.template_kwargs)
        return await super().chat(request)

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        template_kwargs: dict[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        if template_kwargs == {"effort": "unheard of"} or Message("user", (Text("no"),)) in tuple(messages):
            error = EngineUnavailable if self.status == 500 else EngineRefused
            raise error("the template refuses this", status=self.status)
        return super()._rendered(messages, tools, template_kwargs, add_generation_prompt)


async def failed(engine: FamilyEngine, call: ModelCall) -> tuple[ModelSession, GanglineError]:
    session = ModelSession(SessionSpec(session_id="s", attempt=1, key="k"), await pooled(engine), MemoryJournal())
    with pytest.raises(GanglineError) as raised:
        await session.start_call(call).reply()
    await session.fence("over")
    return session, raised.value


def call(text: str, **fields: object) -> ModelCall:
    said = (Message("user", (Text(text),)),)
    return ModelCall(dialect="openai_chat", model="m", messages=said, **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 422, 500])
async def test_a_template_that_refuses_is_our_failure_with_a_name(status: int, stream: bool) -> None:
    engine = Strict(family("qwen3"), [Turn(text="hello")])
    engine.status = status
    session, error = await failed(engine, call("no", stream=stream))
    assert type(error) is MessagesRefused
    failure = await session.failures.found()
    assert failure is not None
    assert (failure.boundary, failure.code, failure.retryable) == ("engine", "messages_refused", False)
    assert "the template refuses this" in failure.message


async def test_a_bad_request_is_still_the_agents() -> None:
    session, error = await failed(
        Strict(family("qwen3"), [Turn(text="hello")]), call("yes", sampling=SamplingParams(temperature=99.0))
    )
    assert type(error) is EngineRefused
    assert await session.failures.found() is None


async def test_words_for_the_template_that_it_never_takes_are_the_agents_too() -> None:
    session, error = await failed(
        Strict(family("qwen3"), [Turn(text="hello")]), call("yes", template_kwargs={"effort": "unheard of"})
    )
    assert type(error) is EngineRefused
    assert await session.failures.found() is None


async def test_an_engine_that_answers_500_to_everything_is_down() -> None:
    class Broken(Strict):
        async def render(self, *_: Any, **__: Any) -> TokenIds:
            raise EngineUnavailable("no worker", status=500)

        async def chat(self, request: EngineRequest) -> EngineReply:
            raise EngineUnavailable("no worker", status=500)

    session, error = await failed(Broken(family("qwen3"), [Turn(text="hello")]), call("yes"))
    assert type(error) is EngineUnavailable
    failure = await session.failures.found()
    assert failure is not None
    assert failure.retryable
