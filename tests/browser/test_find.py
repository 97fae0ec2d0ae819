"""Find by keyboard: words lead to a call, and a search is kept as a link."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from support.page.browser import Visit

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_words_lead_to_the_call_that_has_them(visit: Visit) -> None:
    page = visit.page
    await visit.keys("/")
    await expect(page.get_by_label("Words")).to_be_focused()
    await page.keyboard.type('"one test fails"')
    hit = page.get_by_role("listitem").filter(has_text="task-1.2").get_by_role("link", name="call 4, assistant")
    while await hit.count() == 0:  # the index is made from the first search on
        await page.get_by_label("to", exact=True).fill("0.5")
        await page.wait_for_timeout(300)
        await page.get_by_label("to", exact=True).fill("")
    await expect(page.get_by_role("main")).not_to_contain_text("task-1.1")
    await expect(page).to_have_url(re.compile(r"#/find\?words=%22one\+test\+fails%22$"))  # once it is drawn
    await visit.open(page.url.partition("#/")[2])
    await expect(page.get_by_label("Words")).to_have_value('"one test fails"')
    await hit.press("Enter")
    await expect(page.locator("#call-4")).to_have_attribute("aria-current", "true")
