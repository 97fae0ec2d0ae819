"""SkyRL from a checkout or its unpacked wheel, on a CPU, and its trainer without workers.

Absent, and called by nothing of what is used: its engines, kernels, servers and stores, and what it registers at vLLM.
`skyrl.backends` is taken without the list of its backends, one of which needs JAX. Its types want Python 3.12 or
`typing_extensions`. Read at a956457 (2026-08-21) and in the wheel 0.4.0.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import typing_extensions

from support.training.absent_modules import importable

__all__ = ["of_skyrl", "skyrl_checkout", "skyrl_config", "skyrl_trainer"]

_ABSENT = (
    "cloudpathlib",
    "flash_attn",
    "pybase64",
    "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap",
    "uvicorn",
    "vllm",
    "zstandard",
)


@contextmanager
def skyrl_checkout(checkout: str) -> Iterator[None]:
    """Within it `skyrl` can be imported."""
    with (
        importable(checkout, *_ABSENT, bare=["skyrl.backends"]),
        importable(f"{checkout}/skyrl-gym"),
        mock.patch.object(typing, "TypedDict", typing_extensions.TypedDict),
    ):
        yield


def of_skyrl(module: str) -> Any:
    return importlib.import_module(f"skyrl.{module}")


def skyrl_config(*, num_prompts: int = 2, num_samples: int = 2, step_wise: bool = True) -> Any:
    cfg = of_skyrl("train.config").SkyRLTrainConfig()
    cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = num_prompts
    cfg.trainer.resume_mode = "none"
    cfg.trainer.enable_ray_gpu_monitor = cfg.generator.inference_engine.enable_ray_prometheus_stats = False
    cfg.trainer.algorithm.temperature = 1.0
    cfg.generator.n_samples_per_prompt = num_samples
    cfg.generator.step_wise_trajectories = step_wise
    return cfg


def skyrl_trainer(cfg: Any, generator: Any, *, num_ranks: int = 4) -> Any:
    """Its `RayPPOTrainer`, which has a tokenizer and ranks, and no workers."""
    trainer = of_skyrl("train.trainer").RayPPOTrainer(
        cfg=cfg,
        tracker=None,
        tokenizer=SimpleNamespace(pad_token_id=0),
        train_dataset=None,
        inference_engine_client=None,
        generator=generator,
    )
    trainer.dispatch = MagicMock(get_lcm_dp_size=lambda: num_ranks)
    return trainer
