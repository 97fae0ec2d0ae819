"""examples/swe_gym for verl: its settings by verl's own loader, classes and trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gangline.train.trainers.verl.check import check
from gangline.train.trainers.verl.experiment import arguments_of, read_verl_experiment
from support.service.swe_gym import EXAMPLE

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
