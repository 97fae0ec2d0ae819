"""The session part answers, by the keyboard alone: why is the reward 0, what did the agent see, what did the tool
return, which token was unlikely."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from browser.conftest import add_session
from gangline.wire.client.server import ServerClient
from support.page.browser import Visit
from support.page.sessions import long_session

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_why_is_this_reward_0(visit: Visit) -> None:
    await visit.open("sessions/task-1.0")
    await expect(visit.page.locator("#call-0")).to_be_visible()
    await visit.keys("e")
    evidence = visit.page.get_by_role("region", name="Reward and evidence")
    await expect(evidence.get_by_role("heading", name="Why is the reward 0?")).to_be_visible()
    await expect(evidence).to_contain_text("test_add_negative")
    await expect(evidence).to_contain_text("FAILED: add(-1, 1) is -2, not 0")  # the evaluator's own file


async def test_what_did_the_agent_see_and_what_did_the_tool_return(visit: Visit) -> None:
    await visit.open("sessions/task-1.0")
    await expect(visit.page.locator("#call-0")).to_contain_text("Make the tests pass.")
    await visit.keys("j")
    second = visit.page.locator("#call-1")
    await expect(second).to_be_focused()
    await expect(second).to_contain_text("return a - b")
    fold = second.get_by_role("button", name="call task")
    await expect(fold).to_have_attribute("aria-expanded", "false")
    for _ in range(10):
        await visit.keys("Tab")
        if await fold.evaluate("node => node === document.activeElement"):
            break
    await visit.keys("Enter")
    await expect(second).to_contain_text("Say which test of this program fails")


async def test_which_token_was_unlikely(visit: Visit) -> None:
    await visit.open("sessions/task-1.0")
    await expect(visit.page.locator("#call-0")).to_be_visible()
    await visit.keys("j", "t")
    strip = visit.page.get_by_role("application", name="Tokens of call 1")
    await expect(strip).to_be_focused()
    await visit.keys("u")
    line = visit.page.locator("#call-1 .token-line")
    await expect(line).to_contain_text("“ sign” · bytes 20 73 69 67 6e · log-prob -6.500")
    await visit.keys("ArrowRight")
    await expect(line).to_contain_text("“ is”")
    await visit.keys("Home")
    await expect(line).to_contain_text("context 0 · id")


async def test_the_colour_of_tokens_is_on_the_canvas(visit: Visit) -> None:
    await visit.open("sessions/task-1.0")
    await expect(visit.page.locator("#call-0")).to_be_visible()
    await visit.keys("t")
    canvas = visit.page.locator("#call-0 canvas")
    await expect(visit.page.locator("#call-0 .token-line")).to_contain_text("sampled. Colour: log-prob")
    pictures = [await canvas.screenshot()]
    for label in ("mask", "version", "advantage"):
        await visit.keys("c")
        await expect(visit.page.locator("#call-0 .token-line")).to_contain_text(f"Colour: {label}")
        pictures.append(await canvas.screenshot())
    assert len(set(pictures)) == len(pictures)


async def test_chains_show_the_sub_agent_and_the_split(visit: Visit) -> None:
    await visit.open("sessions/task-1.0")
    tree = visit.page.get_by_role("navigation", name="Chains of calls")
    await expect(tree.get_by_role("button")).to_have_count(4)
    await visit.keys("]", "]")
    await expect(tree.get_by_role("button", name="sub-agent")).to_have_attribute("aria-pressed", "true")
    await expect(visit.page.get_by_role("article")).to_have_count(1)
    await expect(visit.page.locator("#call-2")).to_contain_text("add subtracts")
    await visit.keys("]")
    await expect(visit.page.locator("#call-4")).to_contain_text("does not continue call 3 at id 9: bpe_merge")


async def test_how_a_call_departs_from_the_one_before(visit: Visit) -> None:
    await visit.open("sessions/task-1.0?call=4")
    call = visit.page.locator("#call-4")
    await expect(call).to_have_attribute("aria-current", "true")
    await visit.keys("d")
    drift = call.get_by_role("region", name="Drift of call 4")
    await expect(drift.get_by_role("heading", name="Cause: bpe merge")).to_be_visible()
    await expect(drift).to_contain_text("1 failed: test_add_negative")  # sent by the harness
    await expect(drift).to_contain_text("Token 9 of 55, prompted in call 0")
    await expect(drift).to_contain_text("Nothing was stitched: the engine was sent messages.")
    headings = drift.get_by_role("heading", level=4)
    await expect(headings).to_have_text(
        ["Recorded up to call 3, what stitching keeps", "Rendered by the engine's template for call 4"]
    )
    await expect(drift.locator(".ids")).to_have_count(2)
    await visit.keys("d")
    await expect(drift).to_have_count(0)
    await visit.keys("k", "d")
    await expect(visit.page.get_by_role("region", name="Drift")).to_have_count(0)  # an exact call has none


async def test_a_session_that_is_not_there_is_a_sentence(visit: Visit) -> None:
    await visit.open("sessions/none.0")
    await expect(visit.page.get_by_role("alert")).to_contain_text("none.0")
    visit.offences.clear()  # the browser logs the 404 as an error


async def test_a_call_that_is_out_of_view_is_brought_into_it(visit: Visit, control: ServerClient) -> None:
    session_id = await add_session(control, "far", long_session(40, 400))
    await visit.open(f"sessions/{session_id}?call=30")
    await expect(visit.page.locator("#call-30")).to_be_in_viewport()
    await visit.keys("t")
    await expect(visit.page.locator("#call-30 .token-line")).to_contain_text("80 sampled")
    await visit.keys("j", "j", "j")
    await expect(visit.page.locator("#call-33")).to_be_focused()
    await expect(visit.page.locator("#call-33")).to_be_in_viewport()
