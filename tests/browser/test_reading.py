"""A long session is read without what repeats, and each colour of a strip is explained where it is chosen."""

from __future__ import annotations

import msgspec
import pytest
from playwright.async_api import expect

from browser.conftest import add_session
from browser.test_six_questions import enter
from gangline.domain.conversation import Message, Text, ToolCall
from gangline.wire.client.server import ServerClient
from support.page.browser import Visit
from support.page.sessions import Talk

pytestmark = pytest.mark.asyncio(loop_scope="package")

RULES = "These are the rules of the house. " * 10
NOTE = "<system-reminder>Nobody wrote this.</system-reminder>"
CALL = ToolCall("call-1", "shell", '{"command": "ls"}')


def user(*texts: str) -> tuple[Message, ...]:
    return (Message("user", tuple(map(Text, texts))),)


def spoken() -> Talk:
    talk = Talk()
    talk.call(user(NOTE, RULES, "Look."), (Text("\n\n"), CALL), prompt="Look.", sampled=" ls")
    talk.call(user(RULES, "Again."), (Text("I see."),), prompt="Again.", sampled=" I see.", branch="other")
    words = "".join(f" word{number}" for number in range(4100))
    talk.call(user(words, "In short?"), (Text(" \n"),), prompt=words, sampled=" ", branch="long")
    return talk


async def test_what_repeats_and_what_is_blank_is_out_of_the_way(visit: Visit, control: ServerClient) -> None:
    session_id = await add_session(control, "spoken", spoken().result(1.0))
    await visit.open(f"sessions/{session_id}")
    first, second, third = (visit.page.locator(f"#call-{number}") for number in range(3))
    await expect(first).to_contain_text("Look.")
    note = first.get_by_role("button", name="user: <system-reminder>Nobody wrote this.")
    await expect(note).to_have_attribute("aria-expanded", "false")
    await expect(first.locator("pre").first).to_contain_text("These are the rules")
    await expect(first.get_by_role("button", name="assistant")).to_have_count(0)  # it only called a tool
    await expect(first.get_by_role("button", name="call shell")).to_be_visible()
    rules = second.get_by_role("button", name="user, as before: These are the rules")
    await expect(rules).to_have_attribute("aria-expanded", "false")
    await expect(second.locator("pre").first).to_have_text("Again.")
    await enter(visit, rules)
    await expect(second.locator("pre").first).to_contain_text("These are the rules")
    await expect(third.get_by_role("button", name="user: word0 word1")).to_have_attribute("aria-expanded", "false")
    await expect(third.locator("pre")).to_have_text(["In short?"])
    await expect(third).to_contain_text("assistant: no text")


async def test_colours_are_chosen_and_explained_at_the_strip(visit: Visit) -> None:
    await visit.open("sessions/task-1.0")
    await expect(visit.page.locator("#call-0")).to_be_visible()
    await expect(visit.page.get_by_role("button", name="log-prob", exact=True)).to_have_count(0)
    await visit.keys("t")
    call = visit.page.locator("#call-0")
    colours = call.get_by_role("list", name="Colours")
    await expect(colours).to_contain_text("chance of a sampled token: 100 % 50 % 10 % 1 % 0.1 %")
    await call.get_by_role("button", name="mask", exact=True).press("Enter")
    await expect(colours).to_contain_text("trained on")
    await call.get_by_role("button", name="version", exact=True).press("Enter")
    await expect(colours).to_contain_text("version 1")
    await expect(call.get_by_role("button", name="version", exact=True)).to_have_attribute("aria-pressed", "true")


async def test_ids_are_explained_where_no_text_is_known(visit: Visit, control: ServerClient) -> None:
    talk = Talk()
    call = talk.call(user("Hi."), (Text("Ho."),), prompt="Hi.", sampled=" Ho.")
    talk.calls[0] = msgspec.structs.replace(call, sampled_texts=())
    session_id = await add_session(control, "unread", talk.result(1.0))
    await visit.open(f"sessions/{session_id}")
    await expect(visit.page.locator("#call-0")).to_be_visible()
    await visit.keys("t")
    await expect(visit.page.locator("#call-0 .token-line")).to_contain_text("Ids are shown: no connected engine has")
