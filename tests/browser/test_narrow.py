"""A session and a task are read on a phone: nothing is squeezed, and the page does not scroll sideways."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from browser.test_accessible import AXE
from browser.test_six_questions import enter
from support.page.browser import Visit
from support.requirements import need

pytestmark = pytest.mark.asyncio(loop_scope="package")

WIDTH = 390


@pytest_asyncio.fixture(loop_scope="package")
async def phone(visit: Visit) -> AsyncGenerator[Visit]:
    await visit.page.set_viewport_size({"width": WIDTH, "height": 844})
    yield visit
    assert await visit.page.evaluate("document.documentElement.scrollWidth") <= WIDTH


async def widths(page: Page, selector: str) -> list[float]:
    return await page.locator(selector).evaluate_all("all => all.map((one) => one.getBoundingClientRect().width)")


async def test_a_session_is_read_at_390_pixels(phone: Visit) -> None:
    page = phone.page
    await phone.open("sessions/task-1.0")
    await expect(page.locator("#call-0")).to_be_in_viewport()
    assert min(await widths(page, "article")) > 340
    assert min(await widths(page, "article pre, article .facts")) > 300
    chains = page.get_by_role("navigation", name="Chains of calls")
    await expect(chains).to_be_hidden()
    unfold = page.get_by_role("button", name="Chains, forks and what can be done")
    await enter(phone, unfold)
    await expect(chains).to_be_visible()
    await expect(page.locator("article").first).to_be_in_viewport()
    await chains.get_by_role("button", name="sub-agent").press("Enter")
    await expect(page.locator("#call-2")).to_be_visible()
    await unfold.press("Enter")
    await expect(chains).to_be_hidden()
    await phone.keys("t")
    await expect(page.locator("#call-2 .token-line")).to_contain_text("sampled")
    assert min(await widths(page, "#call-2 .strip-rows")) > 300
    await phone.keys("e")
    await expect(page.get_by_role("region", name="Reward and evidence")).to_contain_text("test_add_negative")
    assert min(await widths(page, ".evidence > dl > dd")) > 300


@pytest.mark.parametrize("part", ["sessions/task-1.0", "sessions/broken.0", "tasks/task-1"])
async def test_axe_finds_nothing_at_390_pixels(phone: Visit, part: str) -> None:
    need(AXE.is_file(), "axe-core is missing: make web/node_modules/.ready")
    await phone.open(part)
    await expect(phone.page.locator("article, .evidence, .aligned").first).to_be_visible()
    await phone.page.evaluate(AXE.read_text())
    found = await phone.page.evaluate("axe.run()")
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]] == []


async def test_a_task_scrolls_its_tables_and_not_the_page(phone: Visit) -> None:
    await phone.open("tasks/task-1")
    await expect(phone.page.get_by_role("table", name="Samples side by side")).to_be_visible()
    assert await phone.page.locator("main").evaluate("main => main.scrollWidth - main.clientWidth") <= 0
    assert min(await widths(phone.page, "table")) >= 640
