"""Text of agents and tools runs nothing, moves nothing and hides nothing, in every place where the page shows some.

GANGLINE_TRANSCRIPTS sets how many transcripts are generated; GANGLINE_TRANSCRIPT_SEED repeats a run.
"""

from __future__ import annotations

import os
import random

import pytest
from playwright.async_api import Page, expect

from browser.conftest import add_session
from gangline.domain.conversation import Image, Message, Text, Thinking, ToolCall, ToolResult
from gangline.domain.errors import Failure
from gangline.domain.session import SessionResult
from gangline.wire.client.server import ServerClient
from support.page.browser import SIZE, Visit
from support.page.sessions import Talk

pytestmark = pytest.mark.asyncio(loop_scope="package")

NUM_TRANSCRIPTS = int(os.environ.get("GANGLINE_TRANSCRIPTS", "200"))
SEED = int(os.environ.get("GANGLINE_TRANSCRIPT_SEED", "0"))
PER_SESSION = 300

FRAGMENTS = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload=window.ran=1><animate onbegin=window.ran=1 attributeName=x dur=1s>",
    "<svg><foreignObject><iframe srcdoc='<script>parent.ran=1</script>'></iframe></foreignObject></svg>",
    "<iframe src='javascript:parent.ran=1'></iframe>",
    "<a href='javascript:window.ran=1' autofocus onfocus=window.ran=1 tabindex=1>x</a>",
    "<style>* { display: none !important }</style><link rel=stylesheet href=//evil.test/x.css>",
    "<base href=//evil.test/><form action=//evil.test><button autofocus>",
    "<meta http-equiv=refresh content='0;url=//evil.test'>",
    "</pre></article></main></body></html>",
    "<!--", "-->", "]]>", "<![CDATA[", "<plaintext>", "<textarea>", "<template>", "<math><mtext><mglyph>",
    "${window.ran = 1}", "{{constructor.constructor('window.ran=1')()}}", "`;window.ran=1;`", "__proto__",
    "'\"><script src=//evil.test/x.js></script>", "&lt;script&gt;", "&#60;script&#62;",
    "\x1b[2J\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b]8;;http://evil.test\x07link\x1b]8;;\x07", "\x9b31m", "\x00\x01\x7f",
    "\r\rover\b\b\b", "\u202eoverride\u202c", "\u2066isolate\u2067right\u2069", "\u061c\u200f\u200e", "\u2028\u2029",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627", "\u200b\u200c\u200d\ufeff\u00ad",
    "Z\u0351\u036b\u0343\u036a\u0302" * 40,
    "\U000e0001\U000e0041\U000e007f", "\u115f\u3164\uffa0", "👩‍👩‍👧‍👦🏴‍☠️", "\ufdfd" * 20, "\u0e47" * 300,
    "x" * 4000, "w" * 50 + " " * 3000 + "end", "\t" * 500, "\n" * 400, "💥" * 1500, "W\u0336" * 800,
)  # fmt: skip


def hostile(chance: random.Random, most: int = 4) -> str:
    return "".join(chance.choice(FRAGMENTS) for _ in range(chance.randint(1, most)))


def hostile_session(chance: random.Random, num_calls: int) -> SessionResult:
    """One hostile text in each place of each call."""
    talk = Talk()
    before = None
    for number in range(num_calls):
        words = hostile(chance, 2)
        news = (
            Message(chance.choice(["user", "system", "developer"]), (Text(hostile(chance)), Image(hostile(chance, 1)))),
            Message("tool", (ToolResult(hostile(chance, 1), (Text(hostile(chance)),), chance.random() < 0.5),)),
        )
        arguments = chance.choice([hostile(chance), '{"a": "<script>window.ran = 1</script>"}'])
        reply = (Thinking(hostile(chance)), Text(hostile(chance)), ToolCall("id", hostile(chance, 1), arguments))
        before = talk.call(news, reply, prompt=words, sampled=f"{words}{number} ", after=before)
    failure = Failure(boundary="harness", code="harness_error", message=hostile(chance), retryable=False)
    files = {hostile(chance, 1)[:200] or "x": hostile(chance).encode() for _ in range(8)}
    details = {hostile(chance, 1): hostile(chance), "list": [hostile(chance), {hostile(chance, 1): None}]}
    return talk.result(0.0, outcome="agent_error", failure=failure, artifacts=files, reward_details=details)


