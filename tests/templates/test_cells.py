"""Each chat template that packages ship, with the requests of each client, by both routes: see `support.templates`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.requirements import need
from support.templates.cells import Bench
from support.templates.files import LLAMA_CPP, templates
from support.templates.recordings import recordings
from support.templates.results import DATA, cells_of, row_of

NAMES = list(templates())


def test_all_templates_and_clients_are_here() -> None:
    need(LLAMA_CPP.is_dir(), "no templates of llama.cpp: make .venv/chat-templates/.ready")
    assert len(NAMES) >= 111
    assert {one.dialect for one in recordings().values()} == {"openai_chat", "openai_responses", "anthropic", "google"}
    assert len(recordings()) >= 31


@pytest.mark.parametrize("name", NAMES)
async def test_no_prompt_differs_unsaid_and_no_session_is_refused_late(name: str) -> None:
    bench = await Bench.of(name, templates()[name])
    cells = await cells_of(bench)
    faults = [cell for cell in cells if cell.outcome in ("silent", "refused_late")]
    shown = "\n".join(f"{one.recording} {one.route} {one.outcome} {one.notes} {one.shown}" for one in faults[:5])
    assert not faults, f"{len(faults)} of {len(cells)} cells\n{shown}"
    committed: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    assert row_of(bench, cells) == committed[name], "`make templates` writes docs/templates.json anew"
