"""prime-rl from a checkout, and its trainer's loop on a CPU: its own files, batches, loss and broadcasts, in its order.

Its `train` itself asks for CUDA, so its steps are repeated here after `trainer/rl/train.py` at 559b447 (2026-08-21).
Absent, and called by nothing of what is used: GPU packages and loggers. `prime_rl.trainer.models` is taken without its
list of model classes, which imports Triton.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from support.training.absent_modules import importable

__all__ = ["PrimeTrainer", "of_prime_rl", "prime_loss", "prime_rl_checkout", "train_in_background", "trainer_logprobs"]

Watch = Callable[[dict[str, Any], torch.Tensor], None]
"""(a micro-batch, the trainer's log-probs of its tokens [1, T])"""

_ABSENT = ("wandb", "torchtitan", "vllm", "verifiers", "modelexpress", "nixl", "pynvml", "grpc")


@contextmanager
def prime_rl_checkout(checkout: str) -> Iterator[None]:
    """Within it `prime_rl` can be imported."""
    with (
        importable(f"{checkout}/src", *_ABSENT, bare=["prime_rl.trainer.models"]),
        importable(f"{checkout}/packages/prime-rl-configs/src"),
    ):
        of_prime_rl("trainer.models").PreTrainedModelPrimeRL = of_prime_rl("trainer.models.base").PreTrainedModelPrimeRL
        yield


def of_prime_rl(module: str) -> Any:
    return importlib.import_module(f"prime_rl.{module}")


class PrimeTrainer:
    """One data rank. config: fields of prime-rl's `TrainerConfig`; its loader reads them."""

    def __init__(self, trained: Any, /, **config: Any) -> None:
        self.config = of_prime_rl("configs.trainer").TrainerConfig(**config)
        self._model = trained
        self._optimiser = torch.optim.AdamW(trained.parameters(), lr=self.config.optim.lr)
        weights = of_prime_rl("transports.weights.filesystem").FileSystemWeightBroadcast
        self._broadcast = weights(self.config.output_dir, self.config.weight_broadcast)

    def train(self, watch: Watch) -> None:
        """Until `max_steps`."""
        config = self.config
        data = of_prime_rl("trainer.rl.data").DataLoader(config.output_dir, 1, 1, config.rollout_transport)
        self._broadcast.broadcast_weights(self._model, step=0)
        for step in range(1, config.max_steps + 1):
            data.wait_for_batch()
            micro_batches = data.get_batch()
            scale = max(sum(_num_trained(one) for one in micro_batches), 1)
            for one in micro_batches:
                logprobs = trainer_logprobs(self._model, one)
                watch(one, logprobs.detach())
                prime_loss(one, logprobs, config.loss, scale).backward()
            self._optimiser.step()
            self._optimiser.zero_grad()
            self._broadcast.broadcast_weights(self._model, step=step)
            self._broadcast.maybe_clean(step, None)


def train_in_background(trainer: PrimeTrainer, watch: Watch) -> asyncio.Future[None]:
    """In a thread that nothing waits for: a trainer whose batch never comes waits for ever."""
    ended = Future[None]()

    def run() -> None:
        try:
            trainer.train(watch)
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name="prime-rl", daemon=True).start()
    return asyncio.wrap_future(ended)


def _num_trained(one: dict[str, Any]) -> int:
    weights = one["rl_weights"]
    return int(one["loss_mask"].sum() if weights is None else (one["loss_mask"] & (weights != 0)).sum())


def trainer_logprobs(model: Any, one: dict[str, Any]) -> torch.Tensor:
    """[1, T], of each token by those before it in its sample, as the trainer computes and shifts them."""
    loss = of_prime_rl("trainer.rl.loss")
    logits = [
        model(input_ids=ids, use_cache=False).logits
        for ids in one["input_ids"].split(one["seq_lens"].tolist(), dim=1)  # its attention is bounded by them
    ]
    scaled = torch.cat(logits, dim=1) / one["temperatures"].unsqueeze(-1)
    labels = loss.shift_tensor_left(one["input_ids"])
    return loss.shift_tensor_right(scaled.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1))


def prime_loss(one: dict[str, Any], logprobs: torch.Tensor, settings: Any, scale: int) -> torch.Tensor:
    loss = of_prime_rl("trainer.rl.loss")

    def parts(values: torch.Tensor | None) -> Any:
        return None if values is None else values.squeeze(0).split(one["sequence_lengths"])

    return loss.compute_loss(
        trainer_logprobs=parts(logprobs),
        inference_logprobs=parts(one["inference_logprobs"]),
        ref_logprobs=None,
        advantages=parts(one["advantages"]),
        loss_mask=parts(one["loss_mask"]),
        rl_weights=parts(one["rl_weights"]),
        ce_weights=None,
        ref_kl_weights=None,
        rl_loss_fn=loss.setup_rl_loss_fn(settings),
        rl_scale=scale,
        ce_scale=1,
        ref_kl_scale=1,
    )[0]
