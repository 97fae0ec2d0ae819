"""The table of routes and roles, and `Guard`, which holds every request of a token to it.

A token of a tenant finds nothing of another one: where a path names a task or session, its tenant is looked up before
the route runs, and any other is answered 404, as one that does not exist.
"""

from __future__ import annotations

from aiohttp import web

from gangline.domain.errors import LeaseLost, NotAllowed, NotFound
from gangline.domain.tenancy import Principal, Role
from gangline.server.service.core import RolloutService
from gangline.wire.http.query import Text
from gangline.wire.http.routes import PRINCIPAL, Route

_READ: tuple[Role, ...] = ("read", "submit", "operate", "admin")
_SUBMIT: tuple[Role, ...] = ("submit", "admin")
_CANCEL: tuple[Role, ...] = ("submit", "operate", "admin")
_NODE: tuple[Role, ...] = ("node", "admin")
_OPERATE: tuple[Role, ...] = ("operate", "admin")
_ADMIN: tuple[Role, ...] = ("admin",)

ROLES: dict[str, tuple[Role, ...]] = {
    "POST /v1/tasks": _SUBMIT,
    "POST /v1/tasks:batch": _SUBMIT,
    "GET /v1/tasks": _READ,
    "GET /v1/tasks/{task_id}": _READ,
    "GET /v1/tasks/{task_id}/result": _READ,
    "GET /v1/tasks/{task_id}/references": _READ,
    "GET /v1/tasks/{task_id}/aligned": _READ,
    "DELETE /v1/tasks/{task_id}": _CANCEL,
    "GET /v1/sessions": _READ,
    "GET /v1/sessions/{session_id}": _READ,
    "GET /v1/sessions/{session_id}/result": (*_READ, "node"),  # a node: of a fork's parent, see `Guard.check`
    "GET /v1/sessions/{session_id}/reference": _READ,
    "GET /v1/sessions/{session_id}/outline": _READ,
    "GET /v1/sessions/{session_id}/calls": _READ,
    "GET /v1/sessions/{session_id}/tokens": _READ,
    "GET /v1/sessions/{session_id}/drift": _READ,
    "GET /v1/sessions/{session_id}/beside": _READ,
    "GET /v1/sessions/{session_id}/file": _READ,
    "GET /v1/sessions/{session_id}/forks": _READ,
    "POST /v1/sessions/{session_id}/forks": _SUBMIT,
    "POST /v1/sessions/{session_id}/regrade": _SUBMIT,
    "POST /v1/sessions/{session_id}/annotations": _SUBMIT,
    "DELETE /v1/sessions/{session_id}": _CANCEL,
    "POST /v1/sessions": _SUBMIT,
    "GET /v1/sessions/{session_id}/wait": _READ,
    "POST /v1/sessions/{session_id}/finalize": _SUBMIT,
    "POST /v1/sessions/{session_id}/abort": _CANCEL,
    "GET /v1/annotations": _READ,
    "GET /v1/find": _READ,
    "GET /v1/events": _READ,
    "GET /v1/status": _READ,
    "GET /v1/tenants": _READ,
    "GET /v1/usage": _READ,
    "POST /v1/tenants/{tenant}": _ADMIN,
    "GET /metrics": _OPERATE,
    "POST /v1/nodes/{node_id}/lease": _NODE,
    "POST /v1/nodes/{node_id}/heartbeat": _NODE,
    "POST /v1/nodes/{node_id}/release": _NODE,
    "POST /v1/nodes/{node_id}/turns": _NODE,
    "POST /v1/nodes/{node_id}/turns:begin-anew": _NODE,
    "GET /v1/sessions/{session_id}/turns": _NODE,
    "POST /v1/sessions/{session_id}/result": _NODE,
    "GET /": _READ,
    "GET /page/{digest}/{folder}/{file}": _READ,
    "GET /v1/page/visitor": _READ,
    "POST /v1/page/links": _READ,
    "GET /openapi.json": (*_READ, "node"),
    "GET /v1/openapi.json": (*_READ, "node"),
    "GET /v1/tokens": _ADMIN,
    "POST /v1/tokens": _ADMIN,
    "POST /v1/tokens/{token_id}/rotate": _ADMIN,
    "DELETE /v1/tokens/{token_id}": _ADMIN,
    # Of wings. They know no tenants.
    "GET /v1/evaluations": _OPERATE,
    "POST /v1/evaluations": _ADMIN,
    "GET /v1/evaluations/{evaluation}": _OPERATE,
    "GET /v1/evaluations/{evaluation}/compared": _OPERATE,
    "GET /v1/runs": _OPERATE,
    "GET /v1/runs/{run}": _OPERATE,
    "GET /v1/runs/{run}/steps/{step}": _OPERATE,
    "GET /v1/runs/{run}/compared": _OPERATE,
    "POST /v1/harbor/groups": _ADMIN,
    "POST /rollout/task/submit": _ADMIN,
    "GET /rollout/task/{task_id}": _OPERATE,
    "DELETE /rollout/task/{task_id}": _OPERATE,
    "GET /rollout/status": _OPERATE,
    "GET /nodes": _OPERATE,
    "GET /nodes/{node_id}": _OPERATE,
    "GET /tasks": _OPERATE,
    "GET /tasks/{task_id}/sessions": _OPERATE,
    "GET /events": _OPERATE,
    "POST /callbacks/session_result": _ADMIN,
    "POST /nodes/register": _ADMIN,
    "POST /nodes/{node_id}/heartbeat": _ADMIN,
    "POST /process": _ADMIN,
    "POST /cancel": _ADMIN,
    "POST /add_llm_server": _ADMIN,
    "POST /clear_llm_server": _ADMIN,
    "POST /start": _ADMIN,
    "POST /stop": _ADMIN,
    "GET /status": _OPERATE,
}
"""The roles that open each route with a token. A route that is not here is for `admin` alone."""

