"""An evaluation's report is one file: it is filtered and sorted from the disk, and asks nobody for anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from gangline.tasks.commands.evals.page import report_page
from gangline.tasks.evals.records import SessionRecord
from gangline.tasks.evals.report import make_report
from support.page.browser import SIZE

pytestmark = pytest.mark.asyncio(loop_scope="package")

HOSTILE = "</script><img src=x onerror='window.ran = 1'>"


def record(task: str, sample: int, reward: float | None, outcome: str = "completed") -> SessionRecord:
    sizes = {"turns": 2, "prompt_tokens": 10, "sampled_tokens": 5}
    return SessionRecord(
        session_id=f"e-{task}.{sample}", task=task, sample=sample, outcome=outcome, reward=reward, seconds=1.5, **sizes
    )


async def shown_tasks(page: Page) -> list[str]:
    rows = page.locator("#tasks tbody tr:visible")
    return [await row.locator("td").first.inner_text() for row in await rows.all()]


async def test_tasks_are_filtered_and_sorted_without_a_server(browser: Browser, tmp_path: Path) -> None:
    found = [
        *(record("good", sample, 1.0) for sample in range(2)),
        *(record("half", sample, float(sample), "agent_timeout") for sample in range(2)),
        *(record(HOSTILE, sample, None, "infra_error") for sample in range(2)),
    ]
    (tmp_path / "report.html").write_text(report_page(make_report("e", found, num_samples=2, ks=(1, 2)), None))
    context = await browser.new_context(viewport=SIZE, offline=True)  # pyright: ignore[reportArgumentType]
    page = await context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(f"file://{tmp_path}/report.html")
    await expect(page.get_by_role("status")).to_have_text("3 of 3 tasks")
    assert await shown_tasks(page) == [HOSTILE, "half", "good"]
    await page.get_by_label("only tasks with a session below 1").check()
    assert await shown_tasks(page) == [HOSTILE, "half"]
    await page.get_by_label("Find").fill("TIMEOUT half.1")
    assert await shown_tasks(page) == ["half"]
    await page.get_by_label("Find").fill("")
    await page.get_by_label("only tasks with a session below 1").uncheck()
    for tasks in ([HOSTILE, "good", "half"], ["half", "good", HOSTILE]):
        await page.get_by_role("button", name="task").click()
        assert await shown_tasks(page) == tasks
    await page.get_by_role("button", name="reward").click()
    assert await shown_tasks(page) == [HOSTILE, "half", "good"]
    await page.get_by_role("button", name="reward").click()
    assert await shown_tasks(page) == ["good", "half", HOSTILE]
    assert await page.evaluate("window.ran") is None
    assert complaints == []
    assert asked == [f"file://{tmp_path}/report.html"]
    await context.close()
