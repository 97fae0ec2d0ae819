"""Engine plug-ins and their options from the command line, against real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gangline.models.language.parsing.parser import Parsers
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.node import NodeClient
from support.engines.tokenizers import qwen3_folder
from support.service.cli_process import UpProcess, gangline

SCRIPT: dict[str, Any] = {"default": {"thinking": "Hm.", "text": "as you wish"}}


async def test_a_route_of_ids_is_used_with_a_tokenizer_on_the_node(tmp_path: Path) -> None:
    folder = qwen3_folder()
    async with (
        scripted_server(SCRIPT, folder, parsers=Parsers()) as one,
        scripted_server(SCRIPT, folder, parsers=Parsers()) as two,
    ):
        options = json.dumps({"tokenizer": folder})
        up = UpProcess(tmp_path, "--engine", one, "--engine-kind", "generate_template", "--engine-options", options)
        try:
            await asyncio.to_thread(up.ready)
            running = up.running()
            add = ("backend", "add", two, "--kind", "generate_template", "--options", options)
            added = await asyncio.to_thread(gangline, *add, "--data", up.data, "--json")
            assert added.returncode == 0, added.stderr
            async with NodeClient(running["node_urls"][0], running["control_token"]) as node:
                assert [backend.engine for backend in await node.backends()] == ["generate_vllm", "generate_vllm"]
        finally:
            await asyncio.to_thread(up.close)


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [("vllm", "{", "--engine-options"), ("vllm", "[]", "--engine-options"), ("vllm", '{"x": 1}', "no option 'x'")],
)
def test_options_that_are_wrong_are_told(tmp_path: Path, kind: str, options: str, told: str) -> None:
    url = "http://127.0.0.1:1"
    done = gangline(*("up", "--data", tmp_path, "--engine", url, "--engine-kind", kind, "--engine-options", options))
    assert done.returncode != 0
    assert told in done.stderr
