"""A session that was saved as one file shows its calls and tokens from the disk, and asks nobody for anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from playwright.async_api import Browser, expect

from gangline.domain.conversation import Message, Text
from gangline.domain.session import SessionResult
from gangline.server.web.outline import open_session
from gangline.server.web.saved import saved_page
from gangline.server.web.tokens import recorded_texts
from support.page.browser import SIZE
from support.page.sessions import Talk, long_session, working_session

pytestmark = pytest.mark.asyncio(loop_scope="package")


def save(path: Path, result: SessionResult) -> int:
    """Bytes of the file."""
    session = open_session(result)
    return path.write_bytes(saved_page(session, {Talk.model: recorded_texts(session.calls)}))


async def test_a_saved_session_is_read_without_a_server(browser: Browser, tmp_path: Path) -> None:
    save(tmp_path / "session.html", working_session())
    context = await browser.new_context(viewport=SIZE, offline=True)  # pyright: ignore[reportArgumentType]
    page = await context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(f"file://{tmp_path}/session.html")
    await expect(page.locator("#call-0")).to_contain_text("Make the tests pass.")
    for key in ("j", "t"):
        await page.keyboard.press(key)
    await expect(page.locator("#call-1 .strip-rows")).to_be_focused()
    await page.keyboard.press("u")
    await expect(page.locator("#call-1 .token-line")).to_contain_text(
        "“ sign” · bytes 20 73 69 67 6e · log-prob -6.500"
    )
    await page.keyboard.press("Escape")
    await page.locator("#call-1").focus()
    for key in ("j", "j", "j", "d"):
        await page.keyboard.press(key)
    await expect(page.get_by_role("region", name="Drift of call 4")).to_contain_text(
        "Rendered by the engine's template"
    )
    await page.keyboard.press("e")
    await expect(page.get_by_role("region", name="Reward and evidence")).to_contain_text("add(-1, 1) is -2, not 0")
    assert complaints == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked), asked
    await context.close()


async def test_hostile_text_ends_no_script_of_the_file(browser: Browser, tmp_path: Path) -> None:
    talk = Talk()
    hostile = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    talk.call((Message("user", (Text(hostile),)),), (Text(hostile),), prompt=hostile, sampled=hostile)
    save(tmp_path / "session.html", talk.result(0.0))
    context = await browser.new_context(viewport=SIZE, offline=True)  # pyright: ignore[reportArgumentType]
    page = await context.new_page()
    await page.goto(f"file://{tmp_path}/session.html")
    await expect(page.locator("#call-0 pre").first).to_have_text(hostile)
    assert await page.evaluate("window.ran") is None
    assert await page.locator("img").count() == 0
    await context.close()


async def test_a_hundred_thousand_tokens_would_be_less_than_5_mb(tmp_path: Path) -> None:
    result = long_session(10, 2000)
    chance = np.random.default_rng(0)
    for call in result.completions:  # as noisy as a model's
        call.logprobs[:] = -chance.exponential(1.0, len(call.logprobs)).astype(np.float32)
    assert save(tmp_path / "session.html", result) < 1_000_000
