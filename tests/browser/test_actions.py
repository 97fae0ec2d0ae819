"""What can be done on the page, by keyboard, and that a read-only page offers none of it."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, expect

from gangline.wire.client.server import ServerClient
from support.page.browser import Visit, signed_in
from support.service.running import FakeNode, request

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_a_session_is_annotated(visit: Visit, control: ServerClient) -> None:
    await visit.open("sessions/task-1.1")
    page = visit.page
    await page.get_by_role("button", name="Annotate").press("Enter")
    await page.get_by_role("button", name="bad", exact=True).press("Enter")
    await page.get_by_label("Note").fill("It <b>guessed</b>.")
    await page.get_by_label("Dataset").fill("guesses")
    await page.get_by_label("Dataset").press("Enter")
    await expect(page.get_by_role("region", name="Annotations")).to_contain_text("bad, in guesses: It <b>guessed</b>.")
    (annotation,) = (await control.annotations(session_id="task-1.1")).annotations
    assert (annotation.verdict, annotation.dataset, annotation.call) == ("bad", "guesses", None)


async def test_a_task_is_cancelled_by_two_presses(visit: Visit, control: ServerClient) -> None:
    await control.submit(request("unwanted", num_samples=1))
    await visit.open("tasks/unwanted")
    await visit.page.get_by_role("button", name="Cancel the task").press("Enter")
    assert (await control.task("unwanted")).status == "queued"
    await visit.page.get_by_role("button", name="Really cancel?").press("Enter")
    await expect(visit.page.get_by_role("main")).to_contain_text("cancelled, 0 of 1 sessions open")


async def test_a_result_is_saved(visit: Visit) -> None:
    await visit.open("sessions/task-1.1")
    async with visit.page.expect_download() as download:
        await visit.page.get_by_role("link", name="Save as JSON").press("Enter")
    saved = await download.value
    assert saved.suggested_filename == "task-1.1.json"


async def test_a_read_only_page_offers_no_change(browser: Browser, control: ServerClient) -> None:
    await control.submit(request("kept", num_samples=1))
    async with signed_in(browser, control, read_only=True) as visit:
        await visit.open("sessions/task-1.1")
        await expect(visit.page.get_by_role("link", name="Save as JSON")).to_be_visible()
        await expect(visit.page.get_by_role("button", name="Annotate")).to_have_count(0)
        await visit.open("tasks/kept")
        await expect(visit.page.get_by_role("button", name="Copy as curl")).to_be_visible()
        await expect(visit.page.get_by_role("button", name="Cancel the task")).to_have_count(0)
        refused = await visit.page.evaluate("fetch('/v1/tasks/kept', {method: 'DELETE'}).then(a => a.status)")
        assert refused == 403
        visit.offences.clear()  # the browser reports the refusal as an error of the page
    assert (await control.task("kept")).status == "queued"
    await FakeNode(control).finish(await FakeNode(control).lease())
