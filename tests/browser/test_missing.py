"""What is not there says so, names what is like it, and leads on; a service without tasks says how to make one."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from browser.conftest import TOKEN
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from support.page.browser import Visit, signed_in
from support.service.running import any_plugin

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize(
    ("address", "said", "near"),
    [
        ("sessions/task-1.7", "no session 'task-1.7'", "task-1.1"),
        ("sessions/taks-1.1", "no session 'taks-1.1'", "task-1.1"),
        ("tasks/task_1", "no task 'task_1'", "task-1"),
        ("tasks/brokn", "no task 'brokn'", "broken"),
    ],
)
async def test_the_nearest_names_are_suggested(visit: Visit, address: str, said: str, near: str) -> None:
    page = visit.page
    await visit.open(address)
    await expect(page.get_by_role("alert")).to_contain_text(said)
    for name in ("Now", "Find", "Runs"):
        await expect(page.get_by_role("main").get_by_role("link", name=name, exact=True)).to_be_visible()
    await page.get_by_role("listitem").get_by_role("link", name=near, exact=True).press("Enter")
    await expect(page.get_by_role("heading", name=near, exact=True)).to_be_visible()
    visit.offences.clear()  # the browser logs the 404 as an error


@pytest.mark.parametrize("address", ["nosuch", "nosuch/task-1", "%E0%A4%A", "<img src=x>"])
async def test_an_address_that_leads_nowhere_leads_on(visit: Visit, address: str) -> None:
    page = visit.page
    await visit.open(address)
    await expect(page.get_by_role("heading", name="Nothing is at this address")).to_be_visible()
    await page.get_by_role("main").get_by_role("link", name="Now").press("Enter")
    await expect(page.get_by_role("heading", name="Now")).to_be_visible()


@pytest.mark.parametrize("address", ["tasks/%E0%A4%A", "sessions/", "tasks", "sessions/..%2F..", "runs/%00"])
async def test_a_name_that_cannot_be_is_no_empty_page(visit: Visit, address: str) -> None:
    await visit.open(address)
    await expect(visit.page.get_by_role("alert")).not_to_be_empty()
    await expect(visit.page.get_by_role("main").get_by_role("link", name="Find")).to_be_visible()
    visit.offences.clear()


async def test_a_service_without_tasks_says_how_to_make_one(browser: Browser, tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token=TOKEN, check_task=any_plugin) as server,
        ServerClient(server.url, TOKEN) as client,
        signed_in(browser, client) as visit,
    ):
        main = visit.page.get_by_role("main")
        await expect(main).to_contain_text("gangline submit my-agent/task.json --wait")
        await expect(main).to_contain_text("No node has joined, so sessions wait.")
        await visit.keys("g", "r")
        await expect(main).to_contain_text("gangline train run SPEC")
