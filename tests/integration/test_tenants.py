"""Two tenants of one server: with every route, every role and every way to name it, none gets at the other's."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast, get_args

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gangline.domain.errors import (
    Conflict,
    GanglineError,
    InvalidRequest,
    LimitExceeded,
    NotAllowed,
    NotFound,
    Unauthorized,
)
from gangline.domain.tenancy import Role
from gangline.server.access import ROLES
from gangline.server.run import Storage, database_path, serving
from gangline.server.service.known_tokens import KNOWN_FOR_S
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request

TOKEN = "control-secret"
MARK = "alphas-own"
"""In everything of tenant `alpha`: ids, instructions, notes."""
IDS = {"task_id": f"{MARK}-ended", "session_id": f"{MARK}-ended.0"}
BOUND = [role for role in get_args(Role) if role not in ("operate", "admin")]
NAMED = sorted(name for name in ROLES if "{task_id}" in name or "{session_id}" in name)
ENDLESS = ("GET /v1/events", "GET /events")


class Fleet:
    """A server with tokens of two tenants, and tasks of the first one."""

    def __init__(self, admin: ServerClient) -> None:
        self.admin = admin
        self.node = FakeNode(admin)
        self.tokens: dict[tuple[str, Role], str] = {}

    async def fill(self) -> None:
        for tenant in ("alpha", "beta"):
            for role in cast(tuple[Role, ...], get_args(Role)):
                self.tokens[tenant, role] = (await self.admin.create_token(role=role, tenant=tenant)).token
        async with self.client("alpha", "submit") as alpha:
            await alpha.submit(request(f"{MARK}-ended", num_samples=1, instruction=MARK))
            await self.node.finish(await self.node.lease())
            await alpha.submit(request(f"{MARK}-queued", num_samples=2, instruction=MARK, submitter=MARK))
            await alpha.annotate(IDS["session_id"], note=MARK)

    def client(self, tenant: str, role: Role) -> ServerClient:
        return ServerClient(self.admin.url, self.tokens[tenant, role])

    async def ask(self, tenant: str, role: Role, name: str, query: str = "", **call: Any) -> tuple[int, str]:
        method, path = name.split(" ")
        for part in re.findall(r"\{(\w+)\}", path):
            path = path.replace(f"{{{part}}}", IDS.get(part, "x"))
        headers = {"Authorization": f"Bearer {self.tokens[tenant, role]}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.request(method, self.admin.url + path + query, **call) as reply,
        ):
            return reply.status, (await reply.read()).decode(errors="replace")

    async def state(self) -> Any:
        tasks = [await self.admin.task(f"{MARK}-{name}") for name in ("ended", "queued")]
        shown = [(task.status, task.tenant, [(one.state, one.reward) for one in task.sessions]) for task in tasks]
        return shown, len((await self.admin.annotations()).annotations), len((await self.admin.tasks()).tasks)


@pytest.fixture
async def fleet(tmp_path: Path, any_database: str) -> AsyncIterator[Fleet]:
    url = any_database if "://" in any_database else None
    results = str(tmp_path / "results") if url else None
    storage = Storage(database_url=url, results_url=results)
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin, storage=storage) as running,
        ServerClient(running.url, TOKEN) as admin,
    ):
        fleet = Fleet(admin)
        await fleet.fill()
        yield fleet


async def test_no_route_with_an_id_opens_for_another_tenant(fleet: Fleet):
    before = await fleet.state()
    opened: list[str] = []
    for name in NAMED:
        for role in BOUND:
            status, text = await fleet.ask("beta", role, name, data=b"{}" if name.startswith("POST") else None)
            wanted = 404 if role in ROLES[name] and role != "node" else 403
            if role == "node" and role in ROLES[name]:
                # It reports under a fence that it was given: see the threat model.
                assert name.endswith(("/turns", "/result")), name
                wanted = 404 if name.startswith("GET") else status
            if status != wanted or MARK in text.replace(IDS["task_id"], "").replace(IDS["session_id"], ""):
                opened.append(f"{role} {name}: {status} {text[:100]}")
    assert not opened
    assert await fleet.state() == before


async def test_no_list_has_anything_of_another_tenant(fleet: Fleet):
    seen: list[str] = []
    for name in sorted(set(ROLES) - set(NAMED) - set(ENDLESS)):
        if name.startswith("GET "):
            for role in BOUND:
                for query in ("", "?tenant=alpha"):
                    _, text = await fleet.ask("beta", role, name, query)
                    seen += [f"{role} {name}{query}"] if MARK in text or '"queued":2' in text else []
    assert not seen


async def test_lists_have_all_of_ones_own(fleet: Fleet):
    async with fleet.client("alpha", "read") as alpha:
        assert len((await alpha.tasks()).tasks) == 2
        assert len((await alpha.sessions()).sessions) == 3
        assert len((await alpha.annotations()).annotations) == 1
        status = await alpha.status()
        assert (status.tasks, status.queued, status.nodes) == ({"ended": 1, "queued": 1}, {MARK: 2}, ())
        assert (await alpha.session_result(IDS["session_id"])).reward == 1.0


async def test_operators_see_all_tenants_and_one_of_them(fleet: Fleet):
    async with fleet.client("beta", "operate") as operator:
        assert {task.tenant for task in (await operator.tasks()).tasks} == {"alpha"}
        for tenant, num in (("alpha", 2), ("beta", 0)):
            _, text = await fleet.ask("beta", "operate", "GET /v1/tasks", f"?tenant={tenant}")
            assert len(json.loads(text)["tasks"]) == num
        with pytest.raises(NotAllowed, match="role `operate`"):
            await operator.submit(request("by-an-operator"))
        assert (await operator.cancel(f"{MARK}-queued")).status == "cancelled"


async def test_an_id_that_is_taken_stays_its_tenants(fleet: Fleet):
    async with fleet.client("beta", "submit") as beta:
        same = request(f"{MARK}-ended", num_samples=1, instruction=MARK)
        with pytest.raises(Conflict):
            await beta.submit(same)
        async with fleet.client("alpha", "submit") as alpha:
            assert not (await alpha.submit(same)).created


@pytest.mark.parametrize("parent", [IDS["session_id"], f"{MARK}-later.0"])
async def test_a_task_forks_no_session_of_another_tenant_nor_one_to_come(fleet: Fleet, parent: str):
    async with fleet.client("beta", "submit") as beta:
        with pytest.raises(NotFound, match="fork"):
            await beta.submit(request("forks", fork={"session_id": parent, "attempt": 1, "turn": 1}))


async def test_a_node_reads_the_results_that_it_forks_alone(fleet: Fleet):
    name = "GET /v1/sessions/{session_id}/result"
    assert (await fleet.ask("alpha", "node", name))[0] == 404
    async with fleet.client("alpha", "submit") as alpha:
        await alpha.submit(request("forks", fork={"session_id": IDS["session_id"], "attempt": 1, "turn": 1}))
    assert (await fleet.ask("alpha", "node", name))[0] == 200


async def test_a_node_reads_the_turns_of_sessions_that_it_holds_alone(fleet: Fleet):
    name = f"GET /v1/sessions/{MARK}-queued.0/turns"
    async with ServerClient(fleet.admin.url, fleet.tokens["beta", "node"]) as client:
        assert (await fleet.ask("beta", "node", name))[0] == 404
        assert await client.lease("betas-node", url="http://127.0.0.1:9", max_sessions=1)
        assert (await fleet.ask("beta", "node", name))[0] == 200
        assert (await fleet.ask("alpha", "node", name))[0] == 404


async def test_two_sessions_side_by_side_are_both_ones_own(fleet: Fleet):
    async with fleet.client("beta", "submit") as beta:
        await beta.submit(request("betas", num_samples=1))
    await fleet.node.finish([one for one in await fleet.node.lease() if one.task_id == "betas"])
    name = "GET /v1/sessions/betas.0/beside"
    assert (await fleet.ask("beta", "read", name, f"?other={IDS['session_id']}"))[0] == 404
    assert (await fleet.ask("beta", "read", name, "?other=betas.0"))[0] == 200


async def test_events_are_of_ones_own_tasks_alone(fleet: Fleet):
    async with fleet.client("beta", "submit") as beta:
        await beta.submit(request("betas", num_samples=1))
        async for event in beta.events(after=0):
            assert (event.task_id, event.kind) == ("betas", "task.submitted")
            break
    assert (await fleet.ask("beta", "read", "GET /v1/events", f"?task_id={IDS['task_id']}"))[0] == 404


async def test_a_tenant_leaves_links_and_event_streams_to_others(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gangline.wire.http.visitors.MAX_LINKS", 20)
    monkeypatch.setattr("gangline.server.routes.events.MAX_STREAMS", 10)
    async with fleet.client("beta", "read") as beta, fleet.client("alpha", "read") as alpha:
        for _ in range(2):
            await beta.page_link(read_only=True)
        with pytest.raises(LimitExceeded, match="2 links"):
            await beta.page_link(read_only=True)
        await alpha.page_link(read_only=True)
        headers = {"Authorization": f"Bearer {fleet.tokens['beta', 'read']}"}
        async with aiohttp.request("GET", f"{fleet.admin.url}/v1/events", headers=headers) as stream:
            assert stream.status == 200
            assert (await fleet.ask("beta", "submit", "GET /v1/events"))[0] == 429
            async for _ in alpha.events(after=0):
                break


async def test_find_finds_ones_own_sessions_alone(fleet: Fleet):
    for tenant, num in (("alpha", 1), ("beta", 0)):
        while True:
            found = json.loads((await fleet.ask(tenant, "read", "GET /v1/find"))[1])
            if not found["num_waiting"]:
                break
        assert (len(found["sessions"]), found["num_indexed"]) == (num, num)


async def test_a_session_that_a_caller_runs_bears_his_tenants_name(fleet: Fleet):
    body = json.dumps({"session_id": "alpha.mine"}).encode()
    status, text = await fleet.ask("beta", "submit", "POST /v1/sessions", data=body)
    assert (status, "'beta.'" in text) == (400, True)
    assert (await fleet.ask("beta", "submit", "POST /v1/sessions/alpha.mine/finalize"))[0] == 404


async def test_a_task_named_like_a_tenant_does_not_get_at_its_callers_sessions(fleet: Fleet):
    asked: list[str] = []

    async def session(asked_for: web.Request) -> web.Response:
        asked.append(asked_for.path)
        return web.json_response({}, status=500)

    app = web.Application()
    app.router.add_route("*", "/v1/sessions/{tail:.*}", session)
    async with TestServer(app) as node, fleet.client("beta", "submit") as beta:
        await fleet.admin.lease("own", url=str(node.make_url("")), max_sessions=1)
        await beta.submit(request("alpha", num_samples=1))
        for role, name in (("read", "GET /wait"), ("submit", "POST /finalize"), ("submit", "POST /abort")):
            path = name.replace(" ", " /v1/sessions/alpha.0")
            assert (await fleet.ask("beta", cast(Role, role), path))[0] == 404
    assert asked == []


async def test_who_takes_a_forgotten_id_sees_nothing_of_its_former_session(
    fleet: Fleet, tmp_path: Path, any_database: str
):
    name = "GET /v1/sessions/{session_id}/outline"
    assert json.loads((await fleet.ask("alpha", "read", name))[1])["reward"] == 1.0
    with TaskStore(any_database if "://" in any_database else database_path(tmp_path)) as store:
        assert store.forget([IDS["task_id"]]) == 1
    async with fleet.client("beta", "submit") as beta:
        await beta.submit(request(IDS["task_id"], num_samples=1))
        await fleet.node.finish([one for one in await fleet.node.lease() if one.task_id == IDS["task_id"]], reward=0.5)
    assert json.loads((await fleet.ask("beta", "read", name))[1])["reward"] == 0.5


async def test_a_browser_sees_what_its_link_was_made_by_and_no_longer(fleet: Fleet):
    cases: tuple[tuple[Role, bool], ...] = (("read", True), ("submit", False))
    for role, read_only in cases:
        async with fleet.client("beta", role) as beta, aiohttp.ClientSession() as http:
            link = await beta.page_link()
            assert link.read_only is read_only
            async with http.post(fleet.admin.url + link.path, headers={"Origin": fleet.admin.url}) as answer:
                (cookie,) = answer.cookies.values()
            headers = {"Cookie": f"{cookie.key}={cookie.value}"}
            async with http.get(f"{fleet.admin.url}/v1/page/visitor", headers=headers) as answer:
                assert await answer.json() == {"read_only": read_only, "role": role, "tenant": "beta"}
            async with http.get(f"{fleet.admin.url}/v1/tasks/{IDS['task_id']}", headers=headers) as answer:
                assert answer.status == 404
            await fleet.admin.revoke_token(fleet.tokens["beta", role].split("-")[1])
            async with http.get(f"{fleet.admin.url}/v1/page/visitor", headers=headers) as answer:
                assert answer.status == 401


async def test_a_token_lives_from_its_creation_to_its_end(fleet: Fleet):
    made = await fleet.admin.create_token(role="read", tenant="beta", note="a look", expires_in_s=3600)
    async with ServerClient(fleet.admin.url, made.token) as old:
        await old.status()
        new = await fleet.admin.rotate_token(made.view.token_id, grace_s=3600)
        await old.status()
        async with ServerClient(fleet.admin.url, new.token) as client:
            await client.status()
            newest = await fleet.admin.rotate_token(made.view.token_id)
            for out in (client, old):
                with pytest.raises(Unauthorized):
                    await out.status()
        async with ServerClient(fleet.admin.url, newest.token) as client:
            await client.status()
            await fleet.admin.revoke_token(made.view.token_id)
            with pytest.raises(Unauthorized):
                await client.status()
    with pytest.raises(Conflict, match="revoked"):
        await fleet.admin.rotate_token(made.view.token_id)
    (listed,) = [one for one in await fleet.admin.tokens() if one.token_id == made.view.token_id]
    assert (listed.note, listed.revoked_at is None, listed.expires_at) == ("a look", False, made.view.expires_at)
    for wrong in ({"role": "root"}, {"role": "read", "tenant": "Beta.x"}, {"role": "read", "tenant": "beta\n"}):
        with pytest.raises(InvalidRequest):
            await fleet.admin.create_token(**wrong)


async def test_an_expired_token_opens_nothing(fleet: Fleet):
    made = await fleet.admin.create_token(role="read", expires_in_s=0)
    async with ServerClient(fleet.admin.url, made.token) as client:
        with pytest.raises(Unauthorized):
            await client.status()


async def test_a_nodes_session_key_is_no_token_and_a_token_is_kept_as_a_digest(fleet: Fleet, tmp_path: Path):
    secret = fleet.tokens["beta", "submit"].rpartition("-")[2]
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert (kept, len(secret), KNOWN_FOR_S <= 2) == ([], 64, True)


@pytest.mark.parametrize("grace_s", [0.0, 3600.0])
async def test_a_server_calls_a_node_by_the_nodes_own_token(fleet: Fleet, grace_s: float):
    """It still runs with the secret from before a rotation, while that is valid."""
    given: list[str] = []

    async def grade(asked: web.Request) -> web.Response:
        given.append(asked.headers["Authorization"])
        return web.json_response({}, status=500)

    app = web.Application()
    app.router.add_post("/v1/gradings", grade)
    own = fleet.tokens["beta", "node"]
    token_id = own.split("-")[1]
    async with TestServer(app) as node:
        if grace_s:
            await fleet.admin.rotate_token(token_id, grace_s=grace_s)
        async with ServerClient(fleet.admin.url, own) as client:
            assert await client.lease("own", url=str(node.make_url("")), max_sessions=1)
        with pytest.raises(GanglineError):
            await fleet.admin.regrade(IDS["session_id"])
    assert set(given) == {f"Bearer {own}"}
    (seen,) = [one for one in (await fleet.admin.status()).nodes if one.node_id == "own"]
    assert seen.key == f"{token_id}.1"


async def test_quotas_and_use_are_set_by_admins_and_seen_by_their_tenant(fleet: Fleet):
    await fleet.admin.set_tenant("alpha", weight=2, max_queued=3)
    async with fleet.client("alpha", "submit") as alpha:
        (own,) = await alpha.tenants()
        assert (own.name, own.weight, own.max_queued, own.num_queued, own.num_leases) == ("alpha", 2, 3, 2, 1)
        with pytest.raises(LimitExceeded, match="max_queued: 2 of 3"):
            await alpha.submit(request("too-many", num_samples=2))
        with pytest.raises(NotAllowed):
            await alpha.set_tenant("alpha", max_queued=None)
    for client in (fleet.client("alpha", "submit"), fleet.client("beta", "operate")):
        async with client:
            assert [(one.name, one.num_sessions) for one in await client.usage()] == [("alpha", 1)]
    async with fleet.client("beta", "read") as beta:
        assert await beta.usage() == []
        with pytest.raises(NotFound):
            await beta.usage(tenant="alpha")
        with pytest.raises(InvalidRequest, match="must be one of tenant, run"):
            await beta.usage(by="colour")
    for wrong in ({"weight": 0}, {"max_running": -1}, {"max_runnning": 1}):
        with pytest.raises(InvalidRequest):
            await fleet.admin.set_tenant("alpha", **wrong)
    assert (await fleet.admin.set_tenant("alpha", max_queued=None)).max_queued is None
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.request("GET", f"{fleet.admin.url}/metrics", headers=headers) as answer:
        assert 'gangline_tenant_queued{tenant="alpha"} 2.0' in await answer.text()
