"""Which route wants what of a caller, read from the tables of routes that server, node and engine server serve."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from gangline.domain.tenancy import Role
from gangline.models.engine_server.app import create_app
from gangline.node.calls.proxy import Proxy
from gangline.node.node import control_routes
from gangline.server.access import ROLES
from gangline.server.app import all_routes
from gangline.serving.scripted.script import Reply, Script
from gangline.serving.scripted.server import ScriptedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer

_JSON = "application/json"
_TOKEN, _KEY, LINK = "control token", "session's key", "sign-in link"
_TOKEN_OR_PASSWORD = "control token, or the same as the URL's password"


class Access(NamedTuple):
    """What one route wants."""

    service: str
    method: str
    path: str
    opened_by: str = ""
    """Empty: nothing, whoever reaches the address is let in."""
    own_names: bool = False
    """Whether `Host`, `Origin` and `Sec-Fetch-Site` are checked."""
    body: str = ""
    """The type of a body, beside which JSON is taken; empty: any."""


def accesses() -> Iterator[Access]:
    """Every route of every service, in the order in which each describes them."""
    parts: Any = SimpleNamespace(gate=None, backends=None, store=None)
    for service, routes in (("server", all_routes(parts)), ("node", control_routes(parts, *([cast(Any, None)] * 3)))):
        for route in routes:
            key = {"nobody": "", "control": _TOKEN, "link": LINK, "session": _KEY}[route.opened_by]
            if key and route.password_too:
                key = _TOKEN_OR_PASSWORD
            # Another site's page may lead to a link's page: only its host is checked.
            own_names = route.opened_by == "control" or (route.opened_by == "link" and route.method != "GET")
            yield Access(service, route.method, route.path, key, own_names, route.body_type if key else "")
    for route in Proxy().routes():
        yield Access("node", route.method, route.path, "" if route.method == "HEAD" else _KEY)
    engine = create_app(ScriptedSampler(Script(default=Reply(text="x")), TinyTokenizer()))
    for served in engine.router.routes():
        path = served.resource.canonical if served.resource else ""
        if served.method != "HEAD":
            is_open = path == "/health"
            yield Access("engine", served.method, path, "", not is_open, "" if is_open else _JSON)


def access() -> str:
    """docs/reference/access.md: the largest group of a service is all routes that no other row has."""
    groups: dict[tuple[str, str, bool, str], list[str]] = {}
    for one in accesses():
        groups.setdefault((one.service, one.opened_by, one.own_names, one.body), []).append(
            f"`{one.method} {one.path}`"
        )
    largest: dict[str, int] = {}
    for (service, *_), routes in groups.items():
        largest[service] = max(largest.get(service, 0), len(routes))
    rows = (
        _row(*group, ["all other [routes](http.md)"] if len(routes) == largest[group[0]] else routes)
        for group, routes in groups.items()
    )
    return "\n".join((_INTRODUCTION, *rows, _ROLES, *_by_role())) + "\n"


def _by_role() -> Iterator[str]:
    groups: dict[tuple[Role, ...], list[str]] = {}
    for route, roles in ROLES.items():
        groups.setdefault(tuple(sorted(roles)), []).append(f"`{route}`")
    for roles, routes in groups.items():
        alone = ["all other routes"] if roles == ("admin",) else routes
        yield f"| {', '.join(roles)} | {', '.join(alone)} |"


def _row(service: str, opened_by: str, own_names: bool, body: str, routes: list[str]) -> str:
    wants = (
        opened_by or "nothing",
        "checked" if own_names else "any",
        " or ".join(f"`{kind}`" for kind in dict.fromkeys((_JSON, body))) if body else "any",
    )
    return f"| {service} | {' | '.join(wants)} | {', '.join(routes)} |"


_ROLES = """
## Roles

Which [tokens](../guides/tenants.md) open which of the server's routes. A token of `read`, `submit` or `node` finds its
own tenant's tasks and sessions only.

| role | routes |
|---|---|"""

_INTRODUCTION = """\
<!-- Made by docs/generate.py from the code; `make docs` makes it again. -->

# Access

What a route needs of its caller; [operations](../guides/operations.md#who-may-call) says why. A browser that was signed
in with `gangline open` sends a cookie in place of the token; a read-only one opens `GET` alone. With `--no-token` no
control token is needed; the rest stays. `Host` stands for `Host`, `Origin` and `Sec-Fetch-Site`. A body of another type
than the table's is refused.

| service | opened by | `Host` | body | routes |
|---|---|---|---|---|"""
