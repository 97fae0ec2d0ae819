"""The page of harnesses: what was seen when each agent program ran against a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "harness_runs.json"
_TITLES = ("harness", "version", "dialect", "turns", "side calls", "chains", "exact", "rendered", "causes", "overhead")
_INTRODUCTION = """\
# Harnesses, seen at work

What real agent programs did in the default sandbox, network `proxy`, against a scripted engine with Qwen3's tokenizer
and chat template, which asked for three tool calls (run a command, write a file, read it): `docs/measure_harnesses.py`,
which runs [`gangline harness check`](cli/harness.md). `turns` are model calls, `chains` the rows that came out of them.
`openhands` and `terminus` are not here: they want Python 3.12, and `make test-slow` tries them in an image that has it.

*exact* counts the calls whose prompt begins with every id of the conversation before, as usual: stitched. *rendered*
counts the same where the engine renders every prompt (`"capture": {"tier": "observe"}`); the causes say why the others
do not. *overhead* is the time of the program's run in which no model call was being answered: its start, its tools, its
end; on a machine of two shared cores, so it says more of the order than of the amount.
"""


def harness_table() -> str:
    """docs/reference/harnesses.md"""
    runs: dict[str, dict[str, Any]] = json.loads(_DATA.read_text())
    lines = [_INTRODUCTION, f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|", *_rows(runs)]
    return "\n".join(lines) + "\n"


def _rows(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, tiers in runs.items():
        usual, rendered = tiers["auto"], tiers["observe"]
        causes = ", ".join(f"{number} x {cause}" for cause, number in rendered["causes"].items())
        cells = (
            f"`{name}`",
            usual["version"] or "",
            ", ".join(usual["dialects"]),
            str(usual["num_turns"]),
            str(usual["num_side_calls"]),
            ", ".join(usual["chains"]),
            _share(usual),
            _share(rendered),
            causes or "none",
            f"{usual['wall_s'] - usual['model_s']:.1f} s",
        )
        yield f"| {' | '.join(cells)} |"


def _share(report: dict[str, Any]) -> str:
    """Of the calls that go on from another."""
    exact, diverged = (report["contexts"].get(context, 0) for context in ("exact", "diverged"))
    return f"{exact} of {exact + diverged}"
