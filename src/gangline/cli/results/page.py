"""`gangline open`: a link to the page of a running service, which signs one browser in."""

from __future__ import annotations

import re
import webbrowser
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, notes, print_json, run
from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from gangline.domain.views import PageLink
    from gangline.wire.client.running import Service

_PARTS = ("evaluations", "find", "runs", "sessions", "tasks")


def open_page(
    part: Annotated[
        str,
        typer.Argument(help="Part of the page, such as runs/NAME or sessions/ID. Default: Now.", show_default=False),
    ] = "",
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Make a link for a colleague: its browser can look, and change nothing.")
    ] = False,
    browser: Annotated[bool, typer.Option("--browser", help="Open the link in this machine's browser, too.")] = False,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print a link to the page, where sessions are seen down to their tokens.

    The link signs one browser in, once: within 10 minutes, or within a day with --read-only. The browser stays signed
    in for a week. With PART it opens there. With --json it prints one object {"url", "read_only", "expires_at"}.
    """
    from gangline.wire.client.running import find_service

    part = part.lstrip("#/")
    if part and re.split("[/?]", part)[0] not in _PARTS:
        raise InvalidRequest(f"the page has no part {part!r}. Its parts are {', '.join(_PARTS)}, also as runs/NAME.")
    service = find_service(data, server)
    link = run(_link(service, read_only))
    url = service.server_url + link.path + (f"#/{quote(part, safe='/?=&%')}" if part else "")
    if as_json:
        print_json({"url": url, "read_only": link.read_only, "expires_at": link.expires_at})
    else:
        print(url)
        when = "within a day" if read_only else "within 10 minutes"
        notes().print(f"It signs one browser in, once, {when}." + (" It can change nothing." if read_only else ""))
    if browser:
        webbrowser.open(url)


async def _link(service: Service, read_only: bool) -> PageLink:
    async with service.client() as client:
        return await client.page_link(read_only=read_only)


def register(app: typer.Typer) -> None:
    app.command("open")(open_page)
