"""Every key that the guide of verl shows, by the loader of verl's own command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "verl.md").read_text()
KEY = re.compile(r"^ +(\+?[a-z_]+(?:\.\w+)+): (\S+)", re.MULTILINE)


def composed(settings: dict[str, str]) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"{key}={value}" for key, value in settings.items()])


def test_verl_has_every_key_that_the_guide_sets() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    settings = {key: value for block in blocks for key, value in KEY.findall(block)}
    assert len(settings) >= 25
    config = composed(settings)
    for key, value in settings.items():
        assert str(OmegaConf.select(config, key.removeprefix("+"))).lower() == value.lower()
    actor = config.actor_rollout_ref.actor
    longest = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
    assert longest >= config.actor_rollout_ref.rollout.max_model_len, "verl refuses a row that fits into no batch"
    assert config.distillation.teacher_models.teacher_model.inference.max_model_len > longest
    assert config.trainer.n_gpus_per_node % actor.ulysses_sequence_parallel_size == 0


def test_verls_command_by_itself_is_one() -> None:
    (shown,) = re.findall(r"python -m verl.trainer.main_ppo(.*?)```", GUIDE, re.DOTALL)
    keys = dict(one.split("=", 1) for one in shown.replace("\\", "").split() if "=" in one)
    assert composed(keys).actor_rollout_ref.rollout.custom.gangline.url == "http://rollouts:8700"
