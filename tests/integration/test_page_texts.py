"""Tokens have their text on the page whatever the model: an engine that has the tokenizer is asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from gangline.cli.results.known_texts import known_texts
from gangline.domain.errors import NotFound
from gangline.domain.session import SessionResult
from gangline.server.run import serving
from gangline.server.web.columns import COLUMNS, decode_columns
from gangline.server.web.outline import open_session
from gangline.server.web.tokens import arrays_of, texts_in, tokenizer_of
from gangline.serving.scripted.server import scripted_server
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.wire.client.server import ServerClient
from support.node.node import RunningNode, running_node
from support.service.cli_process import gangline
from support.service.running import FakeNode, any_plugin, request

TOKEN = "control-token"
SAID = "Größe 😀 你好 — done."


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[ServerClient]:
    async with (
        serving(data_dir=tmp_path / "server", control_token=TOKEN, check_task=any_plugin) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


@asynccontextmanager
async def one_node(control: ServerClient, tmp_path: Path) -> AsyncGenerator[RunningNode]:
    script = {"rules": [{"pattern": ".", "text": SAID}]}
    options: dict[str, Any] = {"server_url": control.url, "control_token": TOKEN}
    async with scripted_server(script) as engine, running_node(tmp_path / "node", engine, **options) as running:
        yield running


@pytest.fixture
async def node(control: ServerClient, tmp_path: Path) -> AsyncIterator[RunningNode]:
    async with one_node(control, tmp_path) as running:
        yield running


async def ended(control: ServerClient, task_id: str) -> SessionResult:
    agent, runtime = {"harness": "native"}, {"backend": "process"}
    await control.submit(request(task_id, num_samples=1, agent=agent, runtime=runtime))
    async with asyncio.timeout(60):
        await control.wait(task_id)
    (result,) = await control.result(task_id)
    assert result.outcome == "completed"
    return result


async def served(control: ServerClient, session_id: str) -> dict[str, np.ndarray[Any, Any]]:
    return decode_columns(await control.request("GET", f"/v1/sessions/{session_id}/tokens", accept=COLUMNS))


def text_of(texts: dict[int, bytes], ids: Sequence[int]) -> str:
    return b"".join(texts[one] for one in ids).decode()


async def test_tokens_of_a_model_that_nobody_knows_have_their_texts(
    control: ServerClient, node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = await ended(control, "said")
    columns = await served(control, result.session_id)
    ids = columns["ids"].tolist()
    assert text_of(texts_in(columns), ids) == TinyTokenizer().decode(ids)
    assert SAID in TinyTokenizer().decode(ids)

    monkeypatch.setenv("GANGLINE_TOKEN", TOKEN)
    session = open_session(result)
    (texts,) = (await known_texts(session, None, None, control.url)).values()
    assert text_of(dict(texts), ids) == TinyTokenizer().decode(ids)
    cast(Any, TinyTokenizer())._core.save(str(tmp_path / "tokenizer.json"))
    (texts,) = (await known_texts(session, str(tmp_path), None, "http://127.0.0.1:9")).values()
    assert text_of(dict(texts), ids) == TinyTokenizer().decode(ids)
    (texts,) = (await known_texts(session, None, None, "http://127.0.0.1:9")).values()
    assert not texts

    env = {"GANGLINE_TOKEN": TOKEN, "COLUMNS": "200"}
    command = ("show", result.session_id, "--tokens", "--server", control.url)
    shown = await asyncio.to_thread(gangline, *command, env=env)
    assert shown.returncode == 0, shown.stderr
    assert SAID[-7:] in shown.stdout


async def test_an_id_has_the_text_of_its_own_calls_model(control: ServerClient, tmp_path: Path) -> None:
    await control.submit(request("both", num_samples=1))
    (lease,) = await FakeNode(control, "n2").lease()
    async with one_node(control, tmp_path):
        result = await ended(control, "mixed")
        first = result.completions[0]
        certificate = msgspec.structs.replace(first.certificate, tokenizer_digest="another")
        other = msgspec.structs.replace(first, completion_id="other", certificate=certificate)
        assert tokenizer_of(other) != tokenizer_of(first)
        of_both = {"session_id": lease.session_id, "task_id": "both", "node_id": "n2", "fence": lease.fence}
        both = msgspec.structs.replace(result, completions=(first, other), trajectory=None, **of_both)
        await control.post_result(both)
        columns = await served(control, lease.session_id)
        path, alone = f"/v1/sessions/{lease.session_id}/tokens", {"first": "1", "limit": "1"}
        of_other = decode_columns(await control.request("GET", path, params=alone, accept=COLUMNS))
    assert len(columns["ids"]) == 2 * sum(map(len, arrays_of([first])))
    assert set(texts_in(columns)) == {one for ids in arrays_of([first]) for one in ids.tolist()}
    assert texts_in(of_other) == {}


async def test_a_node_says_that_no_engine_has_the_tokenizer(node: RunningNode) -> None:
    with pytest.raises(NotFound, match="no healthy engine has the tokenizer 'unknown'"):
        await node.client.detokenize("unknown", [1])
    (engine,) = await node.client.backends()
    assert await node.client.detokenize(engine.template.tokenizer_digest, TinyTokenizer().encode("hi 😀")) == "hi 😀"
