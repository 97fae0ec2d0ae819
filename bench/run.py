"""Run the benchmarks: `python bench/run.py [NAME ...]`. Writes bench/results.json and docs/benchmarks.md.

Each `bench/NAME_bench.py` has `run() -> {figure: {"value", "unit", "note"}}`. A figure that was not measured this time
keeps its last value and its date.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
RESULTS = BENCH / "results.json"
PAGE = BENCH.parent / "docs" / "benchmarks.md"

ON_REQUEST = {
    "async_learning",
    "captures",
    "containers",
    "families",
    "families_135m",
    "images",
    "published_merging",
    "scale",
}
ON_REQUEST |= {"public", "sched", "sched_vllm"}
"""Benchmarks that run only by name: they need the tokenizers of `make tools` or a vLLM, start engines as root, or are
long."""

MAX_OF_A_SECTION = 20
"""On the page; beyond it, figures of several days get their own sections."""

Figures = dict[str, dict[str, Any]]


def measure(names: list[str]) -> Figures:
    """Figures of the named benchmarks, dated."""
    today = datetime.now(UTC).date().isoformat()
    figures: Figures = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        for figure, measured in importlib.import_module(f"{name}_bench").run().items():
            figures[figure] = {
                "value": measured["value"],
                "unit": measured["unit"],
                "date": today,
                "note": measured.get("note", ""),
            }
            print(f"  {figure} = {measured['value']} {measured['unit']}", file=sys.stderr, flush=True)
    return figures


def page(figures: Figures) -> str:
    """docs/benchmarks.md: a section for each benchmark, where figures with the same note share a line."""
    by_section = _sections(figures)
    for section in [name for name, found in by_section.items() if len(found) > MAX_OF_A_SECTION and _dates(found)[1:]]:
        parts = _sections(by_section.pop(section))
        by_section |= {f"{section}.{part}": found for part, found in parts.items()}
    return "\n".join(
        [
            "<!-- Made by bench/run.py from bench/results.json; `make bench` measures again. -->\n",
            "# Benchmarks\n",
            "`python bench/run.py [NAME ...]` measures them. The machine has 2 shared x86 cores unless a note says "
            "otherwise; its speed varies by half from run to run, so ratios say more than rates. A figure's full name "
            "begins with its section: `engine.tokens_per_s_at_1`. Figures by seed are in `bench/results.json`.\n",
            *(line for section, found in sorted(by_section.items()) for line in _section(section, found)),
        ]
    )


def _sections(figures: Figures) -> dict[str, Figures]:
    """Figures by the first part of their names; the rest of which stays as their name."""
    found: dict[str, Figures] = {}
    for name, one in sorted(figures.items()):
        section, _, rest = name.partition(".")
        found.setdefault(section, {})[rest] = one
    return found


def _dates(figures: Figures) -> list[str]:
    return sorted({one["date"] for one in figures.values()})


def _section(name: str, figures: Figures) -> Iterator[str]:
    dates = _dates(figures)
    clauses = [_clauses(one) for one in figures.values()]
    shared = [clause for clause in clauses[0] if clause and all(clause in others for others in clauses)]
    if len(figures) == 1:
        shared = []
    yield f"## {name}\n"
    if head := "; ".join([*(dates if len(dates) == 1 else ()), *shared]):
        yield f"{head}.\n"
    by_note: dict[str, list[str]] = {}
    units: dict[str, str] = {}
    for figure, one in figures.items():
        own = "; ".join(clause for clause in _clauses(one) if clause not in shared)
        date = f"{one['date']}; " if len(dates) > 1 else ""
        note = f"{date}{own}".removesuffix("; ")
        values = by_note.setdefault(note, [])
        if values and units[note] == one["unit"]:  # a unit stands once, after the last of its figures
            values[-1] = values[-1].removesuffix(f" {one['unit']}")
        units[note] = one["unit"]
        values.append(f"`{figure}` {_number(one['value'])} {one['unit']}".rstrip())
    yield from (f"- {', '.join(values)}{': ' if note else ''}{note}" for note, values in by_note.items())
    yield ""


def _clauses(figure: dict[str, Any]) -> list[str]:
    """Of its note, without what is too long for the page."""
    return [clause for clause in figure["note"].split("; ") if not clause.startswith("by seed")]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def main() -> None:
    sys.path.insert(0, str(BENCH))
    known = sorted(path.name.removesuffix("_bench.py") for path in BENCH.glob("*_bench.py"))
    names = sys.argv[1:] or [name for name in known if name not in ON_REQUEST]
    if unknown := set(names) - set(known):
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    measured = measure(names)
    # Read now, not before: another run may have ended meanwhile.
    figures: Figures = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    figures |= measured
    RESULTS.write_text(json.dumps(dict(sorted(figures.items())), indent=1) + "\n")
    PAGE.write_text(page(figures))


if __name__ == "__main__":
    main()
