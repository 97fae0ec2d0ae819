"""A session is forked on the page, its forks are found from it, and each is read alongside its parent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from playwright.async_api import Browser, expect

from browser.conftest import TOKEN
from gangline.wire.client.server import ServerClient
from support.page.browser import Visit, signed_in
from support.page.running import stepped_session
from support.page.sessions import working_session
from support.service.running import FakeNode, request

pytestmark = pytest.mark.asyncio(loop_scope="package")

EDIT = "step 1 <b>failed</b>"


async def test_a_turn_is_forked_and_its_fork_is_read_beside_the_parent(
    visit: Visit, control: ServerClient, tmp_path: Path
) -> None:
    page = visit.page
    async with stepped_session(control, TOKEN, tmp_path, "parent") as session:
        session.step()
        session.step()
        assert (await session.result()).outcome == "completed"
        await visit.open(f"sessions/{session.session_id}")
        turn = page.get_by_label("Call 1", exact=True)
        await turn.get_by_role("button", name="fork", exact=True).press("Enter")
        form = page.get_by_role("region", name="Fork behind turn 2")
        await form.get_by_label("Samples").fill("2")
        await form.get_by_label("Temperature").fill("0.5")
        await form.get_by_label("Instead of the newest tool result").press_sequentially(EDIT)
        await form.get_by_role("button", name="Start the forks").press("Enter")
        await page.wait_for_url("**/#/tasks/*")
        task_id = page.url.rpartition("/")[2]
        async with asyncio.timeout(60):
            await control.wait(task_id)
        forks = await control.result(task_id)
    assert [fork.outcome for fork in forks] == ["completed", "completed"]
    task = await control.task(task_id)
    assert (task.request["fork"]["turn"], task.request["fork"]["edit"]) == (2, EDIT)
    assert task.request["capture"]["sampling"]["temperature"]["override"] == 0.5

    await visit.open(f"sessions/{session.session_id}")
    await expect(page.get_by_role("button", name="Beside its parent")).to_have_count(0)
    tree = page.get_by_role("navigation", name="Forks")
    await expect(tree.get_by_role("listitem")).to_have_count(3)
    await expect(tree.get_by_role("link", name=session.session_id)).to_have_attribute("aria-current", "page")
    await expect(tree).to_contain_text("from turn 2, edited, completed")
    await tree.get_by_role("link", name=forks[1].session_id).press("Enter")
    await expect(page.get_by_role("heading", level=1)).to_have_text(forks[1].session_id)
    await page.get_by_role("button", name="Beside its parent").press("Enter")
    beside = page.get_by_role("region", name="Beside its parent")
    await expect(beside).to_contain_text("A fork behind turn 2")
    await expect(beside).to_contain_text(EDIT)
    columns = beside.get_by_role("columnheader")
    await expect(columns).to_have_count(2)
    await expect(columns.nth(0)).to_contain_text(f"parent {session.session_id}")
    await expect(columns.nth(1)).to_contain_text(f"fork {forks[1].session_id}")
    await expect(beside).to_contain_text("Prompted in call 2")
    await expect(beside).not_to_contain_text("call 0")
    await page.set_viewport_size({"width": 480, "height": 800})
    boxes = [await columns.nth(at).bounding_box() for at in range(2)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"], "under each other on a narrow screen"


async def test_a_refusal_is_shown_as_the_server_says_it(visit: Visit, control: ServerClient) -> None:
    await control.submit(request("unforkable", num_samples=1, agent={"harness": "native"}))
    (lease,) = await FakeNode(control).lease()
    result = working_session(lease.session_id)  # its records have no digests of their requests
    await control.post_result(msgspec.structs.replace(result, task_id="unforkable", node_id="n1", fence=lease.fence))
    await visit.open(f"sessions/{lease.session_id}")
    await visit.page.get_by_label("Call 0", exact=True).get_by_role("button", name="fork", exact=True).press("Enter")
    await visit.page.get_by_label("Role whose engine answers").fill(" critic ")
    async with visit.page.expect_request(lambda one: one.method == "POST") as sent:
        await visit.page.get_by_role("button", name="Start the forks").press("Enter")
    assert (await sent.value).post_data_json["engine"] == "critic"
    await expect(visit.page.get_by_role("alert")).to_contain_text(
        "session unforkable.0 is not forkable, because call 1"
    )
    visit.offences.clear()  # the browser reports the refusal as an error of the page


async def test_a_parameter_that_is_no_number_is_refused_before_anything_is_forked(visit: Visit) -> None:
    sent: list[str] = []
    visit.page.on("request", lambda one: sent.append(one.method))
    await visit.open("sessions/task-1.1")
    await visit.page.get_by_label("Call 0", exact=True).get_by_role("button", name="fork", exact=True).press("Enter")
    form = visit.page.get_by_role("region", name="Fork behind turn 1")
    for label, value in (("Temperature", "0,5"), ("Samples", "two")):
        await form.get_by_label(label).fill(value)
        await form.get_by_role("button", name="Start the forks").press("Enter")
        await expect(form.get_by_role("alert")).to_contain_text(
            f"{label} must be a number, such as 1 or 0.5, and is '{value}'"
        )
    assert "POST" not in sent


async def test_a_read_only_page_and_a_running_session_offer_no_fork(
    browser: Browser, control: ServerClient, visit: Visit, tmp_path: Path
) -> None:
    async with signed_in(browser, control, read_only=True) as reader:
        await reader.open("sessions/task-1.1")
        await expect(reader.page.get_by_label("Call 0", exact=True)).to_be_visible()
        await expect(reader.page.get_by_role("button", name="fork", exact=True)).to_have_count(0)
    async with stepped_session(control, TOKEN, tmp_path, "unended") as session:
        await visit.open(f"sessions/{session.session_id}")
        await expect(visit.page.get_by_label("Call 0", exact=True)).to_be_visible()
        await expect(visit.page.get_by_role("button", name="fork", exact=True)).to_have_count(0)
        session.step()
        session.step()
        await session.result()
