"""Converts groups to prime-rl's `TrainingSample`s, and these to equal numbers of micro-batches per rank.

Law, in addition to the contract (`gangline.train.trainers.contract`): a row longer than `seq_len`, which prime-rl would
cut, is refused, or left out and logged.

Source: prime-rl, github.com/PrimeIntellect-ai/prime-rl at 559b447, `transports/rollouts/types.py`, `trainer/batch.py`,
`trainer/rl/loss.py` and `trainer/rl/train.py` (scale of the loss); at a608ad9, `transports/rollouts/types.py` (images).
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from gangline.domain.errors import InvalidRequest
from gangline.domain.image_files import placed_images
from gangline.domain.trajectory import Trace
from gangline.train.collecting.admission import StalenessSettings
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.loss_settings import LossSettings
from gangline.train.learning.masks import all_sampled
from gangline.train.learning.samples import Mask, Sample, make_samples, over_batch
from gangline.train.options import TrainingOptions
from gangline.train.trainers.contract import TrainerRow, rows_of
from gangline.train.trainers.pixels import image_refs, token_types

_log = logging.getLogger(__name__)

CONTRACT = 3
"""Version of the contract with trainers that this adapter fulfils."""


class PrimeSettings(TrainingOptions):
    """Settings that the trainer's configuration has too must have the same values here."""

    num_samples: int = Field(ge=2)
    """Sessions per group."""
    groups_per_step: int = Field(ge=1)
    seq_len: int = Field(ge=2)
    """prime-rl's `model.seq_len`."""
    max_steps: int = Field(ge=1)
    """prime-rl's `max_steps`: the last trained step."""
    start_step: int = Field(default=0, ge=0)
    """Step of the checkpoint that prime-rl resumes from; 0 for a new run."""
    first_version: int = Field(default=1, ge=1)
    """Policy version of the initial weights; must be above all versions that the service has had."""
    data_ranks: int = Field(default=1, ge=1)
    """Ranks that read files: the trainer's GPUs divided by `model.cp` (and by tensor and pipeline parallelism)."""
    pad_to_multiple_of: int = Field(default=1, ge=1)
    """prime-rl's `model.cp`."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the log-probs. It is stored in the rows, and prime-rl divides its logits by it."""
    long_rows: Literal["refuse", "leave_out"] = "refuse"
    """Treatment of rows of more than `seq_len` tokens. Sessions are compared before a row is left out."""
    router_replay: bool = False
    """prime-rl's `enable_router_replay`: rows contain the experts that the engine chose, and rows without them are
    refused.
    """
    sampling_replay: bool = False
    """Rows contain the ids that top-k and top-p left for each token, and prime-rl's log-probs are relative to them.
    Needs a prime-rl whose rows have a `SamplingMask`.
    """
    staleness: StalenessSettings = StalenessSettings()
    env_name: str = "gangline"
    """Name of the rows in prime-rl's metrics."""
    patience_s: float | None = Field(default=None, gt=0)
    """How long to wait for a broadcast. None: forever, as prime-rl waits for batches."""
    engine_patience_s: float = Field(default=600.0, ge=0)
    """How long engines, nodes and server may be unreachable when a broadcast is pushed."""

    @field_validator("env_name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name == "all":
            raise ValueError("prime-rl reserves the name `all`")
        return name


@dataclass(frozen=True, eq=False)
class PrimeSample:
    """A row for prime-rl and its source, which prime-rl's type cannot contain."""

    training_sample: Any
    """prime-rl's `TrainingSample`: the prompt, then the response. `mask`, `logprobs`, `advantages`, `temperatures`, and
    `rl_weights` if tokens have unequal weights, cover all tokens.
    """
    row: TrainerRow


def to_samples(
    groups: Sequence[Group], settings: PrimeSettings, algorithm: Algorithm, mask: Mask = all_sampled
) -> list[PrimeSample]:
    """One sample per trace, in the order of groups, sessions and traces, for the batch of one step.

    prime-rl averages its loss over the tokens of a batch. Another average set by the algorithm (`loss.aggregation`),
    such as equal weights for sessions, and the weights of the mask are passed as `rl_weights`. Fully masked traces are
    not sent. Other settings of the algorithm's loss must be set in prime-rl.

    Raises: InvalidGroup if a group is incomplete or of another temperature, InvalidRequest for a row that is too long.
    """
    algorithm.require_group_advantages("prime-rl")
    rows = [
        row
        for group in groups
        for row in rows_of(
            group,
            settings.num_samples,
            temperature=settings.temperature,
            takes_images=True,
            replays_experts=settings.router_replay,
            replays_masks=settings.sampling_replay,
        )
    ]
    samples = [
        sample
        for group in groups
        for sample in make_samples(group, algorithm, mask, takes_images=True, replays_masks=settings.sampling_replay)
    ]
    found = zip(rows, over_batch(samples, algorithm.advantage), strict=True)
    fitting = [(row, sample) for row, sample in found if sample.weights.any() and _fits(row, settings)]
    weights = _loss_weights([sample for _, sample in fitting], algorithm.loss)
    make = prime_rl("transports.rollouts.types").TrainingSample
    return [
        PrimeSample(make(**_fields(row, sample, weights_T, settings)), row)
        for (row, sample), weights_T in zip(fitting, weights, strict=True)
    ]


def pack(samples: Sequence[PrimeSample], settings: PrimeSettings, *, model_config: Any = None) -> list[list[Any]]:
    """prime-rl's `MicroBatch`es for each data rank, the same number for every rank.

    model_config: the model's Hugging Face configuration, to balance ranks by operations instead of tokens. Raises:
    InvalidRequest if there are no samples.
    """
    if not samples:
        raise InvalidRequest("prime-rl cannot train on a step without a row: collect more groups a step.")
    batch = prime_rl("trainer.batch")
    return batch.prepare_batch(
        [sample.training_sample for sample in samples],
        settings.seq_len,
        settings.data_ranks,
        batch.build_bin_cost(model_config),
        settings.pad_to_multiple_of,
    )


def prime_rl(module: str) -> Any:
    """A module of prime-rl. Raises: ImportError, with a remedy."""
    try:
        return importlib.import_module(f"prime_rl.{module}")
    except ImportError as error:
        raise ImportError(
            "prime-rl is not here, and its files are written by its own types: run this in the environment that "
            "prime-rl trains in (it is on no package index)."
        ) from error


def _fits(row: TrainerRow, settings: PrimeSettings) -> bool:
    """Raises: InvalidRequest."""
    length = len(row.prompt_ids) + len(row.response_ids)
    if length <= settings.seq_len:
        return True
    if settings.long_rows == "refuse":
        raise InvalidRequest(
            f"{row.trace_id} has {length} tokens, and seq_len is {settings.seq_len}: prime-rl would cut it. Raise "
            "model.seq_len and seq_len, leave such sessions out as they are collected (`DegenerateSettings.max_tokens`)"
            ", or set long_rows to leave_out."
        )
    _log.warning("prime_rl.row_left_out trace_id=%s tokens=%d seq_len=%d", row.trace_id, length, settings.seq_len)
    return False


def _loss_weights(samples: Sequence[Sample], loss: LossSettings) -> list[NDArray[np.float64]]:
    """[T] for each sample: factors with which the sum over tokens, divided by the number of trained tokens, is the
    wanted average.
    """
    trained = [int(np.count_nonzero(sample.weights)) for sample in samples]
    total = sum(trained)
    of_session = Counter[str]()
    for sample, number in zip(samples, trained, strict=True):
        of_session[sample.session_id] += number

    def factor(sample: Sample, number: int) -> float:
        match loss.aggregation:
            case "token_mean":
                return 1.0
            case "sequence_mean":
                return total / (len(samples) * number)
            case "session_mean":
                return total / (len(of_session) * of_session[sample.session_id])
            case "fixed_length":
                return total / (len(samples) * loss.fixed_length)

    return [
        sample.weights.astype(np.float64) * factor(sample, number)
        for sample, number in zip(samples, trained, strict=True)
    ]


def _fields(row: TrainerRow, sample: Sample, weights_T: NDArray[np.float64], settings: PrimeSettings) -> dict[str, Any]:
    """All lists cover prompt and response."""
    prompt = len(row.prompt_ids)
    is_trained = weights_T != 0
    fields: dict[str, Any] = {
        "token_ids": [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
        "mask": [*[False] * prompt, *is_trained.tolist()],
        "logprobs": [*[0.0] * prompt, *row.logprobs.tolist()],
        # For every token: prime-rl divides the logits that predict a token by the temperature of the previous one.
        "temperatures": [settings.temperature] * (prompt + len(row.response_ids)),
        "env_name": settings.env_name,
        "advantages": [*[0.0] * prompt, *(sample.advantages * is_trained).tolist()],
    }
    if not np.allclose(weights_T[is_trained], 1.0, rtol=0, atol=1e-12):
        fields["rl_weights"] = [*[0.0] * prompt, *weights_T.tolist()]
    return fields | _images(row.trace) | _experts(row) | _mask(row)


def _mask(row: TrainerRow) -> dict[str, Any]:
    """Counts for all tokens: 0 in the prompt, and for tokens drawn from the whole vocabulary.

    Source: prime-rl, github.com/PrimeIntellect-ai/prime-rl, `transports/rollouts/types.py` as of September 2026 (read).
    """
    if row.sampling_mask is None:
        return {}
    try:
        make = prime_rl("transports.rollouts.types").SamplingMask
    except AttributeError:
        raise InvalidRequest(
            "this version of prime-rl has no SamplingMask in its rows: take a newer one, or leave sampling_replay out."
        ) from None
    counts = np.concatenate([np.zeros(len(row.prompt_ids), np.int32), row.sampling_mask.counts])
    ids = row.sampling_mask.ids.astype(np.int32)
    return {"sampling_mask": make(ids=ids.tobytes(), counts=counts.tobytes())}


def _experts(row: TrainerRow) -> dict[str, Any]:
    """Bytes of all tokens. The last token was never an input; prime-rl also fills its place with zeros."""
    if row.routed_experts is None:
        return {}
    last = np.zeros((1, *row.routed_experts.shape[1:]), row.routed_experts.dtype)
    whole = np.concatenate([row.routed_experts, last])
    make = prime_rl("transports.rollouts.types").RoutedExperts
    return {"routed_experts": make(data=whole.tobytes(), shape=list(whole.shape), dtype=str(whole.dtype))}


def _images(trace: Trace) -> dict[str, Any]:
    """References to files: prime-rl's trainer runs the processor itself and checks the number of placeholders."""
    if not placed_images(trace):
        return {}
    types = prime_rl("transports.rollouts.types")
    refs = [
        types.MMImageRef(url=image_ref.url, offset=image_ref.offset, length=image_ref.length)
        for image_ref in image_refs(trace)
    ]
    return {"mm_refs": types.MMRefs(images=refs), "mm_token_type_ids": token_types(trace)}
