"""The documentation site is built strictly, and its links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gangline
from release.installed import ROOT

sys.path.append(str(ROOT / "docs"))
from build_site import broken, with_urls, write_llms


@pytest.fixture(scope="module")
def site() -> Path:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "build_site.py"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return ROOT / "build" / "site"


def test_every_page_is_built_and_found_by_the_search_but_for_decisions(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md") if path.name != "SUMMARY.md"]
    found = {item["location"].partition("#")[0] for item in json.loads((site / "search.json").read_text())["items"]}
    for page in pages:
        folder = page.with_suffix("") if page.name != "index.md" else page.parent
        assert (site / folder / "index.html").is_file(), page
        location = "" if page.name == "index.md" else f"{folder.as_posix()}/"
        assert (location in found) == (page.parts[0] != "adr"), page
        assert f"({page})" in (site / "llms.txt").read_text()
    assert not list(site.rglob("*.py"))


def test_every_public_name_is_documented(site: Path) -> None:
    documented = re.findall(r'id="gangline[\w.]*\.(\w+)"', (site / "reference" / "python" / "index.html").read_text())
    assert set(gangline.__all__) - {"__version__"} <= set(documented)


def test_the_tour_is_a_recorded_session_in_one_file(site: Path) -> None:
    tour = (site / "tour" / "index.html").read_text()
    assert 'id="saved"' in tour
    assert 'href="tour/"' in (site / "index.html").read_text()
    assert not list(site.rglob("*.msgpack"))


def test_the_site_has_the_address_and_repository_of_the_project() -> None:
    config = (ROOT / "zensical.toml").read_text()
    assert with_urls(config, {}) == config
    urls = {
        "Documentation": "https://docs.example/",
        "Source": "https://code.example/it",
        "Issues": "https://x.example",
    }
    settings = tomllib.loads(with_urls(config, urls))["project"]
    assert (settings["site_url"], settings["repo_url"]) == (urls["Documentation"], urls["Source"])
    assert tomllib.loads(config)["project"].keys() == settings.keys() - {"site_url", "repo_url"}


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("other/", False),
        ("other/#there", False),
        ("#here", False),
        ("https://nowhere.example/#x", False),
        ("other/#nowhere", True),
        ("#nowhere", True),
        ("absent/", True),
        ("picture.png", True),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, link: str, is_broken: bool) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h1 id="there">There</h1>')
    (tmp_path / "index.html").write_text(f'<h1 id="here">Here</h1><a href="{link}">a link</a>')
    assert broken(tmp_path) == ([f"index.html: {link}"] if is_broken else [])


def test_the_list_for_language_models_has_titles_and_first_sentences(tmp_path: Path) -> None:
    docs, site = tmp_path / "docs", tmp_path / "site"
    (docs / "guides").mkdir(parents=True)
    (docs / "index.md").write_text("# Gangline\n\nGangline does [it](x.md). More.\n")
    (docs / "guides" / "one.md").write_text("<!-- made -->\n\n# One\n\n```sh\nls\n```\n")
    write_llms(docs, site)
    assert (site / "llms.txt").read_text().startswith("# Gangline\n\n> Gangline does it.\n\n## Start\n")
    assert "\n- [One](guides/one.md)\n" in (site / "llms.txt").read_text()
    assert (site / "guides" / "one.md").read_text() in (site / "llms-full.txt").read_text()
