"""Training runs: curves, the groups behind a step down to a session, and two runs alongside each other, by keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree

import msgspec
import pytest
from playwright.async_api import expect

from gangline.train.runs.log import RunLog
from support.page.browser import Visit
from support.training.fakes import step_record
from support.training.recorded_runs import write_learning_run

pytestmark = pytest.mark.asyncio(loop_scope="package")


IS_BLANK = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.every(one => one === 0);
}"""


@pytest.fixture
def runs(data_folder: Path) -> Iterator[Path]:
    """Two runs: one with a group that the server has, one with another learning rate."""
    write_learning_run(data_folder, "base", 20, groups=("task-1", "gone"))
    write_learning_run(data_folder, "fast", 30, learner={"learning_rate": 1e-5})
    yield data_folder / "runs"
    rmtree(data_folder / "runs")


async def test_from_a_run_over_a_step_and_its_group_to_a_session(runs: Path, visit: Visit) -> None:
    page = visit.page
    await visit.keys("g", "r")
    row = page.get_by_role("row").filter(has_text="base")
    await expect(row).to_contain_text("20 of 20")
    await expect(row).to_contain_text("0 to 0.5")
    await row.get_by_role("link", name="base").press("Enter")
    charts = page.get_by_role("figure")
    await expect(charts).to_have_count(9)
    await expect(charts.filter(has_text="Weight update in")).to_contain_text("load 0.2")
    await expect(charts.filter(has_text="Reward")).to_contain_text("trained 0.8")
    await expect(charts.filter(has_text="Entropy")).to_contain_text("mean 0.5")
    await expect(page.locator(".chart canvas")).to_have_count(9)
    for _ in range(10):
        await visit.keys("k")
    await expect(page.get_by_role("heading", name="Step 10, version 10")).to_be_visible()
    await expect(charts.filter(has_text="Reward")).to_contain_text("trained 0.5")
    await expect(charts.filter(has_text="Clipped share")).to_contain_text("high 0.01")
    await expect(page).to_have_url(re.compile(r"#/runs/base\?step=10$"))
    await expect(page.get_by_role("row").filter(has_text="gone")).to_contain_text("does not have the task")
    await page.get_by_role("link", name="sample 1, reward 1").press("Enter")
    await expect(page.get_by_role("heading", name="task-1.1")).to_be_visible()


async def test_the_curve_is_on_the_canvas_and_a_click_chooses_a_step(runs: Path, visit: Visit) -> None:
    await visit.open("runs/base")
    plot = visit.page.locator(".chart .u-over").first
    await expect(plot).to_be_visible()
    assert not await visit.page.locator(".chart canvas").first.evaluate(IS_BLANK)
    box = await plot.bounding_box()
    assert box is not None
    await plot.click(position={"x": box["width"] / 2, "y": 20})
    await expect(visit.page.get_by_role("heading", name="Step 10,")).to_be_visible()


async def test_two_runs_are_compared(runs: Path, visit: Visit) -> None:
    page = visit.page
    await visit.open("runs/base")
    await page.get_by_label("Compare with").select_option("fast")
    await expect(page.get_by_role("status")).to_contain_text("On 40 held-out tasks fast has 0 ± 0 against base.")
    settings = page.get_by_role("table", name="Settings that differ").get_by_role("row")
    await expect(settings.filter(has_text="learner.learning_rate")).to_contain_text("0.00001")
    await expect(page.get_by_role("figure").filter(has_text="Reward")).to_contain_text("fast trained")
    await expect(page).to_have_url(re.compile(r"#/runs/base\?with=fast$"))


async def test_what_a_run_does_not_record_is_said(runs: Path, visit: Visit) -> None:
    page = visit.page
    folder = write_learning_run(runs.parent, "plain", 2)
    (folder / "metrics.jsonl").unlink()
    log = RunLog(folder)
    log.write(msgspec.structs.replace(step_record(), learner={}))
    await visit.open("runs/plain")
    await expect(page.get_by_role("figure").filter(has_text="Entropy")).to_contain_text("The run does not record it.")
    await expect(page.get_by_role("main")).to_contain_text("The record does not name its groups")
    await visit.open("runs/none")
    await expect(page.get_by_role("alert")).to_contain_text("there is no run 'none'")
    visit.offences.clear()  # the browser logs the 404 as an error
