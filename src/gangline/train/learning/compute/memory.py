"""The memory of a training step, computed from the model's configuration and the learner's settings.

Weights, gradients and moments are exact: the model is built without its weights (PyTorch's device `meta`) and its
parameters are counted. Activations are derived from the layers' operations, for Llama-like models (Llama, Qwen 2 and 3,
SmolLM, Mistral): activations kept for the backward pass, and the working memory of one layer or of one chunk of logits.
Tests compare them with the bytes of real tensors. The allocator's fragmentation and the CUDA context are not included:
leave a tenth of the card free.

Per token and decoder layer, with H the hidden size, I the intermediate size, Q and K the widths of queries and of keys,
and b the bytes per number in the computation dtype:

    kept without checkpointing   2 norms of 2 float32 copies: 16 H · their outputs: 10 H (bfloat16), 8 H (float32)
                                 queries, attention's output twice: 3 Q b · keys, values: 2 K b · MLP: 4 I b
                                 and, in bfloat16, the layer's weights as they were cast
    kept with checkpointing      the layer's input in float32: 4 H

The residual stream is float32 for both dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.train.learning.learner_settings import PUSHED_AT_ONCE, LearnerSettings, LoraSettings

GIB = 1024**3


class Shape(NamedTuple):
    """The sizes of a model that memory depends on. Created by `read_shape`."""

    num_parameters: int
    layer_parameters: int
    """Parameters of one decoder layer."""
    linears: tuple[tuple[str, int, int], ...]
    """Name, inputs and outputs of one decoder layer's matrices."""
    matrices: tuple[tuple[int, int], ...]
    """Rows and columns of every matrix."""
    num_layers: int
    hidden: int
    intermediate: int
    queries: int
    """Heads times their width."""
    keys: int
    vocabulary: int


@dataclass(frozen=True)
class StepMemory:
    """Bytes."""

    weights: int
    """Float32, including adapters."""
    gradients: int
    moments: int
    """State of the optimiser."""
    reference: int
    """Weights of the frozen copy for the KL divergence."""
    activations: int
    """Kept for the backward pass."""
    layer: int
    """Working memory of one layer's backward pass."""
    logits: int
    """Working memory of one chunk of logits, never needed at the same time as `layer`."""
    push: int
    """Copies of weights while they are saved for engines, between two steps."""

    @property
    def total(self) -> int:
        lasting = self.weights + self.gradients + self.moments + self.reference
        return lasting + max(self.activations + max(self.layer, self.logits), self.push)


class RunDisk(NamedTuple):
    """Bytes of a run's folder at most, while one more of each is written."""

    pushed: int
    checkpoints: int
    model: int
    """Written at its end."""


def run_disk(shape: Shape, settings: LearnerSettings, *, keep_weights: int, keep_checkpoints: int) -> RunDisk:
    trained = _num_trained(shape, settings)
    return RunDisk(
        pushed=(keep_weights + 1) * _push_bytes(settings) * shape.num_parameters,
        checkpoints=(keep_checkpoints + 1) * (4 * trained + _moments(shape, settings, trained)),
        model=_push_bytes(settings) * shape.num_parameters,
    )


def _push_bytes(settings: LearnerSettings) -> int:
    return 2 if settings.push_dtype == "bfloat16" else 4


