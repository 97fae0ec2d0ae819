"""The forward pass: log-probs of a batch's trained tokens by a Hugging Face causal model.

The tree and packed layouts need a model whose attention takes a 4D mask (eager, or PyTorch's scaled dot product) in
every layer: no sliding windows, and no state that runs along the row as in Mamba.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from gangline.training.loss import LossInputs
from gangline.training.packing import Batch

__all__ = ["CausalModel", "loss_inputs", "token_logprobs"]


class CausalModel(Protocol):
    """A `transformers` causal language model, or what is called like one."""

    def __call__(
        self, *, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, use_cache: bool
    ) -> Any:  # with `logits` [R, L, vocabulary]
        ...


def token_logprobs(
    model: CausalModel,
    batch: Batch,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Natural log-probs [N] of the batch's trained tokens, in float32 or better.

    temperature: that the tokens were sampled with, where the engine's log-probs are of the tempered distribution.
    dtype: of the model.
    """
    ids = torch.from_numpy(batch.ids).to(device)
    logits = model(
        input_ids=ids,
        attention_mask=_attention_mask(batch, dtype, device),
        position_ids=torch.from_numpy(batch.positions).to(device),
        use_cache=False,
    ).logits
    picked = logits.reshape(-1, logits.shape[-1])[torch.from_numpy(batch.sources).to(device)]
    picked = picked.to(torch.promote_types(picked.dtype, torch.float32)) / temperature
    chosen = picked.gather(-1, torch.from_numpy(batch.targets).to(device)[:, None])[:, 0]
    return chosen - picked.logsumexp(-1)


def _attention_mask(batch: Batch, dtype: torch.dtype, device: str | torch.device) -> Tensor:
    visible = torch.from_numpy(batch.visible).to(device)
    if batch.is_causal:
        return visible.to(torch.int64)
    hidden = torch.zeros(visible.shape, dtype=dtype, device=device)
    return hidden.masked_fill_(~visible, torch.finfo(dtype).min)[None, None]


def loss_inputs(
    batch: Batch, logprobs: Tensor, *, old_logprobs: Tensor | None = None, reference_logprobs: Tensor | None = None
) -> LossInputs:
    """What the loss takes, on the device of `logprobs` [N] and of its type. The others: [N], without gradient."""

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
