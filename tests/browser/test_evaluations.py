"""Evaluations by keyboard: the worst tasks of one, and which tasks got worse since another, down to a session."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Locator, expect

from browser.conftest import add_session
from gangline.wire.client.server import ServerClient
from support.evals.reports import report_of_rewards
from support.page.browser import Visit
from support.page.sessions import working_session

pytestmark = pytest.mark.asyncio(loop_scope="package")

HOSTILE = "<img src=x onerror='window.ran = 1'>\u202e"
BEFORE = report_of_rewards("before", {"sum": (1.0, 1.0), "sort": (1.0, 0.0), "same": (1.0, 1.0), HOSTILE: (1.0, 1.0)})
AFTER = report_of_rewards(
    "after", {"sum": (0.0, 0.0), "sort": (1.0, 1.0), "same": (1.0, 1.0), HOSTILE: (1.0, 0.0625), "new": (None, None)}
)


async def send(control: ServerClient, report: object) -> None:
    await control.request("POST", "/v1/evaluations", body=msgspec.json.encode(report))


@pytest_asyncio.fixture(loop_scope="package")
async def evaluations(control: ServerClient) -> AsyncIterator[None]:
    for report in (BEFORE, AFTER):
        await send(control, report)
    yield


async def enter(visit: Visit, target: Locator) -> None:
    """Go to a link or box with Tab alone."""
    await expect(target).to_be_visible()
    for _ in range(80):
        if await target.evaluate("node => node === document.activeElement"):
            return
        await visit.keys("Tab")
    pytest.fail(f"Tab does not lead to {target}")


async def first_cells(visit: Visit) -> list[str]:
    rows = visit.page.get_by_role("table", name="tasks").locator("tbody tr")
    return [await row.locator("td").first.inner_text() for row in await rows.all()]


async def test_which_tasks_got_worse(visit: Visit, evaluations: None) -> None:
    page = visit.page
    await visit.keys("g", "e")
    link = page.get_by_role("link", name="after", exact=True)
    await enter(visit, link)
    await visit.keys("Enter")
    await expect(page.get_by_role("heading", name="after")).to_be_visible()
    tasks = page.get_by_role("table", name="tasks")
    await expect(tasks).to_contain_text("2 infra_error (node: disk_full)")
    shown = "⟨U+202E⟩"
    assert await first_cells(visit) == ["new", "sum", HOSTILE.replace("\u202e", shown), "sort", "same"]
    figures = page.get_by_role("region", name="Figures")
    await expect(figures).to_contain_text("0.633 ± 0.238")

    chosen = page.get_by_label("Compare with")
    await enter(visit, chosen)
    await page.keyboard.type("before")
    await expect(page.get_by_role("status").filter(has_text="minus")).to_contain_text(
        re.compile(r"after minus before: -0\.242 ± 0\.\d+ over 4 tasks, 95 % interval -\d\.\d+ to \+0\.\d+")
    )
    told = page.get_by_role("main")
    await expect(told).to_contain_text("2 tasks worse, 1 better. 1 tasks count in one of them only")
    assert (await first_cells(visit))[:2] == ["sum", HOSTILE.replace("\u202e", shown)]
    await expect(tasks.get_by_role("row").filter(has_text="sum")).to_contain_text("-1.000")
    await expect(page).to_have_url(re.compile(r"#/evaluations/after-0123456789ab\?with=before-0123456789ab$"))

    only = page.get_by_label("only tasks that differ")
    await enter(visit, only)
    await visit.keys("Space")
    assert await first_cells(visit) == ["sum", HOSTILE.replace("\u202e", shown), "sort"]
    lost = tasks.get_by_role("row").filter(has_text="sum").get_by_role("link", name="sample 1, reward 0")
    await expect(lost).to_have_attribute("href", "#/sessions/after-0123456789ab-sum.1")
    assert await page.evaluate("window.ran") is None


async def test_the_address_leads_to_a_comparison(visit: Visit, evaluations: None) -> None:
    await visit.open("evaluations/before-0123456789ab?with=after-0123456789ab")
    await expect(visit.page.get_by_role("status").filter(has_text="minus")).to_contain_text(
        "before minus after: +0.242"
    )


async def test_the_line_of_its_tasks_leads_to_an_evaluation(
    visit: Visit, control: ServerClient, evaluations: None
) -> None:
    await add_session(control, "after-0123456789ab-000000", working_session("x", reward=0.0))
    await visit.open("")
    await visit.page.get_by_role("link", name="after-0123456789ab", exact=True).press("Enter")
    await expect(visit.page.get_by_role("heading", name="after")).to_be_visible()


async def test_a_running_evaluation_is_followed(visit: Visit, control: ServerClient) -> None:
    half = report_of_rewards("growing", {"a": (1.0,)}, num_left=1)
    await send(control, half)
    await visit.open(f"evaluations/{half.evaluation_id}")
    page = visit.page
    await expect(page.get_by_text("1 tasks have not ended.")).to_be_visible()
    await expect(page.get_by_role("region", name="Figures")).to_contain_text("1 of 2")
    await send(control, report_of_rewards("growing", {"a": (1.0,), "b": (0.0,)}))
    await expect(page.get_by_role("table", name="tasks").get_by_role("row")).to_have_count(3)
    await expect(page.get_by_text("tasks have not ended")).to_have_count(0)


async def test_numbers_are_rounded_as_on_the_terminal(visit: Visit) -> None:
    values = [at / 16 for at in range(-32, 33)] + [at / 7919 for at in range(200)] + [0.0005, 0.41249999, 12.0625]
    folder = await visit.page.evaluate("document.querySelector('script[type=module]').src.replace('main.js', '')")
    shown = await visit.page.evaluate(f"import('{folder}evaluations.js').then(one => {values}.map(one.fixed))")
    assert shown == [f"{value:.3f}" for value in values]


@pytest.mark.parametrize("width", [1280, 1440, 390])
@pytest.mark.parametrize("part", ["", "/after-0123456789ab", "/after-0123456789ab?with=before-0123456789ab"])
async def test_no_name_is_broken_and_the_page_is_as_wide_as_its_window(
    visit: Visit, evaluations: None, width: int, part: str
) -> None:
    await visit.page.set_viewport_size({"width": width, "height": 844})
    await visit.open(f"evaluations{part}")
    await expect(visit.page.locator("table td a").first).to_be_visible()
    wide = await visit.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    tall = await visit.page.evaluate(
        "[...document.querySelectorAll('table td:first-child a, .top a')].map(one => one.getClientRects().length)"
    )
    assert set(tall) == {1}
