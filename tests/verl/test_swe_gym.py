"""examples/swe_gym for verl: its settings by verl's own loader and classes, and a dry run on this machine's CPU.

`support.service.swe_gym` names the stand-ins for images and agents, `support.training.verl_experiment` those for
GPUs, the engine and the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gangline.train.trainers.verl.check import check
from gangline.train.trainers.verl.experiment import arguments_of, read_verl_experiment
from support.service.swe_gym import EXAMPLE, stand_ins
from support.training.verl_experiment import ROOT, write_experiment

GANGLINE = (str(ROOT / ".venv" / "bin" / "python"), "-P", "-m", "gangline")

TABLE_4 = {
    "trainer.total_epochs": 1,
    "data.train_batch_size": 4,
    "actor_rollout_ref.rollout.n": 16,
    "actor_rollout_ref.model.path": "Qwen/Qwen3.5-4B",
    "actor_rollout_ref.actor.optim.optimizer": "AdamW",
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.1,
    "algorithm.adv_estimator": "grpo",
    "algorithm.rollout_correction.rollout_is": "token",
}


def document() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLE / "verl.yaml").read_text())


def checked(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """What verl makes of the file; its interpreter is this one."""
    whole = document() | {"python": sys.executable}
    whole["settings"] |= changes
    path = tmp_path / "verl.yaml"
    path.write_text(yaml.safe_dump(whole))
    return check(arguments_of(read_verl_experiment(path), tmp_path, "http://127.0.0.1:1"))


def at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


def test_verls_loader_takes_the_file_with_the_numbers_of_table_4(tmp_path: Path) -> None:
    found = checked(tmp_path)
    assert found["errors"] == []
    assert {key: at(found["config"], key) for key in TABLE_4} == TABLE_4
    gpus = [at(found["config"], f"{part}.n_gpus_per_node") for part in ("trainer", "actor_rollout_ref.rollout")]
    assert gpus == [4, 4]
    lengths = at(found["config"], "data.max_prompt_length") + at(found["config"], "data.max_response_length")
    assert lengths == at(found["config"], "actor_rollout_ref.rollout.max_model_len")


def test_verls_classes_of_the_workers_take_their_sections(tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    actor = omega_conf_to_dataclass(OmegaConf.create(checked(tmp_path)["config"]["actor_rollout_ref"]["actor"]))
    assert (actor.optim.lr, actor.optim.weight_decay, actor.clip_ratio_high) == (1e-6, 0.1, 0.28)


def test_a_number_of_the_wrong_type_or_name_is_an_error_of_verls(tmp_path: Path) -> None:
    """So that the test above can fail."""
    for wrong in ({"actor_rollout_ref.actor.optim.lr_": 1e-6}, {"trainer.v1.trainer_mode": "async"}):
        assert checked(tmp_path, **wrong)["errors"] != []


def test_its_trainer_for_separate_gpus_takes_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules that it states when it is made, before it starts anything."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import trainer_separate_async as module

    config = OmegaConf.create(checked(tmp_path)["config"])
    trainer = module.PPOTrainerSeparateAsync
    monkeypatch.setattr(trainer.__mro__[1], "__init__", lambda self, config: setattr(self, "config", config))
    trainer(config)
    config.data.train_batch_size = 8
    with pytest.raises(AssertionError, match="train_batch_size must equal"):
        trainer(config)


def test_verl_trains_on_two_generated_tasks(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The example's settings, but for those of the machine and sizes, and for the KL loss: its reference model pins
    memory, which PyTorch cannot do without a GPU.
    """
    folder = tmp_path_factory.mktemp("swe_gym") / "rows"
    folder.mkdir()
    tasks, variables = stand_ins(folder)
    spec = write_experiment(tmp_path, mode="colocate_async", num_workers=1, num_steps=2)
    own = json.loads(spec.read_text())
    kept = tuple(f"actor_rollout_ref.actor.{name}" for name in ("optim", "clip", "entropy"))
    theirs = {key: value for key, value in document()["settings"].items() if key.startswith(("algorithm", *kept))}
    own["settings"] |= theirs | {
        "data.train_batch_size": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    }
    del own["evaluation"]
    spec.write_text(json.dumps(own | {"name": "swe-gym", "data": {"tasks": "tasks.jsonl", "num_samples": 4}}))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GANGLINE_")}
    done = subprocess.run(
        [*GANGLINE, "train", "run", spec, "--data", tmp_path / "data", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)["metrics"]
    assert [one["step"] for one in metrics] == [1, 2]
    for one in metrics:
        assert one["critic/score/mean"] == 0.5
        assert one["actor/grad_norm"] > 0
        assert "rollout_corr/rollout_is_mean" in one
