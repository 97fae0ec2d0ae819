"""Make docs/reference from the code: `python docs/generate.py`; with `--check`, only tell whether it is current."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from access import access
from benchmarks_table import benchmarks_table
from command_pages import command_pages
from dialect_fields import dialect_fields
from harness_table import harness_table
from http_page import http
from limits import limits
from log_actions import logs
from metric_names import metrics
from rewards_table import rewards_table
from settings_table import settings
from templates_table import templates_table

REFERENCE = Path(__file__).parent / "reference"

PAGES: dict[str, Callable[[], str]] = {
    "access.md": access,
    "benchmarks.md": benchmarks_table,
    "dialect-fields.md": dialect_fields,
    "harnesses.md": harness_table,
    "http.md": http,
    "logs.md": logs,
    "limits.md": limits,
    "metrics.md": metrics,
    "rewards.md": rewards_table,
    "settings.md": settings,
    "templates.md": templates_table,
}


def main() -> int:
    pages = {**{name: make() for name, make in PAGES.items()}, **command_pages()}
    stale = [name for name, text in pages.items() if not _is_current(REFERENCE / name, text)]
    gone = [path for path in sorted((REFERENCE / "cli").glob("*.md")) if f"cli/{path.name}" not in pages]
    if "--check" in sys.argv[1:]:
        named = ", ".join([*stale, *(f"cli/{path.name}" for path in gone)])
        print(f"stale: {named}; run make docs" if named else "docs/reference is current")
        return 1 if named else 0
    (REFERENCE / "cli").mkdir(parents=True, exist_ok=True)
    for name in stale:
        (REFERENCE / name).write_text(pages[name])
        print(f"docs/reference/{name}")
    for path in gone:
        path.unlink()
        print(f"docs/reference/cli/{path.name} is gone")
    return 0


def _is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
