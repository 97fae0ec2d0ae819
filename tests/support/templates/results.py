"""What the laboratory found, a row for each template: docs/templates.json, of which the page in the docs is made.

`PYTHONPATH=tests python -P -m support.templates.results [PART OF A NAME]...` measures anew; `make templates` does.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gangline.models.language.parsing.detect import detect_parsers
from support.templates.cells import ROUTES, Bench, Cell
from support.templates.files import templates
from support.templates.recordings import recordings

__all__ = ["DATA", "cells_of", "row_of"]

DATA = Path(__file__).parents[3] / "docs" / "templates.json"


async def cells_of(bench: Bench) -> list[Cell]:
    """All recordings, by both routes."""
    return [await bench.cell(name, one, route) for name, one in recordings().items() for route in ROUTES]


def row_of(bench: Bench, cells: Sequence[Cell]) -> dict[str, Any]:
    parsers = detect_parsers(bench.writer.tokenizer)
    outcomes = {route: dict(Counter(c.outcome for c in cells if c.route == route).most_common()) for route in ROUTES}
    notes: dict[str, Counter[str]] = {}
    for cell in cells:
        for note in sorted(cell.notes):
            kind, _, what = note.partition(": ")
            notes.setdefault(kind if what else "by", Counter())[_plain(what or kind)] += 1
    return {
        "tools": parsers.tools,
        "thinking": parsers.thinking,
        "outcomes": {route: dict(sorted(counts.items())) for route, counts in outcomes.items()},
        **{kind: dict(sorted(counts.items())) for kind, counts in sorted(notes.items())},
    }


def _plain(note: str) -> str:
    """Without what is of one session."""
    note = re.sub(r"call_[0-9a-f]{16,}", "call_ID", note)
    return note.removeprefix("the model's chat template refuses these messages: ")


async def _measured(parts: Sequence[str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, template in templates().items():
        if not parts or any(part in name for part in parts):
            bench = await Bench.of(name, template)
            cells = await cells_of(bench)
            rows[name] = row_of(bench, cells)
            faults = [cell for cell in cells if cell.outcome in ("silent", "refused_late")]
            print(name, rows[name]["outcomes"], file=sys.stderr, flush=True)
            for cell in faults[:1] if parts else []:
                print(cell.recording, cell.route, cell.outcome, cell.notes, cell.shown, sep="\n  ", file=sys.stderr)
    return rows


def main(parts: Sequence[str]) -> None:
    rows = asyncio.run(_measured(parts))
    total, unserved = Counter[str](), Counter[str]()
    for row in rows.values():
        unserved.update(row.get("refused", {}))
        for counts in row["outcomes"].values():
            total.update(counts)
    figures = {f"templates.{name}": total[name] for name in ("silent", "refused_late")}
    figures = {"templates.cells": total.total(), **figures, "templates.unserved": dict(unserved)}
    print(json.dumps(figures, indent=1))
    if not parts:
        DATA.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
