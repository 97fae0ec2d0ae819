"""The forward pass: log-probs of a batch's trained tokens by a Hugging Face causal model.

The tree and packed layouts need a model whose attention takes a 4D mask (eager, or PyTorch's scaled dot product) in
every layer: no sliding windows, and no state that runs along the row as in Mamba.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gangline.training.learning.loss import LossInputs
from gangline.training.learning.packing import Batch

__all__ = ["CausalModel", "loss_inputs", "token_logprobs"]


class CausalModel(Protocol):
    """A `transformers` causal language model, or an object with the same call."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self, *, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool, logits_to_keep: Any
    ) -> Any:
        """An object with `logits` [R, places, vocabulary]. logits_to_keep: 0 for all places, else their indices."""
        ...


def token_logprobs(model: CausalModel, batch: Batch) -> Tensor:
    """Natural log-probs [N] of the batch's trained tokens, in float32 or better, on the model's device.

    Of softmax(logits / temperature), with the temperature of each token that its behaviour log-prob is of.
    """
    places, at = np.unique(batch.sources, return_inverse=True)
    # Logits are large: of one row, only those that predict a trained token are computed.
    keep = torch.from_numpy(places).to(model.device) if len(batch.ids) == 1 else 0
    logits = model(
        input_ids=torch.from_numpy(batch.ids).to(model.device),
        attention_mask=_attention_mask(batch, _computing_dtype(model)).to(model.device),
        position_ids=torch.from_numpy(batch.positions).to(model.device),
        use_cache=False,
        logits_to_keep=keep,
    ).logits
    logits = logits.reshape(-1, logits.shape[-1])
    picked = logits[torch.from_numpy(at if len(batch.ids) == 1 else batch.sources).to(model.device)]
    picked = picked.to(torch.promote_types(picked.dtype, torch.float32))
    picked = picked / torch.from_numpy(batch.temperatures).to(picked.device)[:, None]
    chosen = picked.gather(-1, torch.from_numpy(batch.targets).to(model.device)[:, None])[:, 0]
    return chosen - picked.logsumexp(-1)


def _computing_dtype(model: CausalModel) -> torch.dtype:
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype


def _attention_mask(batch: Batch, dtype: torch.dtype) -> Tensor:
    visible = torch.from_numpy(batch.visible)
    if batch.is_causal:
        return visible.to(torch.int64)
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


def loss_inputs(
    batch: Batch, logprobs: Tensor, *, old_logprobs: Tensor | None = None, reference_logprobs: Tensor | None = None
) -> LossInputs:
    """The input of the loss, on the device of `logprobs` [N] and of its type. The others: [N], without gradient."""

    def like(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=logprobs.dtype, device=logprobs.device)

    return LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=like(batch.behaviour_logprobs),
        advantages=like(batch.advantages),
        weights=like(batch.weights),
        traces=torch.from_numpy(batch.traces).to(logprobs.device),
        sessions=torch.from_numpy(batch.sessions).to(logprobs.device),
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
    )
