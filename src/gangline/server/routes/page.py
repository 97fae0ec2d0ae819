"""The page: its files, and the sign-in of browsers.

    gangline open ──POST /v1/page/links──▶ a link
    browser ──GET /open/{link}──▶ a page that posts the same address ──▶ cookie ──▶ /

A link's page sends the POST itself, so that programs that only preview links, such as chats, do not use them up. The
browser then opens `/` by itself: after a redirect from a chat or a mail it would withhold a `SameSite=Strict` cookie.
"""

from __future__ import annotations

import base64
import hashlib

import msgspec
from aiohttp import hdrs, web

from gangline.domain.errors import NotFound
from gangline.domain.tenancy import Role
from gangline.domain.views import PageLink
from gangline.server.web.files import CONTENT_SECURITY_POLICY, PageFile, page_files
from gangline.wire.http.negotiation import accepts_gzip, answer, path_id, read_record
from gangline.wire.http.routes import PRINCIPAL, SUBJECT, Route
from gangline.wire.http.visitors import COOKIE_S, Visitors

_SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_FOR_EVER = "private, max-age=31536000, immutable"
_SIGNING_IN = (
    'fetch(location.pathname,{method:"POST"}).then(async a=>a.ok?location.replace("/"+location.hash):'
    "document.body.textContent=(await a.json()).detail)"
)
_SIGN_IN_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>Gangline</title><body>Signing in ...'
    f"<script>{_SIGNING_IN}</script></body></html>"
).encode()
_AGAIN = 'location.replace("/?"+location.hash)'  # another address than this page's, else the browser stays on it
_AGAIN_PAGE = (
    f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Gangline</title><script>{_AGAIN}</script></html>'
).encode()
_DOORSTEP_PAGE = (
    b'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
    b'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><title>Gangline</title>'
    b"<main><h1>This is Gangline, and this browser is not signed in.</h1>"
    b"<p>Where the service runs, <code>gangline open</code> prints a link that signs it in.</p>"
    b"<p>Elsewhere: <code>gangline open --server URL</code>, with its token in <code>GANGLINE_TOKEN</code>.</p>"
    b"</main></html>"
)


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src 'sha256-{digest}'"
    )


class LinkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for a link."""

    read_only: bool = False
    """True: the browser that opens it cannot change anything."""


class PageVisitor(msgspec.Struct, frozen=True, kw_only=True):
    """A signed-in browser."""

    read_only: bool
    role: Role
    tenant: str


class PageRoutes:
    def __init__(self, visitors: Visitors) -> None:
        self._visitors = visitors

    async def new_link(self, request: web.Request) -> web.Response:
        wanted = await read_record(request, LinkRequest)
        principal = PRINCIPAL.get()
        read_only = wanted.read_only or principal.role == "read"
        SUBJECT.set("read-only link" if read_only else "link")
        code, expires_at = self._visitors.new_link(read_only=read_only, principal=principal)
        return answer(request, PageLink(path=f"/open/{code}", read_only=read_only, expires_at=expires_at))

    async def show_link(self, request: web.Request) -> web.Response:
        self._visitors.check_link(path_id(request, "link"))
        return _small_page(_SIGN_IN_PAGE, _SIGNING_IN)

    async def use_link(self, request: web.Request) -> web.Response:
        cookie = self._visitors.sign_in(path_id(request, "link"))
        response = answer(request, {})
        response.set_cookie(
            self._visitors.cookie_name,
            cookie,
            max_age=COOKIE_S,
            path="/",
            httponly=True,
            samesite="Strict",
            secure=request.headers.get(hdrs.ORIGIN, "").startswith("https://"),
        )
        return response

    async def visitor(self, request: web.Request) -> web.Response:
        visitor = self._visitors.visitor(request)
        return answer(
            request,
            PageVisitor(
                read_only=visitor is not None and visitor.read_only,
                role=PRINCIPAL.get().role,
                tenant=PRINCIPAL.get().tenant,
            ),
        )

    async def doorstep(self, request: web.Request) -> web.Response:
        """From another site's link the browser goes on by itself, and then sends its cookie."""
        if request.headers.get("Sec-Fetch-Site", "none").lower() not in ("none", "same-origin"):
            return _small_page(_AGAIN_PAGE, _AGAIN)
        return _small_page(_DOORSTEP_PAGE, "", status=401)

    async def index(self, request: web.Request) -> web.Response:
        headers = {**_SAFE, "Content-Security-Policy": CONTENT_SECURITY_POLICY, "Cache-Control": "no-store"}
        return _file(request, page_files().index, headers)

    async def file(self, request: web.Request) -> web.Response:
        digest, folder, name = (path_id(request, part) for part in ("digest", "folder", "file"))
        found = page_files().find(digest, folder, name)
        if found is None:
            raise NotFound(f"the page has no file {request.path[:200]!r} (any more): load it again.")
        return _file(request, found, {**_SAFE, "Cache-Control": _FOR_EVER})

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/", self.index, "The page, for signed-in browsers; others are told how to sign in.",
                  answer_types=("text/html",), doorstep=self.doorstep),
            Route("GET", "/page/{digest}/{folder}/{file}", self.file, "A file of the page.",
                  answer_types=("text/javascript", "text/css"), errors=(400, 401, 404)),
            Route("GET", "/v1/page/visitor", self.visitor, "The rights of the browser that asks.", answer=PageVisitor),
            Route("POST", "/v1/page/links", self.new_link, "Make a link that signs a browser in, once.",
                  body=LinkRequest, answer=PageLink, errors=(400, 401, 429)),
            Route("GET", "/open/{link}", self.show_link, "The page behind such a link, which signs in.",
                  opened_by="link", answer_types=("text/html",), errors=(400, 404)),
            Route("POST", "/open/{link}", self.use_link, "Use the link up: the answer sets the cookie.",
                  opened_by="link", errors=(400, 404)),
        ]  # fmt: skip


def _small_page(body: bytes, script: str, *, status: int = 200) -> web.Response:
    """script: the only one that may run in it."""
    headers = {**_SAFE, "Content-Security-Policy": _policy(script), "Cache-Control": "no-store"}
    headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.Response(body=body, status=status, content_type="text/html", charset="utf-8", headers=headers)


def _file(request: web.Request, file: PageFile, headers: dict[str, str]) -> web.Response:
    headers = {**headers, "Content-Type": file.content_type, "Vary": "Accept-Encoding"}
    if accepts_gzip(request):
        return web.Response(body=file.gzipped, headers={**headers, "Content-Encoding": "gzip"})
    return web.Response(body=file.plain, headers=headers)
