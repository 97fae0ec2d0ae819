"""Log-probs of given ids by teacher forcing, for the offline check of an engine's recorded log-probs. Pure; does not
involve an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from gangline.serving.embedded.sampling import RowParameters, processed_logprobs

_CHUNK = 512


@torch.inference_mode()
def score_logprobs(
    model: PreTrainedModel,
    ids: Sequence[int],
    temperature: float,
    *,
    top_p: float = 1.0,
    top_k: int = 0,
) -> torch.Tensor:
    """Log-prob of each id given the ids before it, under the distribution that these parameters sample from.

    Long texts run through the model in chunks, which bounds the memory of logits. Temperature 0 scores the untempered
    distribution, as sampling does.

    Returns:
        logprobs: [T], float32, 0.0 for the first id, -inf where top-k or top-p excludes an id.
    """
    forward = cast("Any", model)
    cache = DynamicCache(config=model.config)
    row = torch.tensor(list(ids), dtype=torch.long)
    scored = [torch.zeros(min(len(row), 1))]
    for start in range(0, len(row) - 1, _CHUNK):
        inputs = row[start : min(start + _CHUNK, len(row) - 1)]
        positions = torch.arange(start, start + len(inputs))[None]
        output = forward(input_ids=inputs[None], position_ids=positions, past_key_values=cache, use_cache=True)
        parameters = [RowParameters(temperature, top_p, top_k)] * len(inputs)
        logprobs = processed_logprobs(output.logits[0], parameters)
        targets = row[start + 1 : start + 1 + len(inputs)]
        scored.append(logprobs.gather(1, targets[:, None])[:, 0])
    return torch.cat(scored)
