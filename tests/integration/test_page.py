"""The page over HTTP: who is let in and by what, what a read-only browser may do, and a session in parts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import msgspec
import numpy as np
import pytest

from gangline.domain.session import SessionResult
from gangline.server.app import all_routes
from gangline.server.run import database_path, serving
from gangline.server.web.columns import COLUMNS, decode_columns
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.page.sessions import working_session
from support.service.running import FakeNode, any_plugin, request

TOKEN = "control-token"
ROUTES = [route for route in all_routes(cast(Any, SimpleNamespace(store=None))) if route.opened_by == "control"]
SESSION = "/v1/sessions/task-1.0"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[str]:
    async with serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as running:
        yield running.url


@pytest.fixture
async def control(server: str) -> AsyncIterator[ServerClient]:
    async with ServerClient(server, TOKEN) as client:
        yield client


@pytest.fixture
async def result(control: ServerClient) -> SessionResult:
    """The result of the first session, which the server has."""
    await control.submit(request("task-1", num_samples=1))
    (lease,) = await FakeNode(control).lease()
    found = msgspec.structs.replace(working_session(lease.session_id), node_id="n1", fence=lease.fence)
    await control.post_result(found)
    return found


@pytest.fixture
async def browser(server: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Keeps cookies as a browser does, of addresses too."""
    async with aiohttp.ClientSession(server, cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        yield session


async def sign_in(control: ServerClient, browser: aiohttp.ClientSession, *, read_only: bool = False) -> str:
    """The path of the used link."""
    link = await control.page_link(read_only=read_only)
    async with browser.post(link.path, headers={"Origin": control.url}) as answer:
        assert answer.status == 200, await answer.text()
    return link.path


async def status_of(browser: aiohttp.ClientSession, method: str, path: str, **options: Any) -> int:
    async with browser.request(method, path, allow_redirects=False, **options) as answer:
        return answer.status


async def test_without_a_cookie_nothing_of_the_page_is_served(browser: aiohttp.ClientSession) -> None:
    for path in ("/", "/page/0123456789abcdef/app/main.js", "/v1/status", f"{SESSION}/outline", "/v1/events"):
        async with browser.get(path) as answer:
            assert answer.status == 401
            assert answer.content_type == "application/problem+json"
    async with browser.get("/open/link-unknown") as answer:
        assert answer.status == 404


CHROME = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


async def test_a_browser_that_is_not_signed_in_reads_how_to_sign_in(browser: aiohttp.ClientSession) -> None:
    async with browser.get("/", headers={"Accept": CHROME, "Sec-Fetch-Site": "none"}) as answer:
        assert (answer.status, answer.content_type) == (401, "text/html")
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert answer.headers["Cache-Control"] == "no-store"
        text = await answer.text()
    assert "<code>gangline open</code>" in text
    assert "<script" not in text


@pytest.mark.parametrize("accept", ["*/*", "application/json", "application/json, text/html;q=0.5", "text/*", ""])
async def test_a_program_without_the_token_gets_a_problem_in_json(browser: aiohttp.ClientSession, accept: str) -> None:
    async with browser.get("/", headers={"Accept": accept}) as answer:
        assert (answer.status, answer.content_type) == (401, "application/problem+json")
    async with browser.get("/v1/status", headers={"Accept": CHROME}) as answer:
        assert (answer.status, answer.content_type) == (401, "application/problem+json")


async def test_a_link_of_another_site_leads_in_by_a_page_that_goes_on_by_itself(
    control: ServerClient, browser: aiohttp.ClientSession
) -> None:
    """A browser withholds its cookie there: from a chat, or from a report on the disk."""
    come = {"Accept": CHROME, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    await sign_in(control, browser)
    for headers in (come, {**come, "Sec-Fetch-Site": "same-site"}):
        async with browser.get("/", headers=headers) as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
            assert "sha256-" in answer.headers["Content-Security-Policy"]
            assert 'location.replace("/?"+location.hash)' in await answer.text()
    for headers in ({**come, "Host": "evil.test"}, {**come, "Sec-Fetch-Mode": "cors"}, {**come, "Accept": "*/*"}):
        assert await status_of(browser, "GET", "/", headers=headers) == 403
    assert await status_of(browser, "GET", "/v1/status", headers=come) == 403


async def test_a_link_signs_one_browser_in_once(control: ServerClient, browser: aiohttp.ClientSession) -> None:
    link = await control.page_link()
    for _ in range(2):  # to look at it uses nothing up, also from another site's page
        async with browser.get(link.path, headers={"Sec-Fetch-Site": "cross-site"}) as answer:
            assert answer.status == 200
            assert "sha256-" in answer.headers["Content-Security-Policy"]
            assert answer.headers["Cache-Control"] == "no-store"
    assert await status_of(browser, "POST", link.path, headers={"Origin": "https://evil.test"}) == 403
    async with browser.post(link.path, headers={"Origin": control.url}) as answer:
        cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith("gangline-")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert await status_of(browser, "POST", link.path, headers={"Origin": control.url}) == 404
    assert await status_of(browser, "GET", link.path) == 404
    assert await status_of(browser, "GET", "/") == 200


async def test_the_page_and_its_files(control: ServerClient, browser: aiohttp.ClientSession) -> None:
    await sign_in(control, browser)
    async with browser.get("/") as answer:
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; ")
        assert answer.headers["Cache-Control"] == "no-store"
        text = await answer.text()
    main = text.partition('type="module" src="')[2].partition('"')[0]
    async with browser.get(main, headers={"Accept-Encoding": "gzip"}) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/javascript"
        assert answer.headers["Content-Encoding"] == "gzip"
        assert "immutable" in answer.headers["Cache-Control"]
    async with browser.get(main, headers={"Accept-Encoding": "identity"}) as answer:
        assert "Content-Encoding" not in answer.headers
        assert b"import" in await answer.read()
    folder = main.rpartition("/")[0]
    for other in ("types.d.ts", "index.html", "none.js"):
        assert await status_of(browser, "GET", f"{folder}/{other}") == 404


async def test_a_page_of_another_site_gets_nothing_by_the_cookie(
    control: ServerClient, browser: aiohttp.ClientSession
) -> None:
    await sign_in(control, browser)
    for headers in (
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},  # another port of this host: the cookie goes there, and comes from there
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Host": "evil.test"},
    ):
        assert await status_of(browser, "GET", "/v1/status", headers=headers) == 403, headers
    body = {"data": b"{}", "headers": {"Content-Type": "application/json"}}
    assert await status_of(browser, "POST", "/v1/page/links", **body) == 403  # no browser leaves `Origin` out


async def test_the_drift_of_a_call(
    control: ServerClient, browser: aiohttp.ClientSession, result: SessionResult
) -> None:
    await sign_in(control, browser)
    async with browser.get(f"{SESSION}/drift?call=4") as answer:
        drift = await answer.json()
    assert (drift["cause"], drift["tokens"]["first"], drift["tokens"]["in_call"]) == ("bpe_merge", 9, 0)
    assert await status_of(browser, "GET", f"{SESSION}/drift?call=5") == 404


async def test_a_read_only_browser_reads_all_and_changes_nothing(
    control: ServerClient, browser: aiohttp.ClientSession, result: SessionResult
) -> None:
    await sign_in(control, browser, read_only=True)
    for path in ("/", "/v1/status", "/v1/tasks/task-1", SESSION, f"{SESSION}/outline", "/metrics"):
        assert await status_of(browser, "GET", path) == 200
    before = await control.task("task-1")
    options = {"data": b"{}", "headers": {"Content-Type": "application/json", "Origin": control.url}}
    tried = [(route.method, route.path) for route in ROUTES if route.method not in ("GET", "*")]
    assert len(tried) > 20
    for method, path in tried:
        for name in ("task-1", "task-1.0", "n1"):
            named = path.replace("{task_id}", name).replace("{session_id}", name).replace("{node_id}", name)
            async with browser.request(method, named, **options) as answer:
                assert (answer.status, json.loads(await answer.text())["code"]) == (403, "read_only"), named
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE"):
        assert await status_of(browser, method, "/v1/tasks/task-1", **options) == 403
    assert msgspec.structs.asdict(await control.task("task-1")) == msgspec.structs.asdict(before)


async def test_a_signed_in_browser_may_do_what_the_token_may_and_is_named_in_the_log(
    control: ServerClient, browser: aiohttp.ClientSession, tmp_path: Path
) -> None:
    link = await sign_in(control, browser)
    await control.submit(request("task-2", num_samples=1))
    assert await status_of(browser, "DELETE", "/v1/tasks/task-2", headers={"Origin": control.url}) == 200
    assert (await control.task("task-2")).status == "cancelled"
    written = "".join(path.read_text() for path in (tmp_path / "server").rglob("actions*") if path.is_file())
    actions = [json.loads(line) for line in written.splitlines()]
    assert [one["who"].partition(" ")[0] for one in actions if one["method"] == "DELETE"] == ["page"]
    assert link not in written
    assert "/open/{link}" in written


async def test_annotations_are_added_listed_and_forgotten_with_their_task(
    control: ServerClient, result: SessionResult, browser: aiohttp.ClientSession, tmp_path: Path
) -> None:
    first = await control.annotate("task-1.0", verdict="bad", note="It guessed.", call=1, dataset="guesses")
    await sign_in(control, browser)
    said = {"json": {"note": "<b>"}, "headers": {"Origin": control.url}}
    assert await status_of(browser, "POST", "/v1/sessions/task-1.0/annotations", **said) == 200
    assert await status_of(browser, "POST", "/v1/sessions/none.0/annotations", **said) == 404
    said["json"] = {"verdict": "perfect"}
    assert await status_of(browser, "POST", "/v1/sessions/task-1.0/annotations", **said) == 400
    second, again = (await control.annotations(session_id="task-1.0")).annotations
    assert (again, first.task_id, second.note) == (first, "task-1", "<b>")
    assert second.by.startswith("page ")
    assert [one.note for one in (await control.annotations(dataset="guesses")).annotations] == ["It guessed."]
    assert (await control.annotations(verdict="good")).annotations == ()
    page = await control.annotations(limit=1)
    assert (await control.annotations(limit=1, before=page.next)).annotations == (first,)
    with TaskStore(database_path(tmp_path)) as store:
        assert store.forget(["task-1"]) == 1
        assert store.annotations().annotations == ()


async def test_a_browser_is_told_its_rights(control: ServerClient, browser: aiohttp.ClientSession) -> None:
    for read_only in (True, False):
        await sign_in(control, browser, read_only=read_only)
        async with browser.get("/v1/page/visitor") as answer:
            assert await answer.json() == {"read_only": read_only, "role": "admin", "tenant": "default"}


async def test_a_browser_stays_signed_in_over_a_restart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_dir": tmp_path / "d", "control_token": TOKEN, "check_task": any_plugin}
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        async with serving(**options) as first, ServerClient(first.url, TOKEN) as control:
            path = (await control.page_link()).path
            async with browser.post(first.url + path, headers={"Origin": first.url}) as answer:
                assert answer.status == 200
        async with serving(**options) as second:
            assert await status_of(browser, "GET", second.url + "/v1/status") == 200
        async with serving(**{**options, "control_token": "another"}) as third:
            assert await status_of(browser, "GET", third.url + "/v1/status") == 401


async def read(control: ServerClient, path: str, **params: str) -> Any:
    return json.loads(await control.request("GET", f"{SESSION}/{path}", params=params))


async def test_the_outline_has_chains_calls_and_evidence(control: ServerClient, result: SessionResult) -> None:
    outline = await read(control, "outline")
    assert outline["reward"] == 0.0
    assert outline["reward_details"]["failed"] == ["test_add_negative"]
    assert [file["name"] for file in outline["files"]] == ["evaluator/tests.log", "harness.stdout"]
    assert [chain["calls"] for chain in outline["chains"]] == [[0, 1, 3], [2], [4]]
    helper, split = outline["chains"][1:]
    assert (helper["role"], helper["relation"], helper["origin"]) == ("sub_agent", "spawned", 1)
    assert split["origin"] == 3
    calls = outline["calls"]
    assert [call["tools"] for call in calls] == [["shell"], ["task"], [], ["shell"], []]
    assert calls[4]["certificate"]["cause"] == "bpe_merge"
    assert calls[4]["num_forgotten_ids"] > 0
    assert all(call["masked"] is None and call["trace"] is not None for call in calls)
    assert calls[1]["lowest_logprob"] == -6.5
    assert "prompt_suffix_ids" not in json.dumps(outline)


async def test_messages_are_read_by_ranges_and_long_ones_cut(control: ServerClient, result: SessionResult) -> None:
    contents = await read(control, "calls", first="1", limit="2")
    assert [content["number"] for content in contents] == [1, 2]
    assert contents[0]["new_messages"][0]["parts"][0]["type"] == "tool_result"
    assert contents[0]["response"]["parts"][1]["name"] == "task"
    assert contents[0]["num_cut_chars"] == 0
    assert await read(control, "calls", first="5") == []


async def test_tokens_are_the_recorded_ones_as_json_and_as_columns(
    control: ServerClient, result: SessionResult
) -> None:
    as_json = await read(control, "tokens", first="0", limit="3")
    body = await control.request("GET", f"{SESSION}/tokens", params={"first": "0", "limit": "3"}, accept=COLUMNS)
    columns = decode_columns(body)
    assert {name: column.tolist() for name, column in columns.items()} == as_json
    calls = result.completions[:3]
    ids = np.concatenate([part for call in calls for part in (call.prompt_suffix_ids, call.sampled_ids)])
    np.testing.assert_array_equal(columns["ids"], ids)
    for index, call in enumerate(calls):
        sampled = slice(columns["sampled"][index], columns["starts"][index + 1])
        np.testing.assert_array_equal(columns["logprobs"][sampled], call.logprobs)
        assert columns["mask"][sampled].all()
        assert set(columns["versions"][sampled].tolist()) == {1}
        context = slice(columns["starts"][index], columns["sampled"][index])
        assert not columns["mask"][context].any()
        assert set(columns["versions"][context].tolist()) == {-1}
    texts = {
        token_id: bytes(columns["text"][columns["text_starts"][at] : columns["text_starts"][at + 1]])
        for at, token_id in enumerate(columns["text_ids"].tolist())
    }
    assert texts[int(calls[1].sampled_ids[1])] == b" sign"


async def test_a_kept_file_comes_byte_for_byte_and_never_as_a_page(
    control: ServerClient, browser: aiohttp.ClientSession, result: SessionResult
) -> None:
    await sign_in(control, browser, read_only=True)
    async with browser.get(f"{SESSION}/file", params={"name": "evaluator/tests.log"}) as answer:
        assert await answer.read() == result.artifacts["evaluator/tests.log"]
        assert answer.content_type == "application/octet-stream"
        assert answer.headers["Content-Disposition"] == "attachment"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("sandbox")
    for name in ("../../control_token", "/etc/passwd", ""):
        assert await status_of(browser, "GET", f"{SESSION}/file", params={"name": name}) == 404
