"""Run the benchmarks: `python bench/run.py [NAME ...]`. Writes bench/results.json and docs/benchmarks.md.

Each `bench/NAME_bench.py` has `run() -> {figure: {"value", "unit", "note"}}`. A figure that was not measured this time
keeps its last value and its date.
"""

from __future__ import annotations

import importlib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
RESULTS = BENCH / "results.json"
PAGE = BENCH.parent / "docs" / "benchmarks.md"

ON_REQUEST = {"captures", "containers", "families", "families_135m", "published_merging", "scale"}
"""Benchmarks that run only by name: they need the tokenizers of `make tools`, start engines as root, or are long."""

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
    """docs/benchmarks.md"""
    rows = [
        f"| `{name}` | {_number(one['value'])} {one['unit']} | {one['date']} | {one['note']} |"
        for name, one in sorted(figures.items())
    ]
    return "\n".join(
        [
            "<!-- Made by bench/run.py from bench/results.json; `make bench` measures again. -->\n",
            "# Benchmarks\n",
            "Measured on 2 shared x86 cores unless a note says otherwise; such a machine varies by half from run to "
            "run, so ratios say more than rates.\n",
            "| figure | value | date | note |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


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
