"""A running session is followed: each recorded call appears, with its tokens, without loading again."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import expect

from browser.conftest import TOKEN
from gangline.wire.client.server import ServerClient
from support.page.browser import Visit
from support.page.running import stepped_session

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_calls_and_their_tokens_appear_while_the_agent_works(
    visit: Visit, control: ServerClient, tmp_path: Path
) -> None:
    async with stepped_session(control, TOKEN, tmp_path, "running") as session:
        await visit.page.get_by_role("link", name=session.session_id, exact=True).first.press("Enter")
        page = visit.page
        await expect(page.locator("#call-0")).to_contain_text("I wait 0.")
        await expect(page.locator("#call-0 .token-line")).to_contain_text("sampled")
        session.step()
        await expect(page.locator("#call-1")).to_contain_text("I wait 1.")
        await expect(page.locator("#call-1 .token-line")).to_contain_text("sampled")
        await expect(page.locator("#call-1")).to_be_in_viewport()
        await visit.keys("f", "k")
        await expect(page.locator("#call-0")).to_be_focused()
        session.step()
        await expect(page.locator(".verdict")).to_contain_text("completed")
        await expect(page.locator("#call-2")).to_contain_text("Everything is done.")
        await session.result()
