"""One visit by the keyboard alone, at 1280 x 800: the questions that people have of failed sessions, from Now on."""

from __future__ import annotations

import pytest
from playwright.async_api import Locator, expect

from support.page.browser import SIZE, Visit

pytestmark = pytest.mark.asyncio(loop_scope="package")

_MOST_TABS = 80


async def enter(visit: Visit, target: Locator) -> None:
    """Go to a link or button with Tab, and press Enter."""
    await expect(target).to_be_visible()
    for _ in range(_MOST_TABS):
        if await target.evaluate("node => node === document.activeElement"):
            return await visit.keys("Enter")
        await visit.keys("Tab")
    pytest.fail(f"Tab does not lead to {target}")


async def test_six_questions_are_answered_by_the_keyboard(visit: Visit) -> None:
    page = visit.page
    assert page.viewport_size == SIZE

    # Which failures share a cause?
    failures = page.get_by_role("row").filter(has_text="no such model")
    await expect(failures.first).to_contain_text("harness")
    await expect(failures.first.get_by_role("cell").nth(2)).to_have_text("2")
    await enter(visit, page.get_by_role("link", name="task-1", exact=True))

    # How do the samples differ?
    aligned = page.get_by_role("table", name="Samples side by side")
    leaving = aligned.get_by_role("row").nth(1).get_by_role("cell")
    await expect(leaving.nth(0).locator("pre")).to_have_text(" one test fails.", use_inner_text=True)
    await expect(leaving.nth(1).locator("pre")).to_have_text(" all tests pass.", use_inner_text=True)
    await enter(visit, aligned.get_by_role("link", name="sample 0"))

    # Why is this reward 0?
    await expect(page.locator("#call-0")).to_be_visible()
    await visit.keys("e")
    evidence = page.get_by_role("region", name="Reward and evidence")
    await expect(evidence.get_by_role("heading", name="Why is the reward 0?")).to_be_visible()
    await expect(evidence).to_contain_text("FAILED: add(-1, 1) is -2, not 0")
    await visit.keys("e")

    # What did the agent see?
    await expect(page.locator("#call-0")).to_contain_text("Make the tests pass.")

    # What did the tool return?
    await visit.keys("j")
    await expect(page.locator("#call-1")).to_be_focused()
    await expect(page.locator("#call-1")).to_contain_text("return a - b")

    # Which token was unlikely?
    await visit.keys("t")
    await expect(page.get_by_role("application", name="Tokens of call 1")).to_be_focused()
    await visit.keys("u")
    await expect(page.locator("#call-1 .token-line")).to_contain_text(
        "“ sign” · bytes 20 73 69 67 6e · log-prob -6.500"
    )
