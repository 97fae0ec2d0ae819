"""Conversations with an engine that reports its routing, recorded through a proxy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.session import SessionResult
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal
from support.engines.expert_engines import FakeMoeVllm, Routing, moe_server
from support.node.proxy import Proxied, proxied_engine

__all__ = ["result_of", "say", "talk", "twenty_thousand_tokens"]


async def say(client: openai.AsyncOpenAI, messages: list[Any], text: str, *, stream: bool = False) -> None:
    """Adds a user's turn and the reply to `messages`."""
    messages.append({"role": "user", "content": text})
    said = ""
    if stream:
        async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
            said += "".join(choice.delta.content or "" for choice in chunk.choices)
    else:
        reply = await client.chat.completions.create(model="m", messages=messages)
        said = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": said})


async def talk(running: Proxied, *texts: str) -> None:
    """A conversation; every second call is streamed."""
    messages: list[Any] = []
    async with running.client() as client:
        for number, text in enumerate(texts):
            await say(client, messages, text, stream=number % 2 == 1)


def result_of(completions: Sequence[Completion], builder: Any = None) -> SessionResult:
    built = (builder or PrefixMergingBuilder()).build(CompletionTree(completions), session_id="s1", task_id="t1")
    return SessionResult(
        session_id="s1",
        task_id="t1",
        node_id="n1",
        attempt=1,
        fence=1,
        outcome="completed",
        reward=1.0,
        trajectory=built,
        completions=tuple(completions),
    )


async def twenty_thousand_tokens(folder: Path) -> tuple[Routing, SessionResult]:
    """Eight turns of a model with 48 layers of which each chooses 8 of 128 experts, read back from a journal."""
    routing = Routing(num_layers=48, num_chosen=8, num_experts=128)
    words = "the file answer is not in this file, so read it. " * 60
    fake = FakeMoeVllm(routing, texts=[words + f"({number})" for number in range(8)])
    journal = Journal.open(folder)
    await journal.open_attempt(AttemptOpened("s1", 1, "t1", 1))
    async with (
        moe_server(fake) as url,
        proxied_engine(VllmEngine(url), journal=journal, routed_experts=True) as running,
    ):
        await talk(running, *(f"{number}: {words}" for number in range(8)))
    await journal.close()
    reopened = Journal.open(folder)
    result = result_of(await reopened.read(AttemptKey("s1", 1)))
    await reopened.close()
    return routing, result
