"""The forward pass: log-probs and entropies of a batch's trained tokens by a Hugging Face causal model.

The tree and packed layouts replace the model's attention (`compute.attention`): it must be plain causal attention in
every layer, without sliding windows or recurrent state along the row as in Mamba. Padded batches work with every model.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gangline.train.learning.compute.attention import Rows, attend_by_rows, require_used
from gangline.train.learning.compute.head import CHUNK, Chosen, TokenScores, output_head, score_tokens
from gangline.train.learning.credit.critic.head import ValueHead
from gangline.train.learning.loss import LossInputs
from gangline.train.learning.packing import Batch


def token_logprobs(model: PreTrainedModel, batch: Batch, *, chunk: int = CHUNK) -> Tensor:
    """Natural log-probs [N] of the batch's trained tokens; see `token_scores`."""
    return token_scores(model, batch, chunk=chunk).logprobs


def token_scores(
    model: PreTrainedModel,
    batch: Batch,
    *,
    chunk: int = CHUNK,
    entropy_has_gradient: bool = False,
    critic: ValueHead | None = None,
    with_squares: bool = False,
) -> TokenScores:
    """Log-probs, entropies and the critic's values [N] of the batch's trained tokens, on the model's device.

    They are of softmax(logits / temperature), with the temperature of each token's behaviour log-prob. Packed and tree
    batches replace the model's attention for good. chunk: tokens whose logits exist at a time. Raises: InvalidRequest
    if the batch's layout does not fit the model.
    """
    model = _without_adapter_wrapper(model)
    hidden = _hidden_states(model, batch)

    def there(values: Any) -> Tensor:
        return torch.from_numpy(values).to(hidden.device)

    chosen = Chosen(there(batch.sources), there(batch.targets), there(batch.temperatures))
    flat = hidden.reshape(-1, hidden.shape[-1])
    scores = score_tokens(
        output_head(model),
        flat,
        chosen,
        chunk=chunk,
        entropy_has_gradient=entropy_has_gradient,
        with_squares=with_squares,
    )
    return scores if critic is None else scores._replace(values=critic(flat, chosen.places))


def _hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """[R, L, H] after the last norm."""
    ids, positions = (torch.from_numpy(one).to(model.device) for one in (batch.ids, batch.positions))
    decoder = cast("Any", model).get_decoder()
    if not batch.segments:  # right padding: no token sees the padding after it
        return decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    attend_by_rows(model)
    rows = Rows(batch.segments, model.device)
    hidden = decoder(
        input_ids=ids, position_ids=positions, use_cache=False, attention_mask=rows.no_mask, rows=rows
    ).last_hidden_state
    require_used(rows, model)
    return hidden


def _without_adapter_wrapper(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside a `PeftModel`, whose layers contain the adapters."""
    return cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model


def loss_inputs(
    batch: Batch,
    logprobs: Tensor,
    *,
    entropies: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> LossInputs:
    """The input of the loss, with the device and dtype of `logprobs` [N]. The others: [N]."""

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
        teacher_logprobs=None if batch.teacher_logprobs is None else like(batch.teacher_logprobs),
        entropies=entropies,
    )
