"""A session as one HTML file, containing the page's own modules and the responses that they would request from a
server.

Modules cannot be imported from within a file, so a short loader gives each one a blob address. The policy allows that
loader by its hash, and blobs, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from gangline.domain.tokens import encode_json
from gangline.server.web.columns import encode_columns
from gangline.server.web.contents import call_contents
from gangline.server.web.drift import call_drift, drifts
from gangline.server.web.files import LAZY, page_sources
from gangline.server.web.outline import OpenedSession
from gangline.server.web.tokens import TokenBytes, token_columns, tokenizer_of

_BLOCK = 16
"""Number of calls that the page requests at once."""

_URI_COMPONENT = "-_.!~*'()"
"""Characters, in addition to letters and digits, that JavaScript's encodeURIComponent leaves unchanged."""

_LOADER = """
const sources = JSON.parse(document.getElementById("sources").textContent);
const made = {};
const load = (name) => made[name] ??= URL.createObjectURL(new Blob([sources[name].replace(
  /((?:from|import)\\s*)"(\\.[^"]+)"/g,
  (_, word, path) => `${word}"${load(new URL(path, "x:/" + name).pathname.slice(1))}"`,
)], { type: "text/javascript" }));
import(load("app/main.js"));
"""
_POLICY = "default-src 'none'; script-src '{script}' blob:; style-src '{style}'; base-uri 'none'; form-action 'none'"


def saved_page(session: OpenedSession, known: Mapping[str, TokenBytes]) -> bytes:
    """The file. Takes seconds per million tokens. known: bytes of token ids, by tokenizer (`tokenizer_of`)."""
    sources = page_sources()
    style = sources["app/style.css"].decode()
    policy = _POLICY.format(script=_hash(_LOADER), style=_hash(style))
    modules = {name: content.decode() for name, content in sources.items() if name.endswith("js") and name not in LAZY}
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{session.outline.session_id}</title>",
            f"<style>{style}</style>",
            '</head>\n<body>\n<div id="page"></div>',
            f'<script type="text/plain" id="saved">{_packed(session, known)}</script>',
            f'<script type="application/json" id="sources">{_in_script(modules)}</script>',
            f'<script type="module">{_LOADER}</script>\n</body>\n</html>\n',
        ]
    ).encode()


def _packed(session: OpenedSession, known: Mapping[str, TokenBytes]) -> str:
    """Base64 of the deflated responses: uint32 length of a header, the header, and the bodies in sequence.

    The header is JSON: [[path, media type, offset, length], ...], with offsets from the first body.
    """
    entries: list[tuple[str, str, int, int]] = []
    bodies: list[bytes] = []
    at = 0
    for path, kind, body in _answers(session, known):
        padded = body + b"\0" * (-len(body) % 8)
        entries.append((path, kind, at, len(body)))
        bodies.append(padded)
        at += len(padded)
    header = msgspec.json.encode([session.outline.session_id, entries])
    whole = len(header).to_bytes(4, "little") + header + b"".join(bodies)
    return base64.b64encode(zlib.compress(whole, 9)).decode()


def _answers(session: OpenedSession, known: Mapping[str, TokenBytes]) -> Iterator[tuple[str, str, bytes]]:
    """(path, media type, body) of everything that the page requests."""
    outline = session.outline
    path = f"/v1/sessions/{quote(outline.session_id, safe='')}"
    yield f"{path}/outline", "application/json", encode_json(outline)
    for first in range(0, len(session.calls), _BLOCK):
        contents = call_contents(session, first, _BLOCK)
        yield f"{path}/calls?first={first}&limit={_BLOCK}", "application/json", encode_json(contents)
    seen: defaultdict[str, set[int]] = defaultdict(set)
    for number, call in enumerate(session.calls):
        tokenizer = tokenizer_of(call)
        texts = known.get(tokenizer, {})
        new = {one: texts[one] for one in _ids(session, number) - seen[tokenizer] if one in texts}
        seen[tokenizer] |= new.keys()
        columns = encode_columns(token_columns(session, number, 1, new))
        yield f"{path}/tokens?first={number}&limit=1", "application/vnd.gangline.columns", columns
    for line in filter(drifts, outline.calls):
        yield (
            f"{path}/drift?call={line.number}",
            "application/json",
            encode_json(call_drift(session, line.number, known.get(tokenizer_of(session.calls[line.number]), {}))),
        )
    for name, content in session.files.items():
        named = quote(name, safe=_URI_COMPONENT)
        address = f"{path}/file?name={named}&attempt={outline.attempt}"
        yield address, "application/octet-stream", content


def _ids(session: OpenedSession, number: int) -> set[int]:
    call = session.calls[number]
    return {*call.prompt_suffix_ids.tolist(), *call.sampled_ids.tolist()}


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _in_script(value: Any) -> str:
    """JSON that cannot end a script element."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")
