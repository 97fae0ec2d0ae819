"""The page's own files, in memory, under addresses that change with their content.

All files share one digest in their path, `/page/{digest}/{folder}/{file}`. Relative imports between modules stay within
it, so a browser can cache files forever and never mixes two versions.
"""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path

import msgspec

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types gangline",
    )
)
"""No inline code, no external content, no HTML from strings. The only trusted-types policy names our worker."""

_ROOT = Path(__file__).parent
_FOLDERS = ("app", "vendor")
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Suffixes of served files. Others, such as type declarations and licences, are not served."""


LAZY = ("vendor/uplot.mjs", "vendor/uplot.css")
"""Files loaded only by parts with curves."""


class PageFile(msgspec.Struct, frozen=True):
    """A file as sent to browsers."""

    content_type: str
    plain: bytes
    gzipped: bytes


class PageFiles:
    """The page's files. `files` maps `folder/name` to content."""

    def __init__(self, files: dict[str, bytes]) -> None:
        """`app/index.html` is the page; `{page}` in it is replaced by the folder of all other files."""
        index = files.pop("app/index.html").decode()
        self.digest = hashlib.sha256(
            b"".join(f"{name}\0{len(content)}\0".encode() + content for name, content in sorted(files.items()))
        ).hexdigest()[:16]
        self._files = {name: _file(content, _TYPES[Path(name).suffix]) for name, content in files.items()}
        modules = (
            f'<link rel="modulepreload" href="/page/{self.digest}/{name}">'
            for name in sorted(files)
            if name.endswith("js") and "worker" not in name and name not in LAZY
        )
        index = index.replace("{page}", f"/page/{self.digest}").replace("{modules}", "\n".join(modules))
        self.index = _file(index.encode(), "text/html; charset=utf-8")

    def find(self, digest: str, folder: str, name: str) -> PageFile | None:
        return self._files.get(f"{folder}/{name}") if digest == self.digest else None


@cache
def page_files() -> PageFiles:
    """The files of this installation. The first call blocks for a few milliseconds."""
    return PageFiles(page_sources())


def page_sources() -> dict[str, bytes]:
    """`folder/name` -> content."""
    paths = (path for folder in _FOLDERS for path in (_ROOT / folder).iterdir())
    return {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in paths
        if path.suffix in _TYPES or path.name == "index.html"
    }


def _file(content: bytes, content_type: str) -> PageFile:
    return PageFile(content_type, content, gzip.compress(content, 9, mtime=0))
