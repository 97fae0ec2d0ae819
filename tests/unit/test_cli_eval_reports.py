"""The report of an evaluation names its tasks and sessions, the worst first, and claims no more than was seen."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import InvalidRequest
from gangline.tasks.commands.evals import compare, evaluate
from gangline.tasks.commands.evals.page import comparison_page, report_page
from gangline.tasks.commands.evals.view import comparison_lines, figures, tasks_rows, write_markdown
from gangline.tasks.evals.comparison import compare_reports
from gangline.tasks.evals.records import SessionRecord
from gangline.tasks.evals.report import Report, make_report
from gangline.tasks.evals.statistics import estimate_of
from support.cli_output import drawn

HOSTILE = "<script>alert(1)</script>"


def records(task: str, *rewards: float | None, outcome: str = "completed", **changes: Any) -> list[SessionRecord]:
    failed = {"boundary": "node", "code": "disk_full", "outcome": "infra_error"}
    told: list[dict[str, Any]] = [{"outcome": outcome} | (failed if one is None else {}) | changes for one in rewards]
    return [
        SessionRecord(
            **told[sample],
            session_id=f"e-{task}.{sample}",
            task=task,
            sample=sample,
            reward=reward,
            turns=2,
            prompt_tokens=10,
            sampled_tokens=5,
            seconds=1.5,
        )
        for sample, reward in enumerate(rewards)
    ]


def report(*found: Sequence[SessionRecord], num_samples: int = 2, name: str = "e") -> Report:
    return make_report(
        name, [one for mine in found for one in mine], num_samples=num_samples, ks=sorted({1, num_samples})
    )


def shown(made: Report, capsys: pytest.CaptureFixture[str]) -> str:
    evaluate._show(made, as_json=False)  # pyright: ignore[reportPrivateUsage]
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("num", "share", "low", "high"),
    [(10, 1.0, 0.7225, 1.0), (10, 0.0, 0.0, 0.2775), (1, 1.0, 0.2065, 1.0), (100, 1.0, 0.9630, 1.0)],
)
def test_where_all_tasks_pass_or_none_the_interval_is_wilsons(num: int, share: float, low: float, high: float) -> None:
    """Figures of R's `binom.confint(..., methods = "wilson")`."""
    made = estimate_of([share] * num, is_share=True)
    assert made is not None
    assert made.standard_error is None
    assert made.interval == pytest.approx((low, high), abs=1e-4)


def test_ten_of_ten_is_not_said_to_be_certain(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(report(*(records(f"t{at}", 1.0, 1.0) for at in range(10))), capsys)
    assert "± 0.000" not in told
    assert told.count("1.000 (0.722 to 1.000)") == 3, "passed, pass@2 and pass^2; a reward may lie above 1"


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.0, 0.0), (0.5, 0.5), (0.0, 1.0), (-1.0, -1.0), (2.0, 2.0)])
@pytest.mark.parametrize("num_tasks", [1, 2, 9])
def test_no_figure_claims_an_error_of_nothing(rewards: tuple[float, float], num_tasks: int) -> None:
    made = report(*(records(f"t{at}", *rewards) for at in range(num_tasks)))
    cells = " ".join(cell for _, _, rows in figures(made) for row in rows for cell in row)
    assert "± 0.000" not in cells


def test_tasks_stand_the_worst_first_and_those_without_a_reward_before_all() -> None:
    made = report(records("good", 1, 1), records("half", 0, 1), records("lost", None, None), records("bad", 0, 0))
    assert [line.task for line in made.lines] == ["lost", "bad", "half", "good"]
    _, _, rows = tasks_rows(made.lines)
    assert rows[0] == ("lost", "- -", "2 infra_error (node: disk_full)", "e-lost.0")
    assert rows[2] == ("half", "0 1", "2 completed", "e-half.0")


def test_a_session_that_does_not_count_is_worse_than_a_zero() -> None:
    (line,) = report(records("t", 0, None)).lines
    assert line.worst.session_id == "e-t.1"


