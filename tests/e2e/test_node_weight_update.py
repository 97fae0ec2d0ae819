"""New weights under load: streaming agents continue while a trainer pauses, updates and resumes; every token knows its
version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from gangline.domain.completion import Completion
from gangline.domain.node_views import OpenedSession
from gangline.domain.session import SessionResult
from gangline.rows.audit import audit
from gangline.serving.scripted.server import scripted_server
from support.node.node import RunningNode, running_node

TEXT = " ".join(f"word{number}" for number in range(40))
SCRIPT = {"default": {"text": TEXT, "token_delay_s": 0.01}, "weight_version": 1}
NUM_AGENTS, NUM_TURNS = 8, 3


async def agent(opened: OpenedSession, began: asyncio.Event) -> None:
    """Streams its turns; every one must come whole."""
    messages: list[Any] = []
    async with openai.AsyncOpenAI(base_url=opened.base_urls["openai"], api_key=opened.api_key, max_retries=0) as client:
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"turn {turn}"})
            text = ""
            async for chunk in await client.chat.completions.create(model="scripted", messages=messages, stream=True):
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if text:
                    began.set()
            assert text == TEXT
            messages.append({"role": "assistant", "content": text})


async def update(node: RunningNode, engine_url: str, mode: str) -> None:
    """What a trainer does. The engine is held too, so that no token is sampled while its weights change."""
    state = await node.client.pause(mode, lease_s=120)
    assert state.is_drained == (mode == "drain")
    async with node.http.post(f"{engine_url}/pause", params={"mode": "keep"}) as response:
        assert response.status == 200
    async with node.http.post(f"{engine_url}/update_weight_version", json={"new_version": "2"}) as response:
        assert response.status == 200
    async with node.http.post(f"{engine_url}/resume") as response:
        assert response.status == 200
    await node.client.set_version(2)
    await node.client.resume()


async def run_update(tmp_path: Path, mode: str) -> list[SessionResult]:
    async with scripted_server(SCRIPT) as engine_url, running_node(tmp_path, engine_url) as node:
        await node.client.set_version(1)
        opened = [await node.client.open_session() for _ in range(NUM_AGENTS)]
        began = [asyncio.Event() for _ in opened]
        async with asyncio.TaskGroup() as group:
            for session, event in zip(opened, began, strict=True):
                group.create_task(agent(session, event))
            for event in began:
                await event.wait()
            await update(node, engine_url, mode)
        return [await node.client.finalize(session.session_id, completions=True) for session in opened]


def versions_of(completion: Completion) -> list[int]:
    """One for each sampled token."""
    versions: list[int] = []
    for span in completion.certificate.version_spans:
        assert span.start == len(versions)
        versions += [span.version] * (span.end - span.start)
    assert len(versions) == len(completion.sampled_ids)
    return versions


@pytest.mark.parametrize("mode", ["drain", "keep"])
async def test_nobody_fails_while_weights_are_updated_and_every_token_knows_its_version(
    tmp_path: Path, mode: str
) -> None:
    results = await run_update(tmp_path, mode)
    for result in results:
        assert result.outcome == "completed"
        assert [one.status for one in result.completions] == ["complete"] * NUM_TURNS
        versions = [version for one in result.completions for version in versions_of(one)]
        assert versions == sorted(versions)
        assert set(versions) == {1, 2}
        assert result.trajectory is not None
        (trace,) = result.trajectory.traces
        assert trace.response_versions[trace.loss_mask == 1].tolist() == versions
        assert audit(result.trajectory, result.completions).ok
    mixed = [len(set(versions_of(one))) > 1 for result in results for one in result.completions]
    assert any(mixed) == (mode == "keep")
