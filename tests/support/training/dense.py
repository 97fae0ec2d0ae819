"""The forward pass with nothing left out: a mask of places by places, and log-probs over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gangline.train.learning.packing import Batch


def dense_scores(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N] of a packed or tree batch, by a model of attention `sdpa` or `eager`."""
    num = batch.ids.size
    visible = torch.zeros(num, num, dtype=torch.bool)
    for start, end, prefix in batch.segments:
        visible[start:end, torch.from_numpy(np.asarray(prefix))] = True
        visible[start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
    mask = torch.zeros(num, num, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)[None, None]
    logits = model(
        input_ids=torch.from_numpy(batch.ids), position_ids=torch.from_numpy(batch.positions), attention_mask=mask
    ).logits[0][torch.from_numpy(batch.sources)]
    logprobs = (logits / torch.from_numpy(batch.temperatures)[:, None]).log_softmax(-1)
    chosen = logprobs.gather(-1, torch.from_numpy(batch.targets)[:, None])[:, 0]
    return chosen, -(logprobs.exp() * logprobs).sum(-1)
