"""Rewards are told apart at a glance: by a sign and by height, not by colour alone; with what each sample cost."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from support.page.browser import Visit

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_a_reward_of_0_and_one_of_1_look_different(visit: Visit) -> None:
    await visit.open("tasks/task-1")
    rewards = visit.page.get_by_role("list", name="Rewards by sample")
    await expect(rewards.get_by_role("listitem")).to_have_text(["✗ 0", "✓ 1", "✗ 0"])
    heights = await rewards.locator(".bar > span").evaluate_all("bars => bars.map((bar) => bar.offsetHeight)")
    assert heights[0] == heights[2] == 0 < heights[1]
    await rewards.get_by_role("link", name="sample 1: reward 1").press("Enter")
    await expect(visit.page.locator(".verdict")).to_have_text("✓ reward 1, completed")
    await visit.open("sessions/task-1.0")
    await expect(visit.page.locator(".verdict")).to_have_text("✗ reward 0, completed")
    await visit.open("sessions/broken.0")
    await expect(visit.page.locator(".verdict")).to_have_text("reward –, agent error")


async def test_a_sample_has_its_seconds_and_tokens(visit: Visit) -> None:
    await visit.open("tasks/task-1")
    table = visit.page.get_by_role("table").first
    titles = ["sample", "session", "outcome", "reward", "less the mean", "seconds", "tokens", "failure"]
    await expect(table.get_by_role("columnheader")).to_have_text(titles)
    cells = table.get_by_role("row").nth(1).get_by_role("cell")
    await expect(cells.nth(3)).to_have_text("✗ 0")
    await expect(cells.nth(6)).to_have_text("33")
    assert float(await cells.nth(5).inner_text()) >= 0