def step_memory(
    shape: Shape, settings: LearnerSettings, *, num_places: int, checkpointing: bool, has_reference: bool = False
) -> StepMemory:
    """num_places: tokens computed at a time; a row longer than `max_places` is computed whole. checkpointing: the
    resolved `gradient_checkpointing`. has_reference: whether a KL divergence from the reference model is measured or
    penalised.
    """
    trained = _num_trained(shape, settings)
    num_adapters = trained if settings.lora else 0
    b = 2 if settings.dtype == "bfloat16" else 4
    kept = _kept_in_layer(shape, b)
    num_kept = min(settings.last_layers or shape.num_layers, shape.num_layers)  # frozen layers before them keep nothing
    is_head_trained = settings.lora is None and settings.last_layers is None
    return StepMemory(
        weights=4 * (shape.num_parameters + num_adapters),
        gradients=4 * trained,
        moments=_moments(shape, settings, trained),
        reference=4 * trained if has_reference and settings.lora is None else 0,
        activations=num_places * (num_kept * (4 * shape.hidden if checkpointing else kept) + 3 * 4 * shape.hidden)
        + (num_kept * 2 * shape.layer_parameters if b == 2 and not checkpointing else 0),
        # Checkpointed: the layer's activations again. In both cases: gradients of the MLP's three products, and weights
        # and their gradients in the computation dtype.
        layer=num_places * ((kept if checkpointing else 0) + 3 * b * shape.intermediate + 8 * shape.hidden)
        + (2 * b * shape.layer_parameters if b == 2 else 0),
        # Logits and their gradient in the computation dtype and four float32 copies; the cast weight, and its gradient
        # before it is added.
        logits=settings.logits_chunk * shape.vocabulary * (2 * b + 16)
        + shape.vocabulary * shape.hidden * ((2 if b == 2 else 0) + (b % 4 + 4 if is_head_trained else 0)),
        push=_pushed_at_once(shape, settings),
    )


def _pushed_at_once(shape: Shape, settings: LearnerSettings) -> int:
    """Copies in one file, and of the largest matrix while it is merged; weights saved as they are take none."""
    if settings.lora is None and settings.push_dtype == "float32":
        return 0
    largest = max(rows * columns for rows, columns in shape.matrices)
    size = _push_bytes(settings) * shape.num_parameters
    return min(size, max(PUSHED_AT_ONCE, _push_bytes(settings) * largest)) + (8 * largest if settings.lora else 0)


def _kept_in_layer(shape: Shape, b: int) -> int:
    """Bytes per token."""
    norms = 16 * shape.hidden + (10 if b == 2 else 8) * shape.hidden
    return norms + b * (3 * shape.queries + 2 * shape.keys + 4 * shape.intermediate)


def _num_trained(shape: Shape, settings: LearnerSettings) -> int:
    if settings.lora is not None:
        return _num_in_adapters(shape, settings.lora)
    if settings.last_layers is not None:
        return min(settings.last_layers, shape.num_layers) * shape.layer_parameters
    return shape.num_parameters


def _num_in_adapters(shape: Shape, lora: LoraSettings) -> int:
    wanted = [ins + outs for name, ins, outs in shape.linears if lora.targets == "all-linear" or name in lora.targets]
    return shape.num_layers * lora.rank * sum(wanted)


def _moments(shape: Shape, settings: LearnerSettings, trained: int) -> int:
    if settings.optimiser == "adamw":
        return 8 * trained
    return 4 * sum(rows + columns for rows, columns in shape.matrices)  # an upper bound: counts every matrix


def read_shape(config: Path) -> Shape:
    """config: a model's folder or its config.json. Neither downloads nor reads weights.

    Raises: NotFound, InvalidRequest if the model is not Llama-like.
    """
    try:
        read = cast("Any", AutoConfig).from_pretrained(str(config), local_files_only=True)
        with torch.device("meta"):
            model = cast("Any", AutoModelForCausalLM).from_config(read)
    except (OSError, ValueError) as error:
        raise NotFound(f"{config} does not hold a model's configuration: {error}") from error
    read = read.get_text_config()
    if any(getattr(read, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise InvalidRequest(f"{config} is a mixture of experts: its activations are not known here.")
    layers = model.get_decoder().layers
    linears = [(name, one) for name, one in layers[0].named_modules() if isinstance(one, torch.nn.Linear)]
    width = getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads
    return Shape(
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        layer_parameters=sum(parameter.numel() for parameter in layers[0].parameters()),
        linears=tuple((name.rpartition(".")[2], one.in_features, one.out_features) for name, one in linears),
        matrices=tuple(
            (parameter.shape[0], parameter.shape[1]) for parameter in model.parameters() if parameter.dim() == 2
        ),
        num_layers=len(layers),
        hidden=read.hidden_size,
        intermediate=read.intermediate_size,
        queries=read.num_attention_heads * width,
        keys=read.num_key_value_heads * width,
        vocabulary=read.vocab_size,
    )
