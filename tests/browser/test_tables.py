"""Tables are sorted, filtered and cut to a reader's columns; a run's tasks are one line; ids and numbers stay whole."""

from __future__ import annotations

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Locator, expect

from gangline.wire.client.server import ServerClient
from support.page.browser import Visit
from support.page.sessions import working_session
from support.service.running import FakeNode, request

pytestmark = pytest.mark.asyncio(loop_scope="package")

RUN = "demo-ab12cd"
LONG = "cli-qwen-code.of-a-rather-long-name.3"


@pytest_asyncio.fixture(scope="module", loop_scope="package", autouse=True)
async def tasks(control: ServerClient) -> None:
    """Tasks of a person, then twelve of a training run and four of its evaluation."""
    node = FakeNode(control)
    names = [LONG, *(f"{RUN}-{number:06d}" for number in range(12))]
    names += [f"{RUN}-evaluation-000000-v000000-{number:04d}" for number in range(4)]
    await control.submit_many([request(name, num_samples=1) for name in names])
    while leases := await node.lease():
        for lease in leases:
            reward = 0.5 if lease.task_id == LONG else float(lease.task_id.endswith(("1", "2", "3")))
            result = working_session(lease.session_id, reward=reward)
            await control.post_result(
                msgspec.structs.replace(result, node_id="n1", task_id=lease.task_id, fence=lease.fence)
            )


def table(visit: Visit, name: str = "tasks") -> Locator:
    return visit.page.get_by_role("table", name=name, exact=True)


async def firsts(rows: Locator, num: int) -> list[str]:
    """The first cells' texts, without the rows of headings."""
    return [(await rows.nth(index).get_by_role("cell").first.inner_text()).split()[0] for index in range(1, num + 1)]


async def test_tasks_of_a_run_are_one_line_that_opens(visit: Visit) -> None:
    rows = table(visit).get_by_role("row")
    line = rows.filter(has_text="12 tasks")
    await expect(line).to_contain_text(RUN)
    await expect(line).to_contain_text("ended")
    await expect(line).to_contain_text("12 completed")
    await expect(rows.filter(has_text="4 tasks")).to_contain_text(f"{RUN}-evaluation")
    await expect(rows.filter(has_text=f"{RUN}-000003")).to_have_count(0)
    names = await rows.evaluate_all("rows => rows.map(row => row.cells[0].innerText)")
    last_own = max(at for at, name in enumerate(names) if name.strip() in {LONG, "task-1", "broken"})
    assert last_own < min(at for at, name in enumerate(names) if RUN in name), "a reader's own tasks are on top"
    await line.get_by_role("button").press("Enter")
    await expect(line.get_by_role("button")).to_have_attribute("aria-expanded", "true")
    await rows.filter(has_text=f"{RUN}-000003").get_by_role("link").press("Enter")
    await expect(visit.page.get_by_role("heading", name=f"{RUN}-000003")).to_be_visible()
    await visit.page.go_back()
    await expect(rows.filter(has_text=f"{RUN}-000003")).to_be_visible()


async def test_columns_say_what_ran_and_what_it_took(visit: Visit) -> None:
    titles = await table(visit).get_by_role("columnheader").all_inner_texts()
    expected = ["task", "state", "submitted", "harness", "model", "samples", "seconds a session", "tokens sampled"]
    assert titles == [*expected, "mean reward", "outcomes"]
    cells = table(visit).get_by_role("row").filter(has_text=LONG).get_by_role("cell")
    said = working_session("x", reward=0.5)
    await expect(cells.nth(3)).to_have_text("shell")
    await expect(cells.nth(4)).to_have_text(said.completions[-1].model)
    await expect(cells.nth(7)).to_have_text(str(sum(len(call.sampled_ids) for call in said.completions)))
    await expect(cells.nth(8)).to_have_text("◐ 0.5")
    time = cells.nth(2).locator("time")
    await expect(time).to_contain_text("ago")
    assert await time.get_attribute("title")
    signs = table(visit, "sessions").locator(".reward")
    assert {text.split()[0] for text in await signs.all_inner_texts()} == {"●", "○", "◐"}


async def test_a_column_sorts_by_click_and_by_key_in_both_directions(visit: Visit) -> None:
    sessions = table(visit, "sessions")
    rows, heading = sessions.get_by_role("row"), sessions.get_by_role("columnheader", name="session")
    await expect(heading).to_have_attribute("aria-sort", "none")
    await heading.get_by_role("button").click()
    await expect(heading).to_have_attribute("aria-sort", "ascending")
    ascending = await firsts(rows, 5)
    assert ascending == sorted(ascending)
    await heading.get_by_role("button").press("Enter")
    await expect(heading).to_have_attribute("aria-sort", "descending")
    descending = await firsts(rows, 5)
    assert descending == sorted(descending, reverse=True)
    assert descending[0] > ascending[0]
    await heading.get_by_role("button").press("Space")
    await expect(heading).to_have_attribute("aria-sort", "none")
    reward = sessions.get_by_role("columnheader", name="reward")
    await reward.get_by_role("button").press("Enter")
    await expect(reward).to_have_attribute("aria-sort", "descending")
    await expect(rows.nth(1)).to_contain_text("● 1")
    await reward.get_by_role("button").press("Enter")
    await expect(rows.nth(1)).to_contain_text("○ 0")
    await expect(rows.last, "what has no reward is last in both directions").to_contain_text("–")


async def test_a_filter_leaves_the_rows_with_all_its_words(visit: Visit) -> None:
    page = visit.page
    box = page.get_by_label("Filter tasks")
    await box.fill(f"{RUN} 000003")
    rows = table(visit).get_by_role("row")
    await expect(rows.filter(has_text=f"{RUN}-000003")).to_be_visible()
    await expect(rows).to_have_count(3)
    await box.fill("no such task")
    await expect(rows).to_have_count(1)
    await page.get_by_role("button", name="Show all").press("Enter")
    await expect(rows.filter(has_text="task-1")).to_be_visible()
    assert await box.input_value() == ""


async def test_chosen_columns_stay_chosen(visit: Visit) -> None:
    page = visit.page
    await page.get_by_text("Columns").first.click()
    await page.get_by_role("checkbox", name="submitter").check()
    await page.get_by_role("checkbox", name="samples").uncheck()
    await table(visit).get_by_role("columnheader", name="harness").get_by_role("button").click()
    await page.reload()
    titles = table(visit).get_by_role("columnheader")
    await expect(titles.filter(has_text="submitter")).to_be_visible()
    await expect(titles.filter(has_text="samples")).to_have_count(0)
    await expect(titles.filter(has_text="harness")).to_have_attribute("aria-sort", "ascending")
    await page.evaluate("localStorage.setItem('gangline.table.tasks', '{\"columns\": 3, \"sorted\": []')")
    await page.reload()
    await expect(titles.filter(has_text="samples")).to_be_visible()


BROKEN = """() => [...document.querySelectorAll("main th, main td a, main td.number, main td time")]
  .filter(one => {
    const range = document.createRange();
    range.selectNodeContents(one);
    const tops = [...range.getClientRects()].filter(box => box.width > 0).map(box => box.top);
    return Math.max(...tops) - Math.min(...tops) > 10;
  })
  .map(one => one.textContent)"""


@pytest.mark.parametrize("width", [1440, 1280, 390])
async def test_no_word_id_or_number_is_broken(visit: Visit, width: int) -> None:
    await visit.page.set_viewport_size({"width": width, "height": 800})
    await expect(table(visit).get_by_role("link", name=LONG)).to_be_visible()
    assert await visit.page.evaluate(BROKEN) == []
