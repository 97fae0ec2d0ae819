"""The runs of a data folder: what a list says, and which differences a comparison finds."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.domain.errors import InvalidRequest, NotFound
from gangline.machine.durable import acquire
from gangline.train.runs.store import compare_runs, read_run, read_runs
from support.training.recorded_runs import TASKS, write_run


def test_runs_are_listed_with_their_state_and_result(tmp_path: Path) -> None:
    stopped, done = write_run(tmp_path, "stopped"), write_run(tmp_path, "done", [1.0, 0.5] * (TASKS // 2))
    os.utime(stopped / "lineage.json", (1, 1))
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        os.utime(stopped / name, (1, 1))
    found = [run.summary for run in read_runs(tmp_path)]
    assert [(one.name, one.state, one.num_done) for one in found] == [("done", "done", 2), ("stopped", "stopped", 1)]
    assert (found[0].first_evaluation, found[0].last_evaluation) == (0.0, 0.75)
    assert found[0].held_out_difference is not None
    assert found[0].held_out_difference.mean == 0.75
    assert found[1].held_out_difference is None
    lock = acquire(done / "run.lock")
    try:
        assert read_run(tmp_path, "done").summary.state == "running"
    finally:
        os.close(lock)
    assert read_run(tmp_path, str(done)).summary.state == "done"


def test_a_run_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    write_run(tmp_path, "one")
    with pytest.raises(NotFound, match=r"no run 'two'.*There are: one"):
        read_run(tmp_path, "two")


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "one")
    (folder / "lineage.json").write_text("[{}]")
    with pytest.raises(InvalidRequest, match="runs/one is not the folder of a run"):
        read_runs(tmp_path)


def means(chance: random.Random, gain: float) -> list[float]:
    """Tasks of very different difficulty: only task by task a small gain can be seen."""
    return [min(1.0, number / TASKS * 0.5 + gain + chance.gauss(0, 0.02)) for number in range(TASKS)]


def test_a_planted_difference_is_found_and_none_is_found_where_there_is_none(tmp_path: Path) -> None:
    chance = random.Random(0)
    for seed in range(3):
        write_run(tmp_path, f"base-{seed}", means(chance, 0.0), seed=seed)
        write_run(tmp_path, f"same-{seed}", means(chance, 0.0), seed=seed, learner={"learning_rate": 2e-6})
        write_run(tmp_path, f"better-{seed}", means(chance, 0.05), seed=seed, learner={"learning_rate": 3e-6})
    names = [f"{arm}-{seed}" for arm in ("base", "same", "better") for seed in range(3)]
    base, same, better = compare_runs([read_run(tmp_path, name) for name in names]).arms
    assert base.runs == ("base-0", "base-1", "base-2")
    assert base.seeds == (0, 1, 2)
    assert base.difference is None
    assert [arm.settings for arm in (base, same, better)] == [
        {"learner.learning_rate": 1e-6},
        {"learner.learning_rate": 2e-6},
        {"learner.learning_rate": 3e-6},
    ]
    assert same.difference is not None
    assert better.difference is not None
    assert same.difference.standard_error is not None
    assert better.difference.standard_error is not None
    assert abs(same.difference.mean) < 2 * same.difference.standard_error
    assert better.difference.mean == pytest.approx(0.05, abs=0.01)
    assert better.difference.mean > 10 * better.difference.standard_error
    assert base.deviation_of_seeds is not None


def test_runs_on_other_held_out_tasks_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path, "one", [1.0] * TASKS)
    write_run(tmp_path, "two", [1.0] * TASKS, held_out="another", control="shuffled_rewards")
    first, second = compare_runs([read_run(tmp_path, "one"), read_run(tmp_path, "two")]).arms
    assert first.settings == {"control": "none"}
    assert second.difference is None


def test_the_commands_say_what_the_store_finds(tmp_path: Path) -> None:
    chance = random.Random(0)
    write_run(tmp_path, "base", means(chance, 0.0))
    write_run(tmp_path, "better", means(chance, 0.05), learner={"learning_rate": 3e-6})
    write_run(tmp_path, "stopped")
    runner = CliRunner()

    def said(*arguments: str) -> str:
        done = runner.invoke(build_app(), ["runs", *arguments, "--data", str(tmp_path)])
        assert done.exit_code == 0, done.output
        return done.output

    assert all(line in said("list") for line in ("base", "better", "1/2"))
    assert "stopped: stopped, 1 of 2 steps" in said("show", "stopped")
    compared = said("compare", "base", "better", "--picture", str(tmp_path / "curves.png"))
    assert "+0.05" in compared
    assert "learner.learning_rate=3e-06" in "".join(compared.split())
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert "stopped has done 1 of 2 steps" in said("compare", "base", "stopped")
    printed = json.loads(said("compare", "base", "better", "--json"))
    assert printed["arms"][1]["difference"]["num_tasks"] == TASKS
    assert [run["name"] for run in json.loads(said("list", "--json"))["runs"]].count("better") == 1
