"""Log-probs and entropies of chosen tokens from hidden states, in chunks of tokens.

A chunk's logits [C, vocabulary] are reduced to two numbers per token and discarded; the backward pass recomputes them.
So the largest vocabulary-sized tensor belongs to one chunk, in both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import checkpoint
from transformers import PreTrainedModel

from gangline.domain.errors import InvalidRequest

CHUNK = 512
"""Default number of tokens whose logits exist at a time."""

Head = Callable[[Tensor], Tensor]
"""Logits [.., vocabulary] of hidden states [.., H], as the model itself returns them."""


class TokenScores(NamedTuple):
    """[N] each, in float32 or higher precision."""

    logprobs: Tensor
    """Natural, of softmax(logits / temperature)."""
    entropies: Tensor
    """Nats, of the same distribution."""
    values: Tensor | None = None
    """The critic's value before each token; None without a critic."""
    square_sums: Tensor | None = None
    """Sums of squared probabilities of the same distribution; None if not requested."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """The tokens to score, [N] each."""

    places: Tensor
    """int64: index of the hidden state that predicts the token."""
    ids: Tensor
    """int64"""
    temperatures: Tensor

    def split(self, chunk: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Parts of at most `chunk` tokens; one empty part if there are no tokens."""
        for start in range(0, max(len(self.ids), 1), chunk):
            part = slice(start, start + chunk)
            yield self.places[part], self.ids[part], self.temperatures[part]


def score_tokens(
    head: Head,
    hidden: Tensor,
    chosen: Chosen,
    *,
    chunk: int = CHUNK,
    entropy_has_gradient: bool = False,
    with_squares: bool = False,
) -> TokenScores:
    """hidden: [P, H]. chunk: tokens computed at a time. Gradients flow to `hidden` and to the head's weights."""

    def score(hidden: Tensor, places: Tensor, ids: Tensor, temperatures: Tensor) -> tuple[Tensor, ...]:
        logits = head(hidden[places])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]
        logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_has_gradient):
            entropies = -(logprobs.exp() * logprobs).sum(-1)
        found = logprobs.gather(-1, ids[:, None])[:, 0], entropies
        return (*found, logprobs.detach().mul(2).exp().sum(-1)) if with_squares else found

    run = cast("Any", checkpoint).checkpoint
    parts = [run(score, hidden, *part, use_reentrant=False) for part in chosen.split(chunk)]
    logprobs, entropies, *squares = (torch.cat(one) for one in zip(*parts, strict=True))
    return TokenScores(logprobs, entropies, square_sums=squares[0] if squares else None)


def output_head(model: PreTrainedModel) -> Head:
    """The model's output layer and the logit changes of its configuration. Tied embeddings and adapters are in the
    layer.
    """
    layer = cast("Head", cast("Any", model).get_output_embeddings())
    config = cast("Any", model.config).get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite

    def head(hidden: Tensor) -> Tensor:
        logits = layer(hidden)
        if scale != 1.0 or divisor != 1.0:
            logits = logits * (scale / divisor)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return head


def require_known_head(model: PreTrainedModel) -> None:
    """Compare `output_head` with the model's own logits of two tokens other than the padding token, whose states may be
    0.

    Raises: InvalidRequest if they differ: the model changes its logits in an unsupported way.
    """
    padding = getattr(cast("Any", model).config.get_text_config(), "pad_token_id", None)  # custom models may lack it
    ids = torch.tensor([[token for token in range(3) if token != padding][:2]], device=model.device)
    with torch.no_grad():
        hidden = cast("Any", model).get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        expected, found = cast("Any", model)(input_ids=ids, use_cache=False).logits, output_head(model)(hidden)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
        raise InvalidRequest(
            f"{type(model).__name__} changes its logits after the output layer by a setting that is not known: only "
            "final_logit_softcapping, logit_scale and logits_scaling are. Train another model."
        )