_OF_CALLERS = ("/wait", "/finalize", "/abort")
"""Ends of the paths of sessions that callers run themselves."""

TENANT = Text("tenant", "Only of this tenant. Tokens of a tenant are given their own alone.")


def roles_of(route: Route) -> tuple[Role, ...]:
    return ROLES.get(f"{route.method} {route.path}", _ADMIN)


def tenant_of(request: web.Request) -> str | None:
    """The tenant to which a list is restricted; None: none. Raises: NotFound for another tenant's."""
    bound, wanted = PRINCIPAL.get().bound_to, TENANT.read(request)
    if bound is not None and wanted not in (None, bound):
        raise NotFound(f"no tenant {wanted!r}.")
    return bound or wanted


def refuse_foreign(tenant: str | None, what: str) -> None:
    """tenant: whose it is; None if it does not exist. Raises: NotFound if it is not the caller's."""
    if (bound := PRINCIPAL.get().bound_to) is not None and tenant != bound:
        raise NotFound(f"no {what}.")


class Guard:
    """Holds the callers of a service's routes to the table."""

    def __init__(self, service: RolloutService) -> None:
        self._store = service.store
        self.known = service.tokens.known
        self.still = service.tokens.still

    async def check(self, principal: Principal, request: web.Request, route: Route) -> None:
        """Raises: NotAllowed if its role does not open the route, NotFound for another tenant's task or session."""
        allowed = roles_of(route)
        if principal.role not in allowed:
            raise NotAllowed(
                f"a token with role `{principal.role}` does not open {route.method} {route.path}; "
                f"{' and '.join(f'`{role}`' for role in allowed)} do."
            )
        if principal.role == "node" and route.method == "POST":
            await self._check_holder(principal, request, route)
        if principal.bound_to is None or route.path.startswith("/v1/nodes/"):
            return
        for name, value in request.match_info.items():
            if name in ("task_id", "session_id"):
                await self._check_named(principal, value, is_task=name == "task_id", route=route)

    async def _check_holder(self, principal: Principal, request: web.Request, route: Route) -> None:
        """Fences are small numbers, and can be guessed. Raises: LeaseLost for a lease of another token's node."""
        if route.path.endswith(("/lease", "/heartbeat")):
            return  # its identity says which node it is
        ((name, value),) = request.match_info.items()
        holder = await self._store.query(self._store.token_of_holder, value, name == "node_id")
        if holder not in (None, principal.token_id):
            raise LeaseLost("a node that came with another token holds this lease.")

    async def _check_named(self, principal: Principal, name: str, *, is_task: bool, route: Route) -> None:
        what = f"{'task' if is_task else 'session'} {name[:140]!r}"
        if principal.role == "node":
            if route.method == "GET":
                if route.path.endswith("/result"):
                    is_open = await self._store.query(self._store.is_forked, name)
                else:
                    is_open = await self._store.query(self._store.token_of_holder, name) == principal.token_id
                if not is_open:
                    raise NotFound(f"no {what}.")
            return
        find = self._store.tenant_of_task if is_task else self._store.tenant_of_session
        # Nodes alone know the sessions of callers. Their ids begin with their tenant's name, also where a task of
        # another tenant has a session with the same id.
        tenant = None if route.path.endswith(_OF_CALLERS) else await self._store.query(find, name)
        if tenant != principal.tenant and (tenant is not None or is_task or not is_of_caller(name, principal.tenant)):
            raise NotFound(f"no {what}.")


def is_of_caller(session_id: str, tenant: str) -> bool:
    """Whether a session that a caller runs himself is this tenant's."""
    return session_id.startswith(f"{tenant}.")
