"""The learner: a Hugging Face causal model, its optimiser, and one update after another from samples.

It knows nothing of services and engines: samples in, metrics out, and its weights as a folder that engines load.
Weights, gradients and moments are float32, independent of the saved type and the type of computation.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedModel

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.training.learning.algorithms import Algorithm
from gangline.training.learning.compute.head import TokenScores, require_known_head
from gangline.training.learning.compute.lora import whole_weights, with_adapters
from gangline.training.learning.forward import loss_inputs, token_scores
from gangline.training.learning.learner_settings import LearnerSettings
from gangline.training.learning.loss import LossTotals, policy_loss
from gangline.training.learning.losses.reward_kl import adapted
from gangline.training.learning.packing import Batch, pack_all
from gangline.training.learning.samples import Sample

__all__ = ["Abandoned", "Learner"]

_log = logging.getLogger("gangline.learner")

_WEIGHTS, _OPTIMISER = "trained.safetensors", "optimiser.pt"


class Abandoned(Exception):
    """The caller no longer waits for this step; its update was not made."""


class Learner:
    """Not thread-safe: one call at a time, but for `abandon`."""

    def __init__(self, model_folder: Path, algorithm: Algorithm, settings: LearnerSettings, *, seed: int = 0) -> None:
        """seed: of the order of sessions, and of adapters' first weights.

        Raises: NotFound when the folder holds no model, InvalidRequest when the settings do not fit it.
        """
        self._algorithm = algorithm
        self._settings = settings
        self._order = np.random.default_rng(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._base = _load(model_folder, settings)
            self._model = with_adapters(self._base, settings.lora) if settings.lora else self._base
        if settings.last_layers is not None:
            _freeze_all_but(self._base, settings.last_layers)
        self._reward_kl = algorithm.reward_kl.coefficient
        """Coefficient of the next penalties."""
        needs_reference = algorithm.needs_reference or settings.reference_metric
        self._reference = self._frozen_copy() if needs_reference and not settings.lora else None
        trained = list(self._trained().values())
        self._optimiser = _optimiser(trained, settings)
        self._rates = LambdaLR(self._optimiser, settings.rate_factor)
        self._abandoned = threading.Event()
        _log.info("learner.ready parameters=%d trained=%d", _size(self._base.parameters()), _size(trained))

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on a batch once. Returns metrics: means over its trained tokens, or over its updates.

        Samples of advantage 0 count in the loss's means, and are computed only where a penalty, a bonus or such a mean
        needs their tokens.
        Raises: FloatingPointError when a gradient is not finite; nothing was changed by that update. Abandoned.
        """
        self._model.train()
        metrics = _Metrics()
        updates = [
            (list(pack_all(self._to_compute(part), self._settings.layout, max_places=self._settings.max_places)), part)
            for part in self._parts(samples)
        ]
        old = self._old_logprobs([batch for batches, _ in updates for batch in batches], len(updates))
        for batches, part in updates:
            self._update(batches, _totals(part), old, metrics)
        own = {"num_samples": float(len(samples)), "learning_rate": self._rate()}
        if self._algorithm.reward_kl.coefficient > 0:
            own["reward_kl_coefficient"] = self._reward_kl
        return metrics.means() | own

    def reward_penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Session id -> the KL penalty of its reward (`reward_kl`), by the weights as they are. Adapts the coefficient.

        Raises: Abandoned.
        """
        self._model.eval()
        penalties, means = dict[str, float](), list[float]()
        trained = [one for one in samples if (one.weights != 0).any()]
        for batch in self._wanted(pack_all(trained, self._settings.layout, max_places=self._settings.max_places)):
            with torch.no_grad():
                away = self._scores(self._base, batch).logprobs.double() - self._of_reference(batch).double()
            for number, sample in enumerate(batch.samples):
                mine = away[torch.from_numpy(batch.traces == number).to(away.device)]
                means.append(float(mine.mean()))
                total = self._reward_kl * float(mine.sum())
                penalties[sample.session_id] = penalties.get(sample.session_id, 0.0) + total
        if means:
            self._reward_kl = adapted(self._reward_kl, float(np.mean(means)), len(means), self._algorithm.reward_kl)
        return penalties

    def abandon(self) -> None:
        """End a running step before its next batch, and refuse later ones. Callable from any thread."""
        self._abandoned.set()

    def _wanted(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if self._abandoned.is_set():
                raise Abandoned
            yield batch

    def _rate(self) -> float:
        """Learning rate of the next update."""
        return float(self._rates.get_last_lr()[0])

    def _update(self, batches: Sequence[Batch], totals: LossTotals, old: dict[int, Tensor], metrics: _Metrics) -> None:
        self._optimiser.zero_grad()
        for batch in self._wanted(batches):
            logprobs, entropies = self._scores(self._base, batch)
            inputs = loss_inputs(
                batch,
                logprobs,
                entropies=entropies,
                old_logprobs=self._old_of(batch, logprobs, old),
                reference_logprobs=self._reference_logprobs(batch, is_first=metrics.is_empty),
            )
            result = policy_loss(inputs, self._algorithm.loss, totals)
            result.loss.backward()
            metrics.add(len(batch.targets), result.metrics | _mismatch(batch, old.get(id(batch), logprobs.detach())))
            metrics.sum("loss", float(result.loss.detach()))
        norm = float(torch.nn.utils.clip_grad_norm_(list(self._trained().values()), self._settings.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient is {norm}: lower the learning rate, or look at the batch's metrics."
            )
        if batches:
            self._optimiser.step()
            self._rates.step()
        metrics.add(1, {"grad_norm": norm})

    def _parts(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Sessions whole, in random order where there are several updates."""
        sessions = dict[str, list[Sample]]()
        for sample in samples:
            sessions.setdefault(sample.session_id, []).append(sample)
        num = min(self._settings.updates_per_batch, len(sessions))
        order = self._order.permutation(len(sessions)) if num > 1 else np.arange(len(sessions))
        listed = list(sessions.values())
        for part in np.array_split(order, max(num, 1)):
            yield [sample for index in map(int, part) for sample in listed[index]]

    def _to_compute(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those whose loss has a gradient. Under `session_mean` their sessions stay whole, for the means over them."""
        trained = [one for one in samples if (one.weights != 0).any()]
        if self._algorithm.loss.moves_all_tokens:
            return trained
        moving = [one for one in trained if (one.advantages != 0).any()]
        if self._algorithm.loss.aggregation != "session_mean":
            return moving
        sessions = {one.session_id for one in moving}
        return [one for one in trained if one.session_id in sessions]

    def _old_logprobs(self, batches: Sequence[Batch], num_updates: int) -> dict[int, Tensor]:
        """Log-probs of the policy before the first update; empty with one update, whose own are the same."""
        if num_updates == 1 or self._settings.old_logprobs == "engine":
            return {}
        with torch.no_grad():
            return {id(batch): self._scores(self._base, batch).logprobs for batch in self._wanted(batches)}

    def _old_of(self, batch: Batch, logprobs: Tensor, old: dict[int, Tensor]) -> Tensor | None:
        return None if self._settings.old_logprobs == "engine" else old.get(id(batch), logprobs.detach())

    def _reference_logprobs(self, batch: Batch, *, is_first: bool) -> Tensor | None:
        """is_first: of the step; only this one is measured where the loss does not need it."""
        wanted = self._algorithm.loss.kl.coefficient > 0 or (is_first and self._settings.reference_metric)
        if not wanted:
            return None
        return self._of_reference(batch)

    def _of_reference(self, batch: Batch) -> Tensor:
        """Log-probs [N] by the model as it was at first."""
        without_adapters = nullcontext() if self._settings.lora is None else cast("Any", self._model).disable_adapter()
        with torch.no_grad(), without_adapters:
            return self._scores(self._reference or self._base, batch).logprobs

    def _scores(self, model: PreTrainedModel, batch: Batch) -> TokenScores:
        is_mixed = self._settings.dtype == "bfloat16"
        # Not cached: copies of all weights in bfloat16 would live to the end of the forward pass.
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=is_mixed, cache_enabled=False):
            return token_scores(
                model,
                batch,
                chunk=self._settings.logits_chunk,
                entropy_has_gradient=self._algorithm.loss.entropy > 0,
            )

    def _frozen_copy(self) -> PreTrainedModel:
        """The model as it is, with trained weights copied and frozen ones shared."""
        shared = {id(one): one for one in self._base.parameters() if not one.requires_grad}
        return copy.deepcopy(self._base, shared).requires_grad_(False).eval()

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: one for name, one in self._model.named_parameters() if one.requires_grad}

    def save_weights(self, folder: Path) -> None:
        """The whole model as safetensors with its configuration, adapters merged: the form that engines load."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(whole_weights(self._base)), folder / "model.safetensors", metadata={"format": "pt"})
        self._base.config.save_pretrained(folder)

    def save_state(self, folder: Path) -> None:
        """All that going on needs: trained weights, optimiser, rate, order."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: one.detach().contiguous() for name, one in self._trained().items()}, folder / _WEIGHTS)
        state = {
            "optimiser": self._optimiser.state_dict(),
            "rates": self._rates.state_dict(),
            "reward_kl": self._reward_kl,
            "order": self._order.bit_generator.state,
        }
        torch.save(state, folder / _OPTIMISER)

    def load_state(self, folder: Path) -> None:
        """Raises: InvalidRequest when it was saved by a learner with other settings."""
        saved, trained = load_file(folder / _WEIGHTS), self._trained()
        if saved.keys() != trained.keys() or any(saved[name].shape != trained[name].shape for name in saved):
            raise InvalidRequest(f"{folder} was saved with other settings of model, lora or last_layers.")
        with torch.no_grad():
            for name, value in saved.items():
                trained[name].copy_(value)
        state = torch.load(folder / _OPTIMISER, weights_only=True, map_location=self._base.device)
        self._optimiser.load_state_dict(state["optimiser"])
        self._rates.load_state_dict(state["rates"])
        self._reward_kl = state["reward_kl"]
        self._order.bit_generator.state = state["order"]


class _Metrics:
    """Means by weight, largest values of keys that end in `_max`, and sums."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._other: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        return not self._sums

    def add(self, weight: float, values: dict[str, float]) -> None:
        for name, value in values.items():
            if name.endswith("_max"):
                self._other[name] = max(value, self._other.get(name, value))
            else:
                self._sums[name] = self._sums.get(name, 0.0) + weight * value
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def sum(self, name: str, value: float) -> None:
        self._other[name] = self._other.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        return {name: total / (self._weights[name] or 1.0) for name, total in self._sums.items()} | self._other


def _load(folder: Path, settings: LearnerSettings) -> PreTrainedModel:
    loader = cast("Any", AutoModelForCausalLM)
    try:
        model: PreTrainedModel = loader.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise NotFound(f"{folder} does not hold a model that can be loaded: {error}") from error
    name = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    wanted = settings.gradient_checkpointing
    if device.type != "cpu" if wanted is None else wanted:
        cast("Any", model).activation_checkpointing_enable({"use_reentrant": False})
    model = cast("PreTrainedModel", cast("Any", model).to(device))
    require_known_head(model)
    return model


def _optimiser(trained: Sequence[torch.nn.Parameter], settings: LearnerSettings) -> torch.optim.Optimizer:
    """The optimiser, in a form whose step needs no further copy of all weights together."""
    match settings.optimiser:
        case "adamw":
            return torch.optim.AdamW(
                trained,
                lr=settings.learning_rate,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                fused=all(one.is_cuda for one in trained) or None,
            )
        case "adafactor":
            return torch.optim.Adafactor(
                trained, lr=settings.learning_rate, weight_decay=settings.weight_decay, foreach=False
            )


def _freeze_all_but(model: PreTrainedModel, num_layers: int) -> None:
    layers = cast("Any", model).get_decoder().layers
    if num_layers > len(layers):
        raise InvalidRequest(f"last_layers is {num_layers}, and the model has {len(layers)} layers.")
    model.requires_grad_(False)
    for layer in layers[len(layers) - num_layers :]:
        layer.requires_grad_(True)


def _totals(samples: Sequence[Sample]) -> LossTotals:
    trained = [sample for sample in samples if (sample.weights != 0).any()]
    return LossTotals(
        num_tokens=sum(int(np.count_nonzero(sample.weights)) for sample in trained),
        num_traces=len(trained),
        num_sessions=len({sample.session_id for sample in trained}),
    )


def _mismatch(batch: Batch, logprobs: Tensor) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's for the same tokens, before the update."""
    behaviour = torch.as_tensor(batch.behaviour_logprobs, device=logprobs.device)
    gap = (logprobs.double() - behaviour).clamp(-20.0, 20.0)
    ratios = gap.exp()
    return {
        "engine_gap_mean": float(gap.abs().mean()),
        "engine_gap_max": float(gap.abs().max()),
        "engine_effective_sample_share": float(ratios.sum() ** 2 / (ratios.square().sum() * len(ratios))),
    }


def _size(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
