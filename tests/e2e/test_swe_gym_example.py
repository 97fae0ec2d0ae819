"""examples/swe_gym: its tasks, and a dry run of two generated ones. `tests.support.service.swe_gym` names the
stand-ins.

The trainers' own loaders and loops are in `make test-verl` and `make test-trainers`.
"""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from gangline.domain.task import TaskRequest
from support.requirements import need_command
from support.service.cli_process import UpProcess, gangline
from support.service.papers import listing
from support.service.swe_gym import EXAMPLE, imported, stand_ins, with_agents, write_rows

SCRIPT = {"default": {"text": "I repaired it."}}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_command("git", "apt-get install git")
    made = tmp_path_factory.mktemp("swe_gym") / "rows"
    made.mkdir()  # pytest's own folders are closed to the agent's user
    return made


@pytest.mark.parametrize("harness", ["codex", "claude_code"])
def test_rows_become_tasks_with_the_image_by_name_the_agent_and_the_grader(folder: Path, harness: str) -> None:
    rows, _ = write_rows(folder)
    tasks = with_agents(imported(rows), "--harness", harness)
    assert [task["runtime"]["image"] for task in tasks] == [
        "xingyaoww/sweb.eval.x86_64.dogs_s_kennel-1:latest",
        "xingyaoww/sweb.eval.x86_64.cats_s_basket-1:latest",
    ]
    done = gangline("submit", "-", "--dry-run", stdin="".join(json.dumps(task) + "\n" for task in tasks))
    assert done.returncode == 0, done.stderr
    for task in map(TaskRequest.model_validate, json.loads(done.stdout)):
        assert (task.runtime.backend, task.agent.harness) == ("docker", harness)
        assert (task.evaluator.strategy, task.evaluator.refresh_runtime) == ("swe_bench", True)
        assert task.builder.strategy == "prefix_merging"
        assert task.agent.settings["context_window"] == 50_000
        assert task.capture.template_kwargs == {"enable_thinking": False}


def test_slimes_prompts_carry_the_same_tasks(folder: Path) -> None:
    rows, _ = write_rows(folder)
    lines = imported(rows)
    prompts = with_agents(lines, "--prompts")
    assert [prompt["metadata"]["task"] for prompt in prompts] == with_agents(lines)
    assert all(prompt["prompt"] == prompt["metadata"]["task"]["instruction"] for prompt in prompts)


def test_two_generated_tasks_run_and_are_graded(tmp_path: Path, folder: Path) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    tasks, variables = stand_ins(folder)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task | {"num_samples": 2}) + "\n" for task in tasks))
    up = UpProcess(tmp_path / "up", script=SCRIPT, env=variables)
    try:
        assert up.ready(), "the service did not start"
        done = gangline("submit", tmp_path / "tasks.jsonl", "--wait", "--json", "--data", up.data)
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
        assert [task["rewards"] for task in found] == [[1.0, 0.0], [1.0, 0.0]]
    finally:
        up.close()


def test_the_table_is_in_both_files_alike() -> None:
    """As it is printed; the trainers' own readings of the files are in their own tests."""
    lines = listing("001-table-4.txt").splitlines()[1:]
    table = dict(line.split("\t") for line in lines)
    assert table["Training data"].endswith("293 tasks")
    verl = yaml.safe_load((EXAMPLE / "verl.yaml").read_text())
    settings = verl["settings"]
    rate = float(table["Learning rate"].replace("×10^{", "e").rstrip("}"))
    assert (verl["model"], verl["data"]["num_samples"]) == (table["Base checkpoint"], int(table["Samples per prompt"]))
    assert settings["data.train_batch_size"] == int(table["Rollout batch size"])
    assert settings["trainer.total_epochs"] == int(table["Epochs"])
    assert settings["actor_rollout_ref.actor.optim.lr"] == rate
    assert settings["actor_rollout_ref.actor.optim.weight_decay"] == float(table["Weight decay"])
    assert settings["algorithm.rollout_correction.rollout_is"] == "token"
    words = shlex.split((EXAMPLE / "slime_arguments.sh").read_text(), comments=True)
    option = dict(pairwise(words))
    assert option["--rollout-batch-size"] == table["Rollout batch size"]
    assert option["--n-samples-per-prompt"] == table["Samples per prompt"]
    assert float(option["--lr"]) == rate
    assert float(option["--weight-decay"]) == float(table["Weight decay"])
    assert option["--optimizer"] == table["Optimizer"].lower()
    assert 4 * int(option["--num-rollout"]) == 293 + 3, "one epoch, and what fills the last batch"
    assert "--use-tis" in words
    template = json.loads((EXAMPLE / "template.json").read_text())
    assert template["builder"]["strategy"] == table["Trace construction"]
