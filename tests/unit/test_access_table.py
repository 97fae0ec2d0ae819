"""The table of routes and roles has every route, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gangline.server.access import ROLES
from gangline.server.app import all_routes

ROUTES = {
    f"{route.method} {route.path}": route
    for route in all_routes(cast(Any, SimpleNamespace(store=None)))
    if route.opened_by == "control"
}


def test_every_route_of_every_router_has_an_entry_and_every_entry_a_route():
    assert set(ROUTES) == set(ROLES)


def test_an_admin_opens_all_and_a_node_leases_and_reports_alone():
    assert all("admin" in roles for roles in ROLES.values())
    assert {name for name, roles in ROLES.items() if "node" in roles} == {
        "POST /v1/nodes/{node_id}/lease",
        "POST /v1/nodes/{node_id}/heartbeat",
        "POST /v1/nodes/{node_id}/release",
        "POST /v1/nodes/{node_id}/turns",
        "POST /v1/nodes/{node_id}/turns:begin-anew",
        "GET /v1/sessions/{session_id}/turns",
        "GET /v1/sessions/{session_id}/result",
        "POST /v1/sessions/{session_id}/result",
        "GET /openapi.json",
        "GET /v1/openapi.json",
    }


def test_who_reads_changes_nothing():
    changes = {name for name, roles in ROLES.items() if "read" in roles and not name.startswith("GET ")}
    assert changes == {"POST /v1/page/links"}


def test_the_service_as_a_whole_is_nothing_for_a_tenant():
    whole = {name for name, roles in ROLES.items() if not {"read", "submit"} & set(roles)}
    assert {"GET /metrics", "GET /v1/tokens", "POST /v1/tokens", "GET /status", "GET /v1/runs"} <= whole
