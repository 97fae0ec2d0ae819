"""The learner: a Hugging Face causal model and its optimiser, which make updates from samples.

It does not depend on services or engines: it takes samples, returns metrics, and saves its weights as a folder that
engines load. Weights, gradients and moments are float32, whatever the saved and computation dtypes.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from gangline.domain.errors import InvalidRequest
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.compute.head import TokenScores
from gangline.train.learning.compute.loading import freeze_all_but, load_model
from gangline.train.learning.compute.lora import save_merged, with_adapters
from gangline.train.learning.compute.metrics import StepMetrics, engine_mismatch
from gangline.train.learning.compute.optimiser import optimiser_of
from gangline.train.learning.compute.token_baseline import with_optimal_baseline
from gangline.train.learning.credit.critic.head import ValueHead, value_head_of
from gangline.train.learning.credit.critic.targets import Rewarded, ValueTargets, estimate_batches
from gangline.train.learning.forward import loss_inputs, token_scores
from gangline.train.learning.learner_settings import LearnerSettings
from gangline.train.learning.loss import LossInputs, LossTotals, policy_loss
from gangline.train.learning.losses.reward_kl import adapted
from gangline.train.learning.losses.values import value_loss
from gangline.train.learning.packing import Batch, pack_all
from gangline.train.learning.samples import Sample

_log = logging.getLogger("gangline.learner")

_WEIGHTS, _OPTIMISER = "trained.safetensors", "optimiser.pt"


T = TypeVar("T")


class Abandoned(Exception):
    """The caller no longer waits for this step; its update was not applied."""


class _Prepared(NamedTuple):
    """A batch of an update, with values computed before the step's first update."""

    batch: Batch
    old_logprobs: Tensor | None
    """[N]; None if not needed."""
    targets: ValueTargets | None
    """None without a critic."""


