"""What makes a run another experiment, and what came out of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from gangline.domain.errors import Conflict
from gangline.train.run.experiment import digest_of, read_experiment
from gangline.train.run.lineage import begin_life, key_of


def spec(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "experiment.yaml"
    evaluation = {"tasks": "held_out.jsonl", "num_samples": 2}
    document = {"name": "one", "model": "smollm2", "data": {"tasks": "tasks.jsonl"}, "evaluation": evaluation}
    path.write_text(yaml.safe_dump(document | changes))
    return path


def test_held_out_tasks_lie_beside_the_experiment(tmp_path: Path) -> None:
    found = read_experiment(spec(tmp_path)).evaluation
    assert found is not None
    assert found.tasks == tmp_path / "held_out.jsonl"
    assert (found.num_samples, found.every) == (2, None)


def test_how_it_is_measured_is_part_of_an_experiment_and_where_its_files_lie_is_not(tmp_path: Path) -> None:
    one = digest_of(read_experiment(spec(tmp_path / "a")))
    assert digest_of(read_experiment(spec(tmp_path / "b"))) == one
    changed = [{"evaluation": {"tasks": "held_out.jsonl", "num_samples": 4}}, {"evaluation": None}]
    others = [digest_of(read_experiment(spec(tmp_path / "a", **change))) for change in changed]
    assert len({one, *others}) == 3


def begin(folder: Path, held_out_digest: str | None = "h") -> str:
    """A life of a run in `folder`. Returns the run's key."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({}))
    key = key_of(folder / "run")
    begin_life(
        folder / "run",
        read_experiment(spec(folder)),
        key=key,
        tasks_digest="t",
        held_out_digest=held_out_digest,
        model_folder=model,
        first_step=1,
    )
    return key


def test_other_held_out_tasks_make_another_experiment(tmp_path: Path) -> None:
    begin(tmp_path)
    begin(tmp_path)
    for other in ("i", None):
        with pytest.raises(Conflict, match="the held-out tasks changed"):
            begin(tmp_path, other)


def test_a_run_has_one_key_for_life_and_another_run_in_its_place_another(tmp_path: Path) -> None:
    first = begin(tmp_path)
    assert begin(tmp_path) == first
    shutil.rmtree(tmp_path / "run")
    assert begin(tmp_path) != first
