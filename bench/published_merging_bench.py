"""What Polar's published merging makes of recorded sessions, alongside ours: rows, and what becomes of the sampled
tokens.

Sessions of seven kinds, each recorded over an engine that renders every prompt and over one that takes ids; their
own log of what they read and sampled is what is counted against (`tests/support/merging`). A sampled token is
*lost* where no row trains it, and trained *behind other ids* where its row holds something else before it than the
engine had read.

Figures: `builders.published_lost_share.KIND`, of the sampled tokens, with an engine that renders. The table is
written into docs/guides/builders-and-exports.md. The sessions are drawn by fixed seeds: the counts are the same on
every machine. Needs the tokenizers of `make tools`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.merging.comparing import Tally, as_row, ours, published, tally
from support.merging.sessions import KINDS, record

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "builders-and-exports.md"
BLOCK = re.compile(r"(<!-- Made by `python bench/run.py published_merging`. -->\n).*?(<!-- end -->)", re.DOTALL)
NUM_SESSIONS = {"random branches": 40}
USUAL_NUM_SESSIONS = 12
ENGINES = {"renders": False, "takes ids": True}


@dataclass
class Counts:
    """Of one kind of sessions over one engine."""

    num_calls: int
    num_sampled: int
    published: Tally
    splice: Tally
    split: Tally


def count(kind: str, *, takes_ids: bool) -> Counts:
    found = Counts(0, 0, Tally(), Tally(), Tally())
    for seed in range(NUM_SESSIONS.get(kind, USUAL_NUM_SESSIONS)):
        session = asyncio.run(record(kind, seed, takes_ids=takes_ids))
        found.num_calls += len(session.log)
        found.num_sampled += sum(len(call.sampled_ids) for call in session.log)
        found.published += tally(session, [as_row(row) for row in published(session)])
        found.splice += tally(session, ours(session, "splice"))
        found.split += tally(session, ours(session, "split"))
    assert (found.splice.lost, found.split.lost, found.split.elsewhere) == (0, 0, 0), f"{kind}: ours lose tokens"
    return found


def table(counts: dict[tuple[str, str], Counts]) -> str:
    lines = [
        f"Counted on {datetime.now(UTC).date().isoformat()} on 2 shared x86 cores; every machine counts the same.\n",
        "| sessions | engine | calls | published: rows | lost | behind other ids | `splice`: rows | behind other ids "
        "| `split`: rows |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (kind, engine), one in counts.items():
        share = f" ({round(100 * one.published.lost / one.num_sampled)} %)" if one.published.lost else ""
        lost = f"{one.published.lost:,} of {one.num_sampled:,}{share}"
        cells = (
            *(kind, engine, one.num_calls, one.published.rows, lost, f"{one.published.elsewhere:,}"),
            *(one.splice.rows, f"{one.splice.elsewhere:,}", one.split.rows),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def run() -> dict[str, dict[str, Any]]:
    """Count, and write the table. A minute or two."""
    counts = {
        (kind, engine): count(kind, takes_ids=takes_ids) for kind in KINDS for engine, takes_ids in ENGINES.items()
    }
    text, num_written = BLOCK.subn(lambda found: f"{found[1]}{table(counts)}{found[2]}", GUIDE.read_text())
    assert num_written == 1, f"{GUIDE} has no place for the table"
    GUIDE.write_text(text)
    note = "of the sampled tokens, by the published rule over an engine that renders; ours lose none"
    return {
        f"builders.published_lost_share.{kind.replace(' ', '_')}": {
            "value": round(one.published.lost / one.num_sampled, 4),
            "unit": "share",
            "note": note,
        }
        for (kind, engine), one in counts.items()
        if engine == "renders"
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
