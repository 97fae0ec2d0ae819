"""The page's files: small, whole, from known packages, and without a way to make HTML of text."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest

import gangline.server.web
from gangline.server.web.files import CONTENT_SECURITY_POLICY, PageFiles, page_files

ROOT = Path(gangline.server.web.__file__).parent
SOURCES = sorted((ROOT / "app").glob("*.js"))
VENDORED = re.findall(r"^\| `(\S+)` \| (\S+ \S+) \| \S+ \(`(\S+)`\) \| (sha512-\S+) \| (\w{64}) \|$",
                      (ROOT / "vendor" / "README.md").read_text(), re.MULTILINE)  # fmt: skip
MAX_FIRST_LOAD_BYTES = 350_000


def test_all_that_a_first_visit_loads_is_small() -> None:
    files = page_files()
    names = [path.relative_to(ROOT).as_posix() for folder in ("app", "vendor") for path in (ROOT / folder).iterdir()]
    loaded = [file for name in names if (file := files.find(files.digest, *name.split("/"))) is not None]
    assert len(loaded) > 15
    assert sum(len(file.gzipped) for file in (files.index, *loaded)) <= MAX_FIRST_LOAD_BYTES


def test_every_file_is_the_same_compressed() -> None:
    files = page_files()
    assert gzip.decompress(files.index.gzipped) == files.index.plain


def test_the_address_of_all_files_changes_with_each() -> None:
    first = PageFiles({"app/index.html": b"{page}", "app/a.js": b"1", "app/b.js": b"2"})
    second = PageFiles({"app/index.html": b"{page}", "app/a.js": b"1", "app/b.js": b"3"})
    assert first.digest != second.digest
    assert first.index.plain.decode() == f"/page/{first.digest}"
    assert first.find(first.digest, "app", "a.js") is not None
    assert first.find(second.digest, "app", "a.js") is None


def test_the_page_names_no_other_host_and_nothing_inline() -> None:
    index = page_files().index.plain.decode()
    assert not re.search(r"https?:|style=|\son\w+=|<script(?! type=\"module\" src=)", index)
    assert "'unsafe" not in CONTENT_SECURITY_POLICY


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_module_makes_html_or_code_of_text(source: Path) -> None:
    text = source.read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySet|document\.write|eval\(|Function\(", text
    )
    for imported in re.findall(r'from "([^"]+)"', text):
        assert (source.parent / imported).is_file(), imported


@pytest.mark.parametrize(("name", "package", "licence", "integrity", "digest"), VENDORED)
def test_a_library_is_the_one_of_its_package(
    name: str, package: str, licence: str, integrity: str, digest: str
) -> None:
    assert hashlib.sha256((ROOT / "vendor" / name).read_bytes()).hexdigest() == digest
    assert (ROOT / "vendor" / licence).stat().st_size > 500
    lock = (ROOT.parents[3] / "web" / "package-lock.json").read_text()
    assert f'"integrity": "{integrity}"' in lock


def test_every_library_is_listed() -> None:
    copied = sorted(path.name for path in (ROOT / "vendor").iterdir() if path.suffix in (".mjs", ".css"))
    assert sorted(name for name, *_ in VENDORED) == copied
