"""The interface between the HTTP routes of an engine server and its sampler.

The routes own text: templates, stop strings, detokenising, tool-call and reasoning parsing, response shapes.
A `Sampler` owns tokens: it is given prompt ids and answers sampled ids, one at a time, each with the log-prob
under the distribution that it was really drawn from and the weight version that drew it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from gangline.models.language.contract import ChatTokenizer

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]

UNKNOWN_VERSION = -1
"""Version of weights that were loaded, or are being loaded, without a version so far."""


def version_text(version: int) -> str:
    """As the wire has it."""
    return "unknown" if version == UNKNOWN_VERSION else str(version)


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to sample. `n > 1` is `n` of these."""

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    """0 means greedy; the log-prob is then that of the untempered distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    presence_penalty: float = 0.0
    """Taken off the logit of every id that was sampled before in this sequence."""
    frequency_penalty: float = 0.0
    """Likewise, once for each time."""
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    """Sampling one of these ends the sequence; the id is part of the reply."""
    min_tokens: int = 0
    num_top_logprobs: int = 0
    with_mask: bool = False
    """Report the ids that top-k and top-p left, where they took any away."""
    messages: Sequence[dict[str, Any]] | None = None
    """The client's messages, for samplers that answer text without weights (the scripted one)."""
    tools: Sequence[dict[str, Any]] | None = None
    choice_index: int = 0


class SampledToken(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    """Under the distribution that was sampled: after penalties, temperature, top-k, top-p (vLLM's processed kind)."""
    version: int
    """Weight version that drew this token; may be `UNKNOWN_VERSION`."""
    finish_reason: FinishReason | None = None
    """Set on the last token of the sequence only."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    kept_ids: tuple[int, ...] | None = None
    """The ids that it was drawn among; None where the request asks for none, or nothing was taken away."""


class Sampler(Protocol):
    """Samples tokens. Implementations: the embedded engine, the scripted engine."""

    model_name: str
    context_length: int
    tokenizer: ChatTokenizer

    @property
    def returns_masks(self) -> bool:
        """Whether the generate route reports sampling masks, as vLLM does under `--return-sampling-mask`."""
        ...

    @property
    def num_ids(self) -> int:
        """Sampled ids are below it: rows of the model's vocabulary, which may be more than its tokenizer has."""
        ...

    @property
    def weight_version(self) -> int: ...

    def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        """Yield sampled tokens until a stop id or `max_tokens`.

        An iterator that ends without a `finish_reason` was aborted (there was no next token to say so on).
        Closing the iterator early (`aclose`) takes the sequence out of the running batch at once.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `keep` freezes running sequences, `wait` drains them, `abort` ends them with `abort`.

        New sequences wait until `resume`.
        """
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, path: Path) -> None:
        """Replace the weights by those of a safetensors checkpoint folder. Raises if shapes do not match."""
        ...

    async def set_version(self, version: int) -> None: ...

    async def close(self) -> None: ...