def test_the_terminal_shows_tasks_that_did_not_always_pass_and_how_to_see_a_session(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = shown(report(records("good", 1, 1), records("bad", 0, 1)), capsys)
    assert re.search(r"^bad +0 1 +2 completed +e-bad.0$", told, re.MULTILINE)
    assert "good" not in told
    assert told.rstrip().endswith("gangline show e-bad.0")


def test_many_bad_tasks_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown(report(*(records(f"t{at}", 0, 0) for at in range(30))), capsys)
    assert "... and 10 more" in told


def test_where_all_pass_there_is_no_table_of_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    assert "worst" not in shown(report(records("t", 1, 1)), capsys)


def test_the_report_as_json_has_tasks_and_sessions_and_reads_back() -> None:
    made = report(records("t", 0, None))
    again = msgspec.json.decode(msgspec.json.encode(made), type=Report)
    assert again == made
    assert [one.session_id for one in again.lines[0].samples] == ["e-t.0", "e-t.1"]


def test_markdown_has_every_task(tmp_path: Path) -> None:
    made = report(records("a|b", 1, 1), records("t", 0, 1))
    write_markdown(tmp_path / "r.md", [*figures(made), tasks_rows(made.lines)])
    text = (tmp_path / "r.md").read_text()
    assert "| t | 0 1 | 2 completed | e-t.0 |" in text
    assert "| a\\|b | 1 1 |" in text
    assert "#|" not in text.replace(" ", "")


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


@pytest.mark.parametrize("server", [None, "http://127.0.0.1:8700"])
def test_the_page_loads_nothing_and_runs_its_own_script_alone(server: str | None) -> None:
    made = msgspec.structs.replace(report(records(HOSTILE, 0, 1, code=HOSTILE, boundary="agent")), name=HOSTILE)
    text = report_page(made, server)
    page = _Page(text)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 1
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(tags)
    links = [attributes.get("href") for tag, attributes in page.tags if tag == "a"]
    assert all(server is not None and (link or "").startswith(f"{server}/#/sessions/") for link in links)
    assert all("src" not in attributes for _, attributes in page.tags)
    policy = next(str(attributes["content"]) for _, attributes in page.tags if attributes.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert HOSTILE not in text


def test_the_page_links_each_session_where_a_service_has_it() -> None:
    made = report(records("t/1 x", 0, 1))
    links = [attributes["href"] for tag, attributes in _Page(report_page(made, "http://h:1")).tags if tag == "a"]
    assert links == ["http://h:1/#/sessions/e-t%2F1%20x.0", "http://h:1/#/sessions/e-t%2F1%20x.1"]
    alone = _Page(report_page(made, None))
    assert "a" not in [tag for tag, _ in alone.tags]


BEFORE = report(records("same", 1, 1), records("worse", 1, 1), records("better", 0, 0), records("much", 0, 0))
AFTER = report(records("same", 1, 1), records("worse", 0, 1), records("better", 0, 1), records("much", 1, 1), name="f")


def test_a_comparison_sets_the_rewards_of_each_task_side_by_side() -> None:
    comparison = compare_reports(BEFORE, AFTER)
    told = drawn(compare.comparison_table(comparison), 100)
    assert [line.split() for line in told] == [
        ["task", "e", "f", "difference"],
        ["worse", "1", "1", "0", "1", "-0.500"],
        ["better", "0", "0", "0", "1", "+0.500"],
        ["much", "0", "0", "1", "1", "+1.000"],
    ]
    assert "1 tasks worse" in " ".join(comparison_lines("e", "f", comparison))


def test_the_terminal_shows_the_largest_losses_and_the_largest_gains() -> None:
    before = report(*(records(f"t{at:02}", 12, 12) for at in range(25)))
    after = report(*(records(f"t{at:02}", at, at) for at in range(25)), name="f")
    comparison = compare_reports(before, after)
    shown = [line.split()[0] for line in drawn(compare.comparison_table(comparison), 100)][1:]
    assert shown == [f"t{at:02}" for at in (*range(10), *range(15, 25))]
    assert [change.task for change in comparison.tasks] == [f"t{at:02}" for at in range(25)]


def test_tasks_that_one_evaluation_lacks_are_counted_and_in_no_difference() -> None:
    before = report(records("a", 1, 1), records("gone", 0, 0), records("lost", 1, 1))
    after = report(records("a", 0, 0), records("new", 1, 1), records("lost", None, None), name="f")
    comparison = compare_reports(before, after)
    assert (comparison.difference.num_tasks, comparison.apart) == (1, ("gone", "lost", "new"))
    assert list(comparison_lines("e", "f", comparison))[-1].startswith("3 tasks count in one of them only")


def test_evaluations_without_a_common_task_are_not_compared() -> None:
    with pytest.raises(InvalidRequest, match="e and f have no task in common"):
        compare_reports(report(records("a", 1, 1)), report(records("b", 1, 1), name="f"))


def test_a_comparison_as_a_page_has_every_task_and_what_the_terminal_says() -> None:
    comparison = compare_reports(BEFORE, AFTER)
    text = comparison_page(comparison, 1.0, "http://h:1")
    page = _Page(text)
    for line in comparison_lines("e", "f", comparison):
        assert f"<p>{line}</p>" in text
    rows = [attributes for tag, attributes in page.tags if tag == "tr" and "data-passed" in attributes]
    assert [row["data-passed"] for row in rows] == ["0", "1", "0", "0"], "those that are the same can be left out"
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert len(links) == 16
    assert links[:2] == ["http://h:1/#/sessions/e-worse.0", "http://h:1/#/sessions/e-worse.1"]
    assert "<td>e<td>4<td>8<td>8<td>0.500" in text, "the figures of both"
    assert "1.000 (0.722 to 1.000)" not in text


def test_a_comparison_as_a_page_trusts_no_name() -> None:
    before = report(records(HOSTILE, 1, 1), name=HOSTILE)
    text = comparison_page(compare_reports(before, report(records(HOSTILE, 0, 0), name=f"{HOSTILE}2")), 1.0, None)
    assert HOSTILE not in text
    assert [tag for tag, _ in _Page(text).tags].count("script") == 1


def test_a_report_that_was_written_before_tasks_were_in_it_is_compared_too() -> None:
    written = msgspec.to_builtins(report(records("t", 1, 1)))
    del written["lines"]
    comparison = compare_reports(msgspec.convert(written, Report), report(records("t", 0, 0), name="f"))
    assert drawn(compare.comparison_table(comparison), 80)[1].split() == ["t", "-", "0", "0", "-1.000"]
    assert "<td>t<td><td data-value" in comparison_page(comparison, 1.0, None)
