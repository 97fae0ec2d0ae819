"""Every part passes axe, in light and dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import expect

from gangline.tasks.evals.routes import StoredReports
from support.evals.reports import report_of_rewards
from support.page.browser import Visit
from support.requirements import need
from support.training.recorded_runs import write_learning_run

pytestmark = pytest.mark.asyncio(loop_scope="package")

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
EVALUATION = report_of_rewards("newer", {"a": (1.0, 0.0), "b": (None, 0.5)})
PARTS = {
    "now": ("", "h1", ()),
    "task": ("tasks/task-1", "table", ()),
    "runs": ("runs", "table", ()),
    "run": ("runs/base?with=fast", ".chart canvas", ("j",)),
    "evaluations": ("evaluations", "table", ()),
    "evaluation": (f"evaluations/{EVALUATION.evaluation_id}", "td a", ()),
    "compared": (f"evaluations/{EVALUATION.evaluation_id}?with=earlier-0123456789ab", "td a", ()),
    "drift": ("sessions/task-1.0?call=4", "#call-4", ("d",)),
    "find": ("find?words=sign", "[role=status]", ()),
    "calls": ("sessions/task-1.0", "article", ("j", "t", "?")),
    "failed": ("sessions/broken.0", "[aria-label='How the session ended']", ()),
    "evidence": ("sessions/task-1.0", "article", ("e",)),
}


@pytest.fixture(scope="module", autouse=True)
def runs(data_folder: Path) -> None:
    write_learning_run(data_folder, "base", 20, groups=("task-1", "gone"))
    write_learning_run(data_folder, "fast", 30, learner={"learning_rate": 1e-5})
    stored = StoredReports(data_folder / "server" / "evaluations")
    stored.write(EVALUATION)
    stored.write(report_of_rewards("earlier", {"a": (1.0, 1.0), "b": (0.0, 0.0)}))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(visit: Visit, part: str, scheme: Literal["light", "dark"]) -> None:
    need(AXE.is_file(), "axe-core is missing: make web/node_modules/.ready")
    await visit.page.emulate_media(color_scheme=scheme)
    address, shown, keys = PARTS[part]
    await visit.open(address)
    await expect(visit.page.locator(shown).first).to_be_visible()
    await visit.keys(*keys)
    await visit.page.evaluate(AXE.read_text())
    found = await visit.page.evaluate("axe.run()")
    told = [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]]
    assert not told, json.dumps(told, indent=1)
    assert len(found["passes"]) > 10
