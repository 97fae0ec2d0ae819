"""The repository keeps its own rules: links lead somewhere, the reference is current, nothing foreign is named."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if not re.match(r"[a-z]+:", link)]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_reference_is_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_the_layers_of_the_rooms_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_every_entry_point_loads() -> None:
    from gangline.settings import plugins

    for kind in ("engine", "runtime", "harness", "builder", "evaluator", "engine_server"):
        for name in plugins.names(kind):
            assert plugins.load(kind, name) is not None


def _bench_run() -> object:
    spec = importlib.util.spec_from_file_location("bench_run", ROOT / "bench" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_benchmarks_is_made_from_the_results() -> None:
    import json

    results = ROOT / "bench" / "results.json"
    page = ROOT / "docs" / "benchmarks.md"
    assert page.read_text() == _bench_run().page(json.loads(results.read_text()))  # type: ignore[attr-defined]


def test_the_citation_names_this_version() -> None:
    from gangline import __version__

    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_that_names_the_wheel_names_this_version(page: Path) -> None:
    from gangline import __version__

    assert set(re.findall(r"gangline-(\d[^-\s]*)-py3", page.read_text())) <= {__version__}
