"""The parts at the width of a desk, of a large screen and of a phone: nothing is cut off, and axe finds nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import expect

from browser.test_accessible import AXE
from support.page.browser import Visit
from support.requirements import need
from support.training.recorded_runs import write_learning_run

pytestmark = pytest.mark.asyncio(loop_scope="package")

WIDTHS = (1280, 1440, 390)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
PARTS = {
    "now": ("", "table[aria-label=tasks]"),
    "runs": ("runs", "table"),
    "run": ("runs/base?with=fast", ".chart canvas"),
    "find": ("find?words=sign", "table"),
    "a session that is not there": ("sessions/task-1.7", "li"),
    "no part": ("nosuch", "h1"),
}
OVERFLOW = """() => [document.documentElement, document.querySelector("main")]
  .filter(one => one.scrollWidth > one.clientWidth)
  .map(one => `${one.tagName} ${one.scrollWidth} > ${one.clientWidth}`)"""


@pytest.fixture(scope="module", autouse=True)
def runs(data_folder: Path) -> None:
    write_learning_run(data_folder, "base", 20, groups=("task-1", "gone"))
    write_learning_run(data_folder, "fast", 30, learner={"learning_rate": 1e-5})


@pytest.mark.parametrize("part", PARTS)
async def test_no_part_is_cut_off_and_axe_finds_nothing(visit: Visit, part: str) -> None:
    need(AXE.is_file(), "axe-core is missing: make web/node_modules/.ready")
    page = visit.page
    address, shown = PARTS[part]
    await visit.open(address)
    await expect(page.locator(shown).first).to_be_visible()
    for summary in await page.locator("summary").all():
        await summary.click()
    await page.evaluate(AXE.read_text())
    for width in WIDTHS:
        await page.set_viewport_size({"width": width, "height": 800})
        assert await page.evaluate(OVERFLOW) == [], width
        for scheme in SCHEMES:
            await page.emulate_media(color_scheme=scheme)
            found = await page.evaluate("axe.run()")
            told = [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]]
            assert not told, f"{width} {scheme} {json.dumps(told, indent=1)}"
    visit.offences.clear()  # a 404 is logged as an error
