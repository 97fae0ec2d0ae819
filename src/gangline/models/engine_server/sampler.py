"""The interface between the HTTP routes of an engine server and its sampler.

The routes handle text: templates, stop strings, detokenising, tool-call and reasoning parsing, response shapes. A
`Sampler` handles tokens: it takes prompt ids and yields sampled ids, one at a time, each with its log-prob under the
distribution actually sampled and with the weight version that sampled it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from gangline.models.language.contract import ChatTokenizer

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "wait", "abort"]

UNKNOWN_VERSION = -1
"""Version of weights that are loading, or were loaded without a version."""


def version_text(version: int) -> str:
    """The version in its wire format."""
    return "unknown" if version == UNKNOWN_VERSION else str(version)


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to sample. A request with `n > 1` becomes `n` of these."""

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    """0 means greedy; the log-prob is then that of the untempered distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every id already sampled in this sequence."""
    frequency_penalty: float = 0.0
    """Subtracted likewise, once for each occurrence."""
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    """Sampling one of these ids ends the sequence; the id is part of the reply."""
    min_tokens: int = 0
    num_top_logprobs: int = 0
    with_mask: bool = False
    """Report the ids kept by top-k and top-p, if they removed any."""
    messages: Sequence[dict[str, Any]] | None = None
    """The client's messages, for samplers that produce text without weights (the scripted one)."""
    tools: Sequence[dict[str, Any]] | None = None
    choice_index: int = 0
    session_id: str | None = None
    """For samplers that choose among replicas."""


class SampledToken(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    """Under the sampled distribution: after penalties, temperature, top-k, top-p (vLLM's processed kind)."""
    version: int
    """Weight version that sampled this token; may be `UNKNOWN_VERSION`."""
    finish_reason: FinishReason | None = None
    """Set only on the last token of the sequence."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    kept_ids: tuple[int, ...] | None = None
    """The ids from which it was sampled; None if not requested, or if no id was removed."""


class Sampler(Protocol):
    """Samples tokens. Implementations: the embedded engine, the scripted engine."""

    model_name: str
    context_length: int
    tokenizer: ChatTokenizer

    @property
    def returns_masks(self) -> bool:
        """Whether the generate route reports sampling masks, like vLLM with `--return-sampling-mask`."""
        ...

    @property
    def num_ids(self) -> int:
        """Sampled ids are below this number of rows in the model's vocabulary, which may exceed the tokenizer's
        size."""
        ...

    @property
    def weight_version(self) -> int: ...

    def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        """Yield sampled tokens until a stop id or `max_tokens`.

        An iterator that ends without a `finish_reason` was aborted, with no further token to carry one. Closing the
        iterator early (`aclose`) takes the sequence out of the running batch at once.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `keep` freezes running sequences, `wait` drains them, `abort` ends them with `abort`.

        New sequences wait until `resume`.
        """
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, path: Path) -> None:
        """Replace the weights with a safetensors checkpoint folder. Raises if shapes do not match."""
        ...

    async def set_version(self, version: int) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class Scorer(Protocol):
    """A sampler that can also score given ids. Implementation: the embedded engine."""

    async def score(self, ids: list[int]) -> list[float]:
        """Log-probs [T - 1] of all ids but the first, each given those before it, at temperature 1."""
        ...