class Learner:
    """Not thread-safe: one call at a time, except `abandon`."""

    def __init__(self, model_folder: Path, algorithm: Algorithm, settings: LearnerSettings, *, seed: int = 0) -> None:
        """seed: for the order of sessions and the adapters' initial weights.

        Raises: NotFound if the folder contains no model, InvalidRequest if the settings do not fit it.
        """
        self._algorithm = algorithm
        self._settings = settings
        self._order = np.random.default_rng(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._base = load_model(model_folder, settings)
            self._model = with_adapters(self._base, settings.lora) if settings.lora else self._base
        if settings.last_layers is not None:
            freeze_all_but(self._base, settings.last_layers)
        self._reward_kl = algorithm.reward_kl.coefficient
        """Coefficient of the next penalties."""
        needs_reference = algorithm.needs_reference or settings.reference_metric
        self._reference = self._frozen_copy() if needs_reference and not settings.lora else None
        self._critic = None if algorithm.critic is None else value_head_of(self._base, algorithm.critic)
        trained = list(self._trained().values())
        self._optimiser = optimiser_of(trained, self._critic, algorithm.critic, settings)
        self._rates = LambdaLR(self._optimiser, settings.rate_factor)
        self._abandoned = threading.Event()
        _log.info("learner.ready parameters=%d trained=%d", _size(self._base.parameters()), _size(trained))

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on a batch once. Returns metrics: means over its trained tokens or over its updates.

        Samples of advantage 0 count in the loss's means, but are only computed if a penalty, a bonus or such a mean
        needs their tokens. With a critic, all samples are computed once more before the first update, because their
        advantages depend on its values. Raises: FloatingPointError if a gradient is not finite (that update changes
        nothing), Abandoned.
        """
        self._model.train()
        metrics = StepMetrics()
        updates = [
            (list(self._packed(_to_compute(part, self._algorithm))), part)
            for part in _parts(samples, self._settings.updates_per_batch, self._order)
        ]
        found = self._prepared([batch for batches, _ in updates for batch in batches], len(updates), metrics)
        prepared = iter(found)
        for batches, part in updates:
            self._update(list(itertools.islice(prepared, len(batches))), _totals(part), metrics)
        own = {"num_samples": float(len(samples)), "learning_rate": self._rate()}
        if self._algorithm.reward_kl.coefficient > 0:
            own["reward_kl_coefficient"] = self._reward_kl
        return metrics.means() | own

    def reward_penalties(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Session id -> the KL penalty of its reward (`reward_kl`) under the current weights. Adapts the coefficient.

        Raises: Abandoned.
        """
        self._model.eval()
        penalties, means = dict[str, float](), list[float]()
        trained = [one for one in samples if (one.weights != 0).any()]
        for batch in self._wanted(self._packed(trained)):
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

    def _packed(self, samples: Sequence[Sample]) -> Iterator[Batch]:
        return pack_all(samples, self._settings.layout, max_places=self._settings.max_places)

    def abandon(self) -> None:
        """Stop a running step before its next batch, and refuse later ones. Callable from any thread."""
        self._abandoned.set()

    def _wanted(self, batches: Iterable[T]) -> Iterator[T]:
        for batch in batches:
            if self._abandoned.is_set():
                raise Abandoned
            yield batch

    def _rate(self) -> float:
        """Learning rate of the next update."""
        return float(self._rates.get_last_lr()[0])

    def _update(self, batches: Sequence[_Prepared], totals: LossTotals, metrics: StepMetrics) -> None:
        self._optimiser.zero_grad()
        for batch, old_logprobs, targets in self._wanted(batches):
            scores = self._scores(self._base, batch, self._critic)
            inputs = loss_inputs(
                batch,
                scores.logprobs,
                entropies=scores.entropies,
                old_logprobs=self._old_of(old_logprobs, scores.logprobs),
                reference_logprobs=self._reference_logprobs(batch, is_first=metrics.is_empty),
            )
            result = policy_loss(inputs, self._algorithm.loss, totals)
            loss = result.loss
            if targets is not None:
                loss = loss + self._value_loss(scores, targets, inputs, totals, metrics)
            loss.backward()
            before = scores.logprobs.detach() if old_logprobs is None else old_logprobs
            metrics.add(len(batch.targets), result.metrics | engine_mismatch(batch, before))
            metrics.sum("loss", float(result.loss.detach()))
        # Clipped separately: a bad critic must not shrink the policy's step.
        norms = {"grad_norm": self._clip(self._trained().values())}
        if self._critic is not None:
            norms["value_grad_norm"] = self._clip(self._critic.parameters())
        if batches:
            self._optimiser.step()
            self._rates.step()
        metrics.add(1, norms)

    def _clip(self, parameters: Iterable[torch.nn.Parameter]) -> float:
        """The norm of the gradient before it is clipped. Raises: FloatingPointError."""
        norm = float(torch.nn.utils.clip_grad_norm_(list(parameters), self._settings.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient is {norm}: lower the learning rate, or look at the batch's metrics."
            )
        return norm

    def _value_loss(
        self, scores: TokenScores, targets: ValueTargets, inputs: LossInputs, totals: LossTotals, metrics: StepMetrics
    ) -> Tensor:
        assert scores.values is not None
        assert self._algorithm.critic is not None
        loss, found = value_loss(
            scores.values,
            targets.values,
            targets.returns,
            inputs,
            self._algorithm.loss,
            clip=self._algorithm.critic.clip,
            totals=totals,
        )
        metrics.add(len(scores.values), found)
        metrics.sum("value_loss", float(loss.detach()))
        return loss

    def _prepared(self, batches: Sequence[Batch], num_updates: int, metrics: StepMetrics) -> list[_Prepared]:
        """The step's batches with values computed before the first update.

        With a single update, its own log-probs are the old ones.
        """
        is_old = num_updates > 1 and self._settings.old_logprobs == "trainer"
        if not is_old and not self._algorithm.follows_from_scores:
            return [_Prepared(batch, None, None) for batch in batches]
        with torch.no_grad():
            before = [self._scores(self._base, batch, self._critic) for batch in self._wanted(batches)]
        old = [one.logprobs if is_old else None for one in before]
        if self._algorithm.token_baseline is not None:
            is_corrected = self._settings.old_logprobs == "trainer"
            batches = with_optimal_baseline(batches, before, self._algorithm, is_corrected=is_corrected)
        if self._algorithm.critic is None:
            return [_Prepared(*one, None) for one in zip(batches, old, strict=True)]
        rewarded = [
            Rewarded(batch.rewards, batch.traces, one.values)
            for batch, one in zip(batches, before, strict=True)
            if one.values is not None
        ]
        found = estimate_batches(rewarded, self._algorithm.critic, self._algorithm.advantage)
        metrics.add(1, found.metrics)
        advantages = zip(batches, found.advantages, strict=True)
        batches = [replace(batch, advantages=mine) for batch, mine in advantages]
        return [_Prepared(*one) for one in zip(batches, old, found.targets, strict=True)]

    def _old_of(self, old_logprobs: Tensor | None, logprobs: Tensor) -> Tensor | None:
        if self._settings.old_logprobs == "engine":
            return None
        return logprobs.detach() if old_logprobs is None else old_logprobs

    def _reference_logprobs(self, batch: Batch, *, is_first: bool) -> Tensor | None:
        """is_first: whether this is the step's first batch; only that one is measured if the loss does not need it."""
        wanted = self._algorithm.loss.kl.coefficient > 0 or (is_first and self._settings.reference_metric)
        if not wanted:
            return None
        return self._of_reference(batch)

    def _of_reference(self, batch: Batch) -> Tensor:
        """Log-probs [N] under the initial model."""
        without_adapters = nullcontext() if self._settings.lora is None else cast("Any", self._model).disable_adapter()
        with torch.no_grad(), without_adapters:
            return self._scores(self._reference or self._base, batch).logprobs

    def _scores(self, model: PreTrainedModel, batch: Batch, critic: ValueHead | None = None) -> TokenScores:
        is_mixed = self._settings.dtype == "bfloat16"
        # Not cached: bfloat16 copies of all weights would live until the end of the forward pass.
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=is_mixed, cache_enabled=False):
            return token_scores(
                model,
                batch,
                chunk=self._settings.logits_chunk,
                entropy_has_gradient=self._algorithm.loss.entropy > 0,
                critic=critic,
                with_squares=self._algorithm.token_baseline is not None and not torch.is_grad_enabled(),
            )

    def _frozen_copy(self) -> PreTrainedModel:
        """A copy of the current model, with trained weights copied and frozen ones shared."""
        shared = {id(parameter): parameter for parameter in self._base.parameters() if not parameter.requires_grad}
        return copy.deepcopy(self._base, shared).requires_grad_(False).eval()

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: one for name, one in self._model.named_parameters() if one.requires_grad}

    def _saved(self) -> dict[str, torch.nn.Parameter]:
        """All parameters that the optimiser updates, including the critic's head."""
        head = {} if self._critic is None else dict(self._critic.named_parameters(prefix="critic"))
        return self._trained() | head

    def save_weights(self, folder: Path) -> None:
        """Save the whole model without the critic as safetensors with its configuration and merged adapters, as engines
        load it. Copies of one file's weights are in memory at a time.
        """
        save_merged(self._base, folder, getattr(torch, self._settings.push_dtype))

    def save_state(self, folder: Path) -> None:
        """Save the state needed to resume: trained weights, optimiser, rate, order."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: one.detach().contiguous() for name, one in self._saved().items()}, folder / _WEIGHTS)
        state = {
            "optimiser": self._optimiser.state_dict(),
            "rates": self._rates.state_dict(),
            "reward_kl": self._reward_kl,
            "order": self._order.bit_generator.state,
        }
        torch.save(state, folder / _OPTIMISER)

    def load_state(self, folder: Path) -> None:
        """Raises: InvalidRequest if it was saved by a learner with other settings."""
        saved, trained = load_file(folder / _WEIGHTS), self._saved()
        if saved.keys() != trained.keys() or any(saved[name].shape != trained[name].shape for name in saved):
            raise InvalidRequest(f"{folder} was saved with other settings of model, lora, last_layers or critic.")
        with torch.no_grad():
            for name, value in saved.items():
                trained[name].copy_(value)
        state = torch.load(folder / _OPTIMISER, weights_only=True, map_location=self._base.device)
        self._optimiser.load_state_dict(state["optimiser"])
        self._rates.load_state_dict(state["rates"])
        self._reward_kl = state["reward_kl"]
        self._order.bit_generator.state = state["order"]


def _totals(samples: Sequence[Sample]) -> LossTotals:
    trained = [sample for sample in samples if (sample.weights != 0).any()]
    return LossTotals(
        num_tokens=sum(int(np.count_nonzero(sample.weights)) for sample in trained),
        num_traces=len(trained),
        num_sessions=len({sample.session_id for sample in trained}),
    )


def _size(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _parts(samples: Sequence[Sample], num_parts: int, order: np.random.Generator) -> Iterator[list[Sample]]:
    """Whole sessions, in random order if there are several parts."""
    sessions = dict[str, list[Sample]]()
    for sample in samples:
        sessions.setdefault(sample.session_id, []).append(sample)
    num = min(num_parts, len(sessions))
    indices = order.permutation(len(sessions)) if num > 1 else np.arange(len(sessions))
    listed = list(sessions.values())
    for part in np.array_split(indices, max(num, 1)):
        yield [sample for index in map(int, part) for sample in listed[index]]


def _to_compute(samples: Sequence[Sample], algorithm: Algorithm) -> list[Sample]:
    """Samples whose loss has a gradient. Under `session_mean` their sessions stay whole for the means."""
    trained = [sample for sample in samples if (sample.weights != 0).any()]
    if algorithm.moves_all_tokens:
        return trained
    moving = [one for one in trained if (one.advantages != 0).any()]
    if algorithm.loss.aggregation != "session_mean":
        return moving
    sessions = {one.session_id for one in moving}
    return [one for one in trained if one.session_id in sessions]
