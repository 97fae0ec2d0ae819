"""Build the documentation site in build/site: `python docs/build_site.py`, or `make docs`.

Zensical builds it strictly from zensical.toml, with the URLs of `[project.urls]` in pyproject.toml, if there are any.
`tour/` becomes a recorded session as one file. Then every link and anchor of the built pages is followed, and decisions
leave the index of the search, so that guides come first. Two files are for language models: `llms.txt` lists the pages,
which lie beside it as Markdown, and `llms-full.txt` has all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = ROOT / "build" / "site"
_NAMES = {".": "Start", "guides": "Guides", "reference": "Reference", "adr": "Decisions"}
"""Sections of llms.txt in their order, by folder."""
_NOT_PAGES = ("SUMMARY.md",)
_URLS = {"Documentation": "site_url", "Source": "repo_url"}
"""Name of a project URL -> setting of the site."""


class Links(HTMLParser):
    """Targets and anchors of one built page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(filter(None, (given.get("id"), given.get("name") if tag == "a" else None)))
        self.targets.update(filter(None, (given.get("href"), given.get("src"))))


def build() -> None:
    """Raises: CalledProcessError for a page that links to nothing, or another warning of Zensical."""
    uvx = [Path(sys.executable).with_name("uvx"), "--quiet", "--with-requirements", ROOT / "requirements" / "docs.txt"]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    with tempfile.NamedTemporaryFile("w", dir=ROOT, prefix=".site-", suffix=".toml") as config:
        config.write(with_urls((ROOT / "zensical.toml").read_text(), urls))
        config.flush()
        command = ["zensical", "build", "--strict", "--clean", "--config-file", config.name]
        subprocess.run([*uvx, "--from", "zensical", *command], cwd=ROOT, check=True)


def with_urls(config: str, urls: Mapping[str, str]) -> str:
    """Settings of the site with the project's URLs, as far as they are known."""
    lines = [f"{_URLS[name]} = {json.dumps(url)}\n" for name, url in urls.items() if name in _URLS]
    return config.replace("[project]\n", "[project]\n" + "".join(lines), 1)


def write_tour(file: Path) -> None:
    """The session recorded in docs/tour, as `gangline show --html` saves it."""
    (record,) = (DOCS / "tour" / "server" / "results").glob("*/*/attempt-*.msgpack")
    file.parent.mkdir(parents=True, exist_ok=True)
    show = [sys.executable, "-m", "gangline", "show", record.parent.name, "--data", DOCS / "tour", "--html", file]
    subprocess.run(show, stdout=subprocess.DEVNULL, check=True)


def broken(site: Path) -> list[str]:
    """Links of the built pages that lead to no file, or to no anchor. Links to other sites are not followed."""
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    return [
        f"{page.relative_to(site)}: {target}"
        for page, links in pages.items()
        if page.name != "404.html"  # its links begin at the root of a server
        for target in sorted(links.targets)
        if not _leads_somewhere(page, target, pages)
    ]


def _leads_somewhere(page: Path, target: str, pages: dict[Path, Links]) -> bool:
    url = urlsplit(target)
    if url.scheme or url.netloc:
        return True
    path = (page.parent / unquote(url.path)).resolve() if url.path else page
    file = path / "index.html" if path.is_dir() else path
    if not file.is_file():
        return False
    return not url.fragment or file not in pages or unquote(url.fragment) in pages[file].anchors


def leave_decisions_out(index: Path) -> None:
    """Rewrite Zensical's search.json without the sections of adr/: they took the first places of most searches."""
    found = json.loads(index.read_text())
    found["items"] = [item for item in found["items"] if not item["location"].startswith("adr/")]
    index.write_text(json.dumps(found, separators=(",", ":")))


def write_llms(docs: Path, site: Path) -> None:
    """Write llms.txt (llmstxt.org), the pages as Markdown, and llms-full.txt."""
    pages = [path for path in sorted(docs.rglob("*.md")) if path.name not in _NOT_PAGES]
    sections: dict[str, list[Path]] = {name: [] for name in _NAMES}
    for path in pages:
        sections[path.relative_to(docs).parts[0] if path.parent != docs else "."].append(path)
        copy = site / path.relative_to(docs)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    _, summary = _title_and_summary((docs / "index.md").read_text())
    lines = ["# Gangline", "", f"> {summary}"]
    for folder, found in sections.items():
        lines += ["", f"## {_NAMES[folder]}", ""]
        for path in found:
            title, first = _title_and_summary(path.read_text())
            lines.append(f"- [{title}]({path.relative_to(docs)})" + (f": {first}" if first else ""))
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    ordered = [path for found in sections.values() for path in found]
    whole = "\n\n".join(f"<!-- {path.relative_to(docs)} -->\n\n{path.read_text()}" for path in ordered)
    (site / "llms-full.txt").write_text(whole)


def _title_and_summary(text: str) -> tuple[str, str]:
    """The heading of a page, and the first sentence of its first paragraph where it begins with prose."""
    _, _, rest = text.partition("# ")
    title, _, body = rest.partition("\n")
    paragraph = " ".join(body.strip().partition("\n\n")[0].split())
    if not re.match(r"[A-Z\[]|`(?!``)", paragraph):
        return title.strip(), ""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return title.strip(), re.split(r"(?<=\.)\s", plain)[0]


def main() -> int:
    build()
    write_tour(SITE / "tour" / "index.html")
    found = broken(SITE)
    print("\n".join(found) if found else f"The site is in {SITE}; every link leads somewhere.")
    leave_decisions_out(SITE / "search.json")
    write_llms(DOCS, SITE)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
