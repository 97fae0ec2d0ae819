"""TRL's own `AsyncGRPOTrainer` on a CPU.

Its attention asks for a FlashAttention 3 kernel of the Hub, which is for GPUs: here the same function is computed by
PyTorch, segment by segment. It also asks for the name of its GPU, to log a share of its peak. All else is TRL's, in
1.16.0.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["async_config", "make_async_trainer", "of_trl", "on_a_cpu"]


def of_trl(module: str) -> Any:
    return importlib.import_module(f"trl.experimental.async_grpo.{module}")


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    _longest_q: int,
    _longest_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """[tokens, heads, width]: each segment attends to its keys, of which its own tokens are the last."""
    assert causal
    assert window_size == (-1, -1)
    parts = list[Tensor]()
    for number in range(len(bounds_q) - 1):
        q = query[bounds_q[number] : bounds_q[number + 1]].transpose(0, 1)
        k, v = (one[bounds_k[number] : bounds_k[number + 1]].transpose(0, 1) for one in (key, value))
        k, v = (one.repeat_interleave(len(q) // len(one), dim=0) for one in (k, v))
        places, before = q.shape[1], k.shape[1]
        seen = torch.ones(places, before, dtype=torch.bool).tril(before - places)
        scores = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale)
        parts.append(scores.transpose(0, 1))
    return torch.cat(parts)


@contextmanager
def on_a_cpu() -> Iterator[None]:
    kernel = SimpleNamespace(flash_attn_varlen_func=_varlen)
    with (
        mock.patch.object(of_trl("packing"), "_flash_attn", return_value=kernel),
        mock.patch.object(of_trl("async_grpo_trainer"), "get_peak_flops_per_device", return_value=None),
    ):
        yield


def async_config(folder: Path, **settings: Any) -> Any:
    chosen = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "token_budget": -1,
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "dtype": "float32",
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    } | settings
    return of_trl("async_grpo_config").AsyncGRPOConfig(**chosen)


def make_async_trainer(model: Path, args: Any, rollouts: Any, tokenizer: Any) -> Any:
    """Its dataset only counts."""
    datasets = importlib.import_module("datasets")
    return of_trl("async_grpo_trainer").AsyncGRPOTrainer(
        model=str(model),
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["any"] * 4}),
        processing_class=tokenizer,
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )
