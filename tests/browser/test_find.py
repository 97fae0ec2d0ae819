"""Find by keyboard: words lead to a call, and a search is kept as a link."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.async_api import Route, expect

from support.page.browser import Visit

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_words_lead_to_the_call_that_has_them(visit: Visit) -> None:
    page = visit.page
    await visit.keys("/")
    await expect(page.get_by_label("Words")).to_be_focused()
    await page.keyboard.type('"one test fails"')
    hit = page.get_by_role("row").filter(has_text="task-1.2").get_by_role("link", name="call 4, assistant")
    await expect(hit).to_be_visible()  # the index is made from the first search on, and the page asks again meanwhile
    await expect(page.get_by_role("main")).not_to_contain_text("task-1.1")
    await expect(page).to_have_url(re.compile(r"#/find\?words=%22one\+test\+fails%22$"))  # once it is drawn
    await visit.open(page.url.partition("#/")[2])
    await expect(page.get_by_label("Words")).to_have_value('"one test fails"')
    await hit.press("Enter")
    await expect(page.locator("#call-4")).to_have_attribute("aria-current", "true")


async def test_conditions_are_suggested_from_the_index(visit: Visit) -> None:
    page = visit.page
    await visit.open("find")
    failed = page.get_by_role("row").filter(has_text="broken.0")
    await expect(failed).to_be_visible()
    suggested = "id => [...document.getElementById(id).options].map(option => option.value)"
    assert "harness_error" in await page.evaluate(suggested, "known-cause")
    assert "shell" in await page.evaluate(suggested, "known-harness")
    await page.get_by_role("search").get_by_label("Outcome").select_option("agent error")
    await expect(page.get_by_role("row").filter(has_text="task-1.0")).to_have_count(0)
    await expect(failed).to_be_visible()
    await expect(page).to_have_url(re.compile("outcome=agent_error$"))
    await page.get_by_role("search").get_by_label("Cause").fill("nothing_like_it")
    await expect(page.get_by_role("main")).to_contain_text("0 of ")
    await page.get_by_role("button", name="Drop all conditions").press("Enter")
    await expect(page.get_by_role("row").filter(has_text="task-1.0")).to_be_visible()


async def test_the_results_are_sorted_by_reward(visit: Visit) -> None:
    page = visit.page
    await visit.open("find?task_id=task-1")
    await expect(page.get_by_role("row")).to_have_count(4)
    await page.get_by_role("columnheader", name="reward").get_by_role("button").press("Enter")
    await expect(page.get_by_role("row").nth(1)).to_contain_text("task-1.1")


def answer(num_indexed: int, num_waiting: int) -> dict[str, Any]:
    counts = {"num_indexed": num_indexed, "num_waiting": num_waiting}
    return {"sessions": [], "has_more": False, "known": {}, **counts}


async def test_a_first_search_says_that_it_makes_the_index(visit: Visit) -> None:
    page = visit.page
    answers = [answer(0, 324), answer(200, 124), answer(324, 0)]

    async def answered(route: Route) -> None:
        body = answers[0] if len(answers) == 1 else answers.pop(0)
        await route.fulfill(body=json.dumps(body), content_type="application/json")

    await page.route("**/v1/find?*", answered)
    await visit.open("find")
    status = page.get_by_role("status")
    await expect(status).to_have_text("The first search makes the index: reading 324 sessions into the index ...")
    await expect(status).to_have_text("0 of 200 sessions; reading 124 sessions into the index ...")
    await expect(status).to_have_text("0 of 324 sessions")
    answers[:] = [answer(0, 0)]
    await visit.open("find")
    await expect(page.get_by_role("main")).to_contain_text("No session has ended yet.")
    await page.get_by_role("link", name="Now").press("Enter")
    await expect(page.get_by_role("heading", name="Now")).to_be_visible()
