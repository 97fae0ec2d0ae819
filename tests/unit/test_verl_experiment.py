"""An experiment file whose trainer is verl: its data sets, and the arguments of verl's command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.train.trainers.verl.experiment import arguments_of, is_verl, read_verl_experiment, write_data
from gangline.train.trainers.verl.launch import METRICS, read_metrics

FILE = """\
trainer: verl
name: words
model: /models/m
python: PYTHON
data: {tasks: tasks.jsonl, num_samples: 4}
settings:
  trainer.n_gpus_per_node: 8
  actor_rollout_ref.rollout.n: 6
  +actor_rollout_ref.model.override_config: {attn_implementation: sdpa, ratio: 0.5}
  trainer.project_name: it's \\ mine
  trainer.logger: [console, null, true]
"""


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(text.replace("PYTHON", sys.executable))
    return path


def test_the_file_becomes_arguments_of_verls_command(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert is_verl(path)
    found = arguments_of(read_verl_experiment(path), tmp_path / "run", "http://127.0.0.1:1")
    assert "actor_rollout_ref.model.path='/models/m'" in found
    assert "+actor_rollout_ref.rollout.custom.gangline.url='http://127.0.0.1:1'" in found
    assert f"data.train_files='{tmp_path}/run/train.jsonl'" in found
    assert "trainer.n_gpus_per_node=8" in found
    assert "+actor_rollout_ref.model.override_config={attn_implementation:'sdpa',ratio:0.5}" in found
    assert "trainer.project_name='it\\'s \\\\ mine'" in found
    assert "trainer.logger=['console',null,true]" in found
    assert [one for one in found if "rollout.n=" in one] == ["actor_rollout_ref.rollout.n=6"]
    assert "trainer.val_before_train=false" in found


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("1e-6", "1e-06"), ("2E5", "200000.0"), ("-3e-2", "-0.03"), ("1_0e+3", "10000.0"), ("1.5e-6", "1.5e-06"),
        ("'1e-6'", "'1e-6'"), ("1e-6x", "'1e-6x'"), ("e-6", "'e-6'"), ("1e", "'1e'"), ("12", "12"),
    ],
)  # fmt: skip
def test_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str, argument: str) -> None:
    path = written(tmp_path, FILE + f"  actor_rollout_ref.actor.optim.lr: {text}\n")
    found = arguments_of(read_verl_experiment(path), tmp_path / "run", "http://127.0.0.1:1")
    assert f"actor_rollout_ref.actor.optim.lr={argument}" in found


def test_paths_are_beside_the_file_and_held_out_tasks_are_validated_on(tmp_path: Path) -> None:
    text = FILE + "evaluation: {tasks: held_out.jsonl, num_samples: 2, every: 5}\n"
    found = read_verl_experiment(written(tmp_path, text))
    assert found.data.tasks == tmp_path / "tasks.jsonl"
    assert found.evaluation is not None
    assert found.evaluation.tasks == tmp_path / "held_out.jsonl"
    arguments = arguments_of(found, tmp_path, "http://127.0.0.1:1")
    assert {"trainer.test_freq=5", "actor_rollout_ref.rollout.val_kwargs.n=2"} <= set(arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("python: PYTHON", "python: nowhere"), r"no interpreter at .*nowhere.*extra `verl`"),
        (("num_samples: 4", "num_sample: 4"), r"data\.num_sample: Extra inputs"),
        (("name: words", "name: a b"), "name must match"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_verl_experiment(written(tmp_path, FILE.replace(*change)))


def test_another_trainers_file_is_not_verls(tmp_path: Path) -> None:
    assert not is_verl(written(tmp_path, "name: words\n"))


def test_tasks_become_rows_of_verls_data_sets(tmp_path: Path) -> None:
    task: dict[str, Any] = {"task_id": "t-1", "instruction": "say é", "agent": {"harness": "shell"}}
    write_data(tmp_path, [task, task], [])
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert rows[0]["prompt"] == [{"role": "user", "content": "say é"}]
    assert json.loads(rows[0]["gangline_task"]) == {"instruction": "say é", "agent": {"harness": "shell"}}
    assert len((tmp_path / "val.jsonl").read_text().splitlines()) == 1


def test_a_line_of_metrics_that_is_still_written_is_not_read(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n{"step": 2, "da')
    assert read_metrics(tmp_path / METRICS) == [{"step": 1, "critic/score/mean": 0.5}]
    assert read_metrics(tmp_path / "none") == []
