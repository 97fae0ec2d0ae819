"""Polar's section 4.2 on sixty generated tasks: generate, filter, split, train with TRL, evaluate, all on the CPU.

The commands are those of docs/guides/sft.md, with fewer steps of training.
"""

from __future__ import annotations

import copy
import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from support.engines.models import CONFIGS
from support.requirements import need_command, need_module
from support.service.cli_process import UpProcess, clean_environment, gangline
from support.training.trl_training import word_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "swe_sft"
PLANNED = {
    "camp/ledger": 2,
    "camp/stove": 3,
    "kennel/harness": 8,
    "kennel/sled": 9,
    "trail/map": 6,
    "trail/weather": 5,
}
"""Of ten tasks of each repository, those that the teacher solves."""

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of what datasets, TRL and their dependencies deprecate
    pytest.mark.usefixtures("_git"),
]


@pytest.fixture(scope="module")
def _git() -> None:
    need_command("git", "apt-get install git")


def example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLE / name, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=clean_environment(),
    )
    return done.stdout


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    path.write_text(example("tasks.py"))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tasks: Path, _git: None) -> Path:
    """A data folder with a session of each task."""
    up = UpProcess(tmp_path_factory.mktemp("up"), script=json.loads(example("teacher.py")))
    try:
        assert "server_url" in up.ready()
        done = gangline("submit", tasks, "--wait", "--json", "--data", up.data, timeout_s=300)
        assert done.returncode == 0, done.stderr
    finally:
        up.close()
    return up.data


@pytest.fixture(scope="module")
def corpus(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("corpus") / "set"
    done = gangline("data", "swe-*", "--resolved", "--out", folder, "--data", recorded, "--json")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)["dataset"]


def test_the_table_has_a_line_for_each_repository(corpus: tuple[Path, dict[str, Any]]) -> None:
    folder, made = corpus
    assert {one["name"]: one["num_accepted"] for one in made["strata"]} == PLANNED
    assert {one["num_attempts"] for one in made["strata"]} == {10}
    assert made["reasons"] == {"rejected: reward": 27}
    assert "| Total | 60 | 60 | 33 | 55.0% |" in (folder / "README.md").read_text()


def test_the_corpus_loads_with_every_repository_in_both_splits(corpus: tuple[Path, dict[str, Any]]) -> None:
    need_module("datasets", "pip install datasets")
    from datasets import load_dataset

    folder, _ = corpus
    splits = load_dataset(str(folder), cache_dir=str(folder.parent / "cache"))
    assert {name: len({row["metadata"]["repo"] for row in rows}) for name, rows in splits.items()} == {
        "train": 6,
        "test": 6,
    }
    rows = [row for rows in splits.values() for row in rows]
    assert Counter(row["metadata"]["repo"] for row in rows) == PLANNED
    for row in rows:
        talk = row["messages"]
        assert [message["role"] for message in talk[-3:]] == ["assistant", "tool", "assistant"]
        assert talk[-1]["content"] == "I fixed the function in core.py."
        assert row["metadata"]["problem_statement"] in talk[1]["content"]


def test_training_on_it_lowers_the_loss_on_the_test_split_and_the_model_is_evaluated(
    corpus: tuple[Path, dict[str, Any]], tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_module("trl", "make .dev")
    need_module("datasets", "pip install datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    train = runpy.run_path(str(EXAMPLE / "train.py"))["train"]
    loss = train(str(corpus[0]), None, 2, str(tmp_path / "sft"))
    assert loss["after"] < loss["before"] - 0.1
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(tasks.read_text().splitlines()[:2]))
    engine = f"embedded:{tmp_path / 'sft'}"
    done = gangline("eval", few, "--engine", engine, "--data", tmp_path / "data", "--json", timeout_s=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["whole"]["num_counted"] == 2


def test_trl_takes_the_sampled_tokens_as_they_are(recorded: Path, tmp_path: Path) -> None:
    need_module("trl", "make .dev")
    need_module("datasets", "pip install datasets")
    from datasets import load_dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    done = gangline("data", "swe-camp__*", "--kind", "tokens", "--out", tmp_path / "set", "--data", recorded)
    assert done.returncode == 0, done.stderr
    rows = load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))["train"]
    settings = SFTConfig(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, bf16=False, max_length=None, report_to="none"
    )
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]))
    model.resize_token_embeddings(1 + max(max(ids) for ids in rows["input_ids"]))
    trainer = SFTTrainer(model, settings, train_dataset=rows, processing_class=word_tokenizer())
    labels = trainer.train_dataset[0]["labels"]
    ids, mask = rows[0]["input_ids"], rows[0]["assistant_masks"]
    assert labels == [one if sampled else -100 for one, sampled in zip(ids, mask, strict=True)]
    assert trainer.train().training_loss > 0
