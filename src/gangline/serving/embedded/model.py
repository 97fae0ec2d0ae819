"""A transformers causal language model in float32, run over sequences with their own caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.serving.embedded.attention import ATTENTION, Span, Spans, check_attention
from gangline.serving.embedded.batched_kv import KvBatches
from gangline.serving.embedded.kv_cache import KvCache
from gangline.serving.embedded.weights import Weights

PROMPT_TOKENS, PROMPT_TOKENS_ON_A_GPU = 256, 4096
"""A GPU computes many tokens in about the time of one."""


def load_model(folder: Path, device: str = "cpu") -> PreTrainedModel:
    """The model of a Hugging Face folder: float32 (bfloat16 is slow on most CPUs, and its log-probs are noise).

    device: a PyTorch device name.

    Raises:
        InvalidRequest: there is no such device here.
        NotFound: the folder contains no model that transformers can load.
        EngineIncapable: the model's attention is not plain full attention.
    """
    loader = cast("Any", AutoModelForCausalLM)
    try:
        model: PreTrainedModel = loader.from_pretrained(
            str(folder), dtype=torch.float32, attn_implementation=ATTENTION, local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise NotFound(f"{folder} does not hold a model that can be loaded: {error}") from error
    check_attention(model.config)
    for parameter in model.parameters():
        # Loaded weights are views into the mapped file; copying them to aligned memory makes a step a fifth faster.
        parameter.data = parameter.data.clone()
    model.tie_weights()
    return _on(model, device).eval()


def _on(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Raises: InvalidRequest."""
    try:
        return cast("PreTrainedModel", cast("Any", model).to(torch.device(device)))
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
        raise InvalidRequest(f"the embedded engine cannot use the device {device!r}: {why}") from error


class Chunk(NamedTuple):
    """Tokens to run through the model after the tokens in `cache`."""

    cache: KvCache
    ids: NDArray[np.int64]


class LanguageModel:
    """Runs chunks of several sequences in one forward pass. Not thread-safe: owned by one decode thread.

    It takes ownership of the model: see `Weights`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.module = model
        self._weights = Weights(model)
        config: Any = model.config.get_text_config()
        heads: int = config.num_attention_heads
        self._cache_shape = (
            int(config.num_hidden_layers),
            int(getattr(config, "num_key_value_heads", None) or heads),
            int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        )
        self.prompt_tokens = PROMPT_TOKENS if model.device.type == "cpu" else PROMPT_TOKENS_ON_A_GPU
        """Prompt tokens per pass; a longer prompt takes several passes."""
        self._kv_batches = KvBatches(*self._cache_shape, device=model.device)
        self.context_length = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)

    def new_cache(self) -> KvCache:
        return KvCache(*self._cache_shape, device=self.module.device, grow=self._kv_batches.place)

    def take_off(self, cache: KvCache) -> None:
        """Called when the cache's sequence is finished. Its content is kept in as little memory as needed."""
        self._kv_batches.take_off(cache)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Run the chunks and fill their caches. Returns the last tokens' logits: [chunk, vocab]."""
        starts = np.cumsum([0, *(len(ids) for _, ids in chunks)])
        return self._logits(chunks, starts, starts[1:] - 1)

    @torch.inference_mode()
    def score(self, ids: NDArray[np.int64]) -> list[float]:
        """Log-probs [T - 1] of all ids but the first, each given those before it."""
        cache, scored = self.new_cache(), list[torch.Tensor]()
        for start in range(0, len(ids) - 1, self.prompt_tokens):
            piece = ids[start : min(start + self.prompt_tokens, len(ids) - 1)]
            logits = self._logits([Chunk(cache, piece)], np.array([0, len(piece)]), np.arange(len(piece)))
            targets = torch.from_numpy(ids[start + 1 : start + 1 + len(piece)]).to(logits.device)
            scored.append(logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu())
        self.take_off(cache)
        return [float(one) for one in torch.cat([torch.empty(0), *scored])]

    def _logits(self, chunks: Sequence[Chunk], starts: NDArray[np.int64], kept: NDArray[np.int64]) -> torch.Tensor:
        """Logits [len(kept), vocab] after the tokens at `kept`. starts: of the chunks, and the end of the last."""
        device = self.module.device
        for cache, ids in chunks:
            cache.reserve(cache.length + len(ids))
        positions = [np.arange(cache.length, cache.length + len(ids)) for cache, ids in chunks]
        spans = [Span(cache, int(start), len(ids)) for (cache, ids), start in zip(chunks, starts[:-1], strict=True)]
        output = self.module(
            input_ids=torch.from_numpy(np.concatenate([ids for _, ids in chunks]))[None].to(device),
            position_ids=torch.from_numpy(np.concatenate(positions))[None].to(device),
            use_cache=False,
            logits_to_keep=torch.from_numpy(kept).to(device),
            spans=Spans(
                [span for span in spans if span.num_tokens > 1],
                self._kv_batches.decoding([(span.start, span.cache) for span in spans if span.num_tokens == 1]),
            ),
        )
        for cache, ids in chunks:
            cache.commit(ids)
        return output.logits[0]

    def load_weights(self, folder: Path) -> None:
        """Replace the weights; see `Weights.load`. The caller must clear the caches."""
        self._weights.load(folder)
        self._kv_batches.wipe()
