"""A browser at the door: told how to sign in, and let in by links of other places once it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from playwright.async_api import Browser, expect

from browser.test_accessible import AXE
from gangline.tasks.commands.evals.page import report_page
from gangline.tasks.evals.report import make_report
from gangline.wire.client.server import ServerClient
from support.evals.reports import session_record
from support.page.browser import Visit
from support.requirements import need

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_browser_that_is_not_signed_in_reads_the_command(
    browser: Browser, control: ServerClient, scheme: Literal["light", "dark"]
) -> None:
    need(AXE.is_file(), "axe-core is missing: make web/node_modules/.ready")
    context = await browser.new_context(color_scheme=scheme)
    page = await context.new_page()
    answer = await page.goto(f"{control.url}/#/sessions/task-1.0")
    assert answer is not None
    assert answer.status == 401
    await expect(page.get_by_role("main")).to_contain_text("gangline open prints a link that signs it in")
    await page.evaluate(AXE.read_text())
    found = await page.evaluate("axe.run()")
    assert not found["violations"], json.dumps(found["violations"], indent=1)
    await context.close()


async def test_a_link_from_a_report_on_the_disk_leads_to_its_session(visit: Visit, tmp_path: Path) -> None:
    record = msgspec.structs.replace(session_record("e", "t", 0, 0.0), session_id="task-1.0")
    (tmp_path / "report.html").write_text(report_page(make_report("e", [record], num_samples=1), visit.url))
    page = await visit.page.context.new_page()
    await page.goto(f"file://{tmp_path}/report.html")
    await page.get_by_role("link", name="0", exact=True).click()
    await expect(page.get_by_role("heading", name="task-1.0")).to_be_visible()


async def test_a_link_of_the_terminal_leads_to_its_part(browser: Browser, control: ServerClient) -> None:
    link = await control.page_link()
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"{control.url}{link.path}#/tasks/task-1")
    await expect(page.get_by_role("heading", name="task-1", exact=True)).to_be_visible()
    await context.close()