async def looked_through(page: Page) -> int:
    """Scroll through the whole part, open every fold in view. Returns the number of calls that were seen."""
    return await page.evaluate("""async () => {
        const scroller = document.querySelector(".scroller");
        const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        const seen = new Set();
        for (let idle = 0; idle < 12;) {
            const rows = () => [...document.querySelectorAll("article")];
            while (!rows().every((row) => row.querySelector(".part"))) await frame();  // their messages are on the way
            for (const row of rows()) {
                seen.add(row.id);
                for (const fold of row.querySelectorAll(".fold[aria-expanded=false]")) fold.click();
            }
            await frame();
            const before = scroller.scrollTop;
            scroller.scrollTop += scroller.clientHeight * 0.8;
            await frame();
            idle = scroller.scrollTop === before ? idle + 1 : 0;
        }
        return seen.size;
    }""")


async def check_layout(page: Page) -> None:
    ran, title, widths = await page.evaluate("""() => [window.ran, document.title,
        [document.documentElement, document.querySelector(".scroller")]
            .map((one) => one.scrollWidth - one.clientWidth)]""")
    assert ran is None
    assert title.endswith("Gangline")
    assert widths == [0, 0]
    top = await page.locator("header.top").bounding_box()
    assert top is not None
    assert (top["x"], top["y"], top["width"]) == (0, 0, SIZE["width"])
    assert await page.locator("script[src*=evil], iframe, svg, style, base, form, img, template, math").count() == 0


async def test_hostile_transcripts_run_nothing_and_break_no_layout(visit: Visit, control: ServerClient) -> None:
    chance = random.Random(SEED)
    for start in range(0, NUM_TRANSCRIPTS, PER_SESSION):
        num_calls = min(PER_SESSION, NUM_TRANSCRIPTS - start)
        session_id = await add_session(control, f"hostile-{start}", hostile_session(chance, num_calls))
        await visit.open(f"sessions/{session_id}")
        await expect(visit.page.locator("#call-0 .part").first).to_be_attached()
        assert await looked_through(visit.page) == num_calls
        await check_layout(visit.page)
        await visit.keys("t", "e")
        await expect(visit.page.get_by_role("region", name="Reward and evidence")).to_be_visible()
        await check_layout(visit.page)
        await visit.open("")
        await expect(visit.page.get_by_role("link", name=session_id).first).to_be_visible()
        assert await visit.page.evaluate("window.ran") is None


async def test_what_would_be_invisible_is_seen(visit: Visit, control: ServerClient) -> None:
    talk = Talk()
    shown = "a\u202eb\x1b[31mc\u200bd"
    talk.call((Message("user", (Text(shown),)),), (Text("x"),), prompt="p", sampled="s\u202e\x07")
    session_id = await add_session(control, "invisible", talk.result(1.0))
    await visit.open(f"sessions/{session_id}")
    await expect(visit.page.locator("pre").first).to_have_text("a⟨U+202E⟩b␛[31mc⟨U+200B⟩d")
    await visit.keys("t")
    await expect(visit.page.get_by_role("application", name="Tokens of call 0")).to_be_focused()
    await visit.keys("End")
    await expect(visit.page.locator(".token-line")).to_contain_text("“s⟨U+202E⟩␇”")


async def test_a_line_of_ten_megabytes_is_folded(visit: Visit, control: ServerClient) -> None:
    talk = Talk()
    talk.call((Message("user", (Text("long " * 2_000_000),)),), (Text("x"),), prompt="p", sampled="s")
    session_id = await add_session(control, "huge", talk.result(1.0))
    await visit.open(f"sessions/{session_id}")
    await expect(visit.page.locator("#call-0")).to_contain_text("9,800,000 characters are left out")
    await visit.page.get_by_role("button", name="more characters").click()
    await check_layout(visit.page)
