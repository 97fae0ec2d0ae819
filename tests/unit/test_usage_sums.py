"""Sums of what sandboxes used: over the grader's ones, and the part after RUN in the agent's own."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gangline.cli.results.export import COLUMNS, write_sessions_csv
from gangline.domain.session import SessionResult, StageTiming
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.domain.usage import AMOUNTS, SessionUsage, Usage, since, summed, unmeasured
from gangline.sandbox.shared.accounts import Accounts, Spent, Traffic

RUN = Usage(
    disk_bytes=10, cpu_s=1.5, peak_memory_bytes=100, written_bytes=7, proxy_sent_bytes=5, measured={"cpu_s": "a"}
)
TOTAL = Usage(disk_bytes=12, cpu_s=2.0, peak_memory_bytes=100, written_bytes=9, proxy_sent_bytes=5)


def test_the_part_after_a_moment_is_the_difference_and_a_peak_that_did_not_grow_is_unknown() -> None:
    later = since(RUN, TOTAL)
    assert (later.cpu_s, later.written_bytes, later.proxy_sent_bytes, later.list_sent_bytes) == (0.5, 2, 0, None)
    assert (later.peak_memory_bytes, later.measured["peak_memory_bytes"]) == (
        None,
        "not more than before, in the same sandbox",
    )
    higher = Usage(disk_bytes=None, peak_memory_bytes=101)
    assert since(RUN, higher).peak_memory_bytes == 101


def test_a_sum_adds_amounts_and_takes_the_highest_peak() -> None:
    both = summed([RUN, TOTAL])
    assert (both.cpu_s, both.peak_memory_bytes, both.written_bytes, both.disk_bytes) == (3.5, 100, 16, 12)
    assert summed([RUN]) == RUN


def test_an_amount_that_one_does_not_know_is_unknown_with_the_reason() -> None:
    both = summed([RUN, unmeasured("it is gone")])
    assert (both.cpu_s, both.measured["cpu_s"]) == (None, "it is gone")
    assert both.peak_memory_bytes == 100


def test_what_supervisors_report_is_added_and_their_silence_is_not_zero() -> None:
    spent, network = Spent(), {"proxy": Traffic(), "list": Traffic()}
    empty = Accounts().usage(Usage(disk_bytes=None), spent, network)
    assert (empty.cpu_s, empty.written_bytes, empty.measured["cpu_s"]) == (None, None, "no command has ended yet")
    spent.add("")
    spent.add("0.5 2048 512")
    spent.add("0.25 1024 512")
    used = Accounts().usage(Usage(disk_bytes=3), spent, "nobody counts")
    assert (used.cpu_s, used.peak_memory_bytes, used.written_bytes, used.disk_bytes) == (0.75, 2048, 1024, 3)
    assert (used.proxy_sent_bytes, used.measured["proxy_sent_bytes"]) == (None, "nobody counts")


def test_groups_of_earlier_lives_still_count(tmp_path: Path) -> None:
    accounts = Accounts()
    for life, (usec, peak) in enumerate([(1_000_000, 50), (500_000, 40)]):
        group = tmp_path / f"life{life}"
        group.mkdir()
        (group / "memory.peak").write_text(str(peak))
        for spent in (usec // 2, usec):
            (group / "cpu.stat").write_text(f"usage_usec {spent}\n")
            accounts.read([group])
    accounts.read([tmp_path / "gone"])
    used = accounts.usage(Usage(disk_bytes=None), Spent(), "nobody counts")
    assert (used.cpu_s, used.peak_memory_bytes, used.measured["cpu_s"]) == (1.5, 50, "control group")


def _result(**fields: object) -> SessionResult:
    ids = {"session_id": "s1", "task_id": "t1", "node_id": "n1", "attempt": 1, "fence": 1, "outcome": "completed"}
    return SessionResult(**(ids | fields))  # pyright: ignore[reportArgumentType]


def test_results_of_earlier_versions_have_no_usage_and_new_ones_keep_it() -> None:
    result = _result(usage=SessionUsage(agent=RUN, grading=TOTAL))
    assert decode_msgpack(encode_msgpack(result), SessionResult).usage == result.usage
    assert decode_msgpack(encode_msgpack(_result()), SessionResult).usage is None


@pytest.mark.parametrize("grading", [None, TOTAL])
def test_a_table_of_sessions_has_a_column_for_each_amount(tmp_path: Path, grading: Usage | None) -> None:
    timings = (StageTiming("run", 10.0, 12.5),)
    results = [_result(reward=0.5, timings=timings, usage=SessionUsage(agent=RUN, grading=grading)), _result()]
    assert write_sessions_csv(results, tmp_path / "t1.csv") == 2
    with (tmp_path / "t1.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == COLUMNS
    assert (first["reward"], first["run_s"], first["agent_cpu_s"], first["agent_list_sent_bytes"]) == (
        *("0.5", "2.500", "1.5", ""),
    )
    assert first["grading_written_bytes"] == ("" if grading is None else "9")
    assert {second[f"agent_{amount}"] for amount in AMOUNTS} == {""}
