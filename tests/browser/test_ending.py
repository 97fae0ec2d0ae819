"""A session opens with what it ended of: the failure, the last words of its program, and the way to its evidence."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from browser.conftest import add_session
from browser.test_six_questions import enter
from gangline.domain.errors import Failure
from gangline.wire.client.server import ServerClient
from support.page.browser import Visit
from support.page.sessions import Talk, working_session
from support.service.running import request

pytestmark = pytest.mark.asyncio(loop_scope="package")

DIED = Failure(boundary="harness", code="harness_error", message="agent ended with exit code 1", retryable=False)
LINES = "".join(f"line {number}\n" for number in range(500))


async def test_what_did_the_failed_session_die_of(visit: Visit, control: ServerClient) -> None:
    died = working_session(reward=0.0)
    changes = {"outcome": "agent_error", "failure": DIED}
    files = {"harness.stdout": b"hello\n", "harness.stderr": f"{LINES}KeyError: <b>'HOME'</b>\n".encode()}
    result = Talk(calls=list(died.completions)).result(None, artifacts=files, **changes)
    session_id = await add_session(control, "died", result)
    await visit.open(f"sessions/{session_id}")
    ended = visit.page.get_by_role("region", name="How the session ended")
    await expect(ended.get_by_role("heading", level=2)).to_have_text("The agent failed. agent error")
    await expect(ended).to_contain_text("failure: harness, agent ended with exit code 1")
    await expect(ended).to_contain_text("End of harness.stderr")
    await expect(ended).to_contain_text("KeyError: <b>'HOME'</b>")
    await expect(ended).not_to_contain_text("line 1\n")
    await expect(visit.page.locator("#call-0")).to_be_visible()  # its calls are below
    await enter(visit, ended.get_by_role("button", name="Why is there no reward?"))
    await expect(visit.page.get_by_role("region", name="Reward and evidence")).to_be_focused()
    await expect(ended).to_contain_text("KeyError")  # whatever is chosen


async def test_a_session_without_calls_shows_why_and_no_empty_list(visit: Visit) -> None:
    await visit.open("sessions/broken.0")
    page = visit.page
    await expect(page.get_by_role("region", name="How the session ended")).to_contain_text("no such model: m0")
    await visit.keys("e")
    await expect(page.get_by_role("heading", name="Why is there no reward?")).to_be_visible()
    main = page.get_by_role("main")
    for empty in ("All 0 calls", "No model call", "0 of 0"):
        await expect(main).not_to_contain_text(empty)
    await expect(page.get_by_role("button", name="Calls", exact=True)).to_have_count(0)


async def test_a_reward_of_0_leads_to_its_reason_and_one_of_1_does_not(visit: Visit) -> None:
    await visit.open("sessions/task-1.0")
    await enter(visit, visit.page.get_by_role("button", name="Why is the reward 0?"))
    await expect(visit.page.get_by_role("heading", name="Why is the reward 0?")).to_be_visible()
    await visit.open("sessions/task-1.1")
    await expect(visit.page.locator("#call-0")).to_be_visible()
    await expect(visit.page.get_by_role("region", name="How the session ended")).to_have_count(0)


async def test_a_session_that_never_ran_says_how_it_ended(visit: Visit, control: ServerClient) -> None:
    await control.submit(request("never", num_samples=1))
    await control.cancel("never")
    await visit.open("sessions/never.0")
    ended = visit.page.get_by_role("region", name="How the session ended")
    await expect(ended.get_by_role("heading", level=2)).to_have_text("The session was cancelled. cancelled")
