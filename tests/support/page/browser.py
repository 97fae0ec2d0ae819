"""Debian's Chromium on a server's page. Everything that must not happen is collected: policy violations, dialogs,
errors of scripts, requests to other hosts."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

from gangline.wire.client.server import ServerClient
from support.requirements import need

__all__ = ["Visit", "chromium", "signed_in"]

SIZE = {"width": 1280, "height": 800}


@dataclass
class Visit:
    """One signed-in browser with one page."""

    page: Page
    url: str
    offences: list[str] = field(default_factory=list)

    async def open(self, part: str) -> None:
        """Go to a part of the page, such as `sessions/task-1.0`."""
        await self.page.goto("about:blank")
        await self.page.goto(f"{self.url}/#/{part}")

    async def keys(self, *keys: str) -> None:
        for key in keys:
            await self.page.keyboard.press(key)


@asynccontextmanager
async def chromium() -> AsyncGenerator[Browser]:
    path = shutil.which("chromium")
    need(path, "Chromium is missing: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def signed_in(browser: Browser, control: ServerClient, *, read_only: bool = False) -> AsyncGenerator[Visit]:
    """A fresh browser profile, signed in by a link. Fails when anything happened that must not."""
    context = await browser.new_context(viewport=SIZE)  # pyright: ignore[reportArgumentType]
    page = await context.new_page()
    visit = Visit(page, control.url)
    await page.add_init_script(
        "addEventListener('securitypolicyviolation', e => console.error('policy', e.violatedDirective, e.blockedURI))"
    )
    page.on("console", lambda message: message.type == "error" and visit.offences.append(_told(message)))
    page.on("pageerror", lambda error: visit.offences.append(str(error)))
    page.on("request", lambda request: _check_host(request.url, visit))

    async def dismiss(dialog: object) -> None:
        visit.offences.append(f"dialog {dialog}")
        await dialog.dismiss()  # type: ignore[attr-defined]

    page.on("dialog", dismiss)
    try:
        link = await control.page_link(read_only=read_only)
        await page.goto(control.url + link.path)
        await page.wait_for_selector("h1")
        yield visit
    finally:
        await context.close()
    if visit.offences:
        pytest.fail(f"the browser complains: {visit.offences}")


def _told(message: ConsoleMessage) -> str:
    """With the address that it is about: of a request that failed the text names none."""
    return f"{message.text} {message.location.get('url', '')}".rstrip()


def _check_host(url: str, visit: Visit) -> None:
    if not url.startswith((visit.url, "about:", "data:", "blob:null")):
        visit.offences.append(f"request to {url}")
