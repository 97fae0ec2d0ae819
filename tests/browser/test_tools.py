"""The tools that a request offered are read at its call, and whether the model was shown them."""

from __future__ import annotations

import msgspec
import pytest
from playwright.async_api import expect

from browser.conftest import add_session
from browser.test_six_questions import enter
from gangline.domain.conversation import Message, Text, ToolDefinition
from gangline.domain.unshown import TOOLS
from gangline.wire.client.server import ServerClient
from support.page.browser import Visit
from support.page.sessions import Talk

pytestmark = pytest.mark.asyncio(loop_scope="package")

LISTING = ToolDefinition("list_files", "List the <b>files</b>.\nSorted by name.", {"properties": {"folder": {}}})
PATCH = ToolDefinition("apply_patch", None, kind="custom", grammar={"syntax": "lark"})


def talk_with_tools(*, shown: bool) -> Talk:
    talk = Talk()
    first = talk.call((Message("user", (Text("Look."),)),), (Text("I look."),), prompt="Look.", sampled=" I look.")
    talk.call((Message("user", (Text("And?"),)),), (Text("Done."),), prompt=" And?", sampled=" Done.", after=first)
    dropped = () if shown else (TOOLS,)
    talk.calls[0] = msgspec.structs.replace(talk.calls[0], tools=(LISTING, PATCH), dropped=dropped)
    talk.calls[1] = msgspec.structs.replace(talk.calls[1], dropped=dropped)
    return talk


async def test_what_did_this_models_tools_look_like(visit: Visit, control: ServerClient) -> None:
    session_id = await add_session(control, "tools", talk_with_tools(shown=True).result(1.0))
    await visit.open(f"sessions/{session_id}")
    call = visit.page.locator("#call-0")
    await expect(call.get_by_role("button", name="2 tools offered")).to_have_attribute("aria-expanded", "true")
    await enter(visit, call.get_by_role("button", name="list_files: List the <b>files</b>."))
    await expect(call).to_contain_text("Sorted by name.")
    await expect(call.locator("pre").filter(has_text="folder")).to_contain_text('"properties"')
    await enter(visit, call.get_by_role("button", name="apply_patch"))
    await expect(call).to_contain_text('"syntax": "lark"')
    await expect(visit.page.get_by_text("not shown to the model")).to_have_count(0)
    await visit.keys("j")
    later = visit.page.locator("#call-1").get_by_role("button", name="2 tools, as in call 0: list_files, apply_patch")
    await expect(later).to_have_attribute("aria-expanded", "false")
    await enter(visit, later)
    await expect(visit.page.locator("#call-1").get_by_role("button", name="apply_patch")).to_be_visible()


async def test_tools_that_the_template_left_out_are_marked(visit: Visit, control: ServerClient) -> None:
    session_id = await add_session(control, "unshown", talk_with_tools(shown=False).result(1.0))
    await visit.open(f"sessions/{session_id}")
    for number in range(2):
        offered = visit.page.locator(f"#call-{number}").get_by_role("button", name="not shown to the model 2 tools")
        await expect(offered).to_be_visible()
    ended = visit.page.get_by_role("region", name="How the session ended")
    await expect(ended).to_contain_text(
        "the model was not shown its 2 tools (list_files, apply_patch) in 2 of 2 calls; its chat template does not "
        "render them: docs/guides/engines.md#models-whose-template-does-not-render-tools"
    )
