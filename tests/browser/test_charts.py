"""Charts are honest: their axes, the spread of what was measured, and which step a number is of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from playwright.async_api import expect

from support.page.browser import Visit
from support.training.recorded_runs import write_learning_run

pytestmark = pytest.mark.asyncio(loop_scope="package")

MODULE = """async ([name, call, arguments]) => {
  const main = document.querySelector("script[type=module]").src;
  const module = await import(new URL(`./${name}.js`, main).href);
  return module[call](...arguments);
}"""
AXES: list[tuple[list[float | None], str | None, tuple[float, float]]] = [
    ([0, 0, 0], "share", (0, 1)),
    ([0.01, 0.02], "share", (0, 1)),
    ([0.4, 0.6], "reward", (0, 1)),
    ([0, 1], "reward", (0, 1)),
    ([None, 0.5, None], "reward", (0, 1)),
    ([], "reward", (0, 1)),
    ([0, 0], None, (0, 1)),
    ([], None, (0, 1)),
    ([None], None, (0, 1)),
    ([5, 5], None, (0, 10)),
    ([-0.002, -0.002], None, (-0.004, 0)),
    ([0, 10], None, (0, 10.6)),
    ([4, 10], None, (0, 10.36)),
    ([-10, 0], None, (-10.6, 0)),
    ([100, 110], None, (99.4, 110.6)),
    ([-1, 1], "reward", (-1.12, 1.12)),
    ([0, 2], "reward", (0, 2.12)),
    ([0, 100], "share", (0, 106)),
]


async def called(visit: Visit, name: str, call: str, *arguments: Any) -> Any:
    return await visit.page.evaluate(MODULE, [name, call, list(arguments)])


async def test_an_axis_shows_where_values_lie_between_their_bounds(visit: Visit) -> None:
    for values, kind, expected in AXES:
        found = await called(visit, "axis", "axisOf", [{"values": values}], kind)
        assert found == pytest.approx(expected), (values, kind)
    spread = await called(visit, "axis", "axisOf", [{"values": [100], "errors": [10]}], None)
    assert spread == pytest.approx((88.8, 111.2)), "an error bar is within the chart"


async def test_two_measurements_are_not_joined(visit: Visit) -> None:
    line = {"points": True, "steps": [0, 5], "values": [0.1, 0.4], "errors": [0.05, None]}
    assert await called(visit, "axis", "isJoined", line) is False
    assert await called(visit, "axis", "isJoined", line | {"values": [0.1, 0.2, 0.4]}) is True
    assert await called(visit, "axis", "isJoined", line | {"points": False}) is True
    assert await called(visit, "axis", "valueAt", line, 3) == {"value": 0.1, "error": 0.05, "step": 0}
    assert await called(visit, "axis", "valueAt", line, 5) == {"value": 0.4, "error": None, "step": 5}


async def test_rates_and_gains_of_a_run(visit: Visit) -> None:
    ends = {"agent_timeout": 1, "token_limit (context_full)": 2, "agent_error (harness_error)": 1, "no_model_call": 1}
    rates = await called(visit, "run_tiles", "rates", ends, 10)
    assert rates == pytest.approx({"failed": 0.2, "cut": 0.2, "timedOut": 0.1})
    assert await called(visit, "run_tiles", "rates", {}, 0) == {"failed": 0, "cut": 0, "timedOut": 0}
    assert await called(visit, "run_tiles", "gained", [None, 0.25, 0.75, None]) == {"now": 0.75, "gain": 0.5}
    assert await called(visit, "run_tiles", "gained", [None]) is None


@pytest.fixture
def run(data_folder: Path) -> Iterator[None]:
    write_learning_run(data_folder, "base", 20)
    yield
    rmtree(data_folder / "runs")


async def test_a_number_names_the_step_that_it_was_measured_at(visit: Visit, run: None) -> None:
    page = visit.page
    await visit.open("runs/base?step=5")
    reward = page.get_by_role("figure").filter(has_text="Reward")
    await expect(reward).to_contain_text("held out 0 ± 0.1 of step 0")
    await visit.open("runs/base")
    await expect(reward).to_contain_text("Reward step 20")
    await expect(reward).to_contain_text("held out 0.5 ± 0.1")
    await expect(reward).not_to_contain_text("of step")
    tiles = page.locator(".tiles")
    await expect(tiles).to_contain_text("0.8 +0.57 since the first step")
    await expect(tiles).to_contain_text("20 of 20")
    await page.get_by_text("Configuration:").click()
    settings = page.get_by_role("table", name="Configuration").get_by_role("row")
    await expect(settings.filter(has_text="schedule.steps")).to_contain_text("20")


TALLEST_GREEN = """canvas => {
  const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = new Map();
  for (let at = 0; at < data.length; at += 4) {
    if (data[at] === 0 && data[at + 1] === 122 && data[at + 2] === 89) {
      const x = (at / 4) % width;
      found.set(x, (found.get(x) ?? 0) + 1);
    }
  }
  return Math.max(0, ...found.values());
}"""


async def test_the_spread_of_an_evaluation_is_drawn(visit: Visit, run: None) -> None:
    await visit.open("runs/base")
    canvas = visit.page.locator(".chart canvas").first
    await expect(canvas).to_be_visible()
    assert await canvas.evaluate(TALLEST_GREEN) > 12, "a fifth of the chart's height, at one place"
