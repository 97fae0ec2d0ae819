"""verl's engines as a `Sampler`, so that our own engine server can serve them to the nodes.

Tokens come from verl's client, which chooses the engine: by the request's id, so a session's calls all have the
session's, and go to the replica that has its prefix. verl aborts calls when it updates weights. An aborted call
continues from the tokens sampled so far, as a separate request, so every token has the version that sampled it. verl's
own retry only reports the first and the last version of a reply, so it is not used.

Source: verl 0.9.1, `workers/rollout/llm_server.py` (`LLMServerClient`, `FullyAsyncLLMServerClient`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, cast
from uuid import uuid4

from gangline.domain.errors import EngineIncapable, EngineMalformed, InvalidRequest
from gangline.models.engine_server.sampler import UNKNOWN_VERSION, FinishReason, PauseMode, SampledToken, SampleRequest
from gangline.models.language.contract import ChatTokenizer

_ABORTED = ("abort", "aborted")
_RETRY_S = 1.0
"""As in verl's own retry."""


class TokenOutput(Protocol):
    """verl's answer to one call."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None
    extra_fields: dict[str, Any]


Generate = Callable[..., Awaitable[TokenOutput]]


def one_attempt(client: Any) -> Generate:
    """The client's `generate`, without the retry of the asynchronous client."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient  # noqa: PLC0415 - imports Ray, and seconds

    if isinstance(client, FullyAsyncLLMServerClient):
        return cast("Any", super(FullyAsyncLLMServerClient, client)).generate
    return client.generate


class VerlSampler:
    """Implements `gangline.models.engine_server.sampler.Sampler`. verl manages the weights, so the control methods
    refuse.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: ChatTokenizer,
        *,
        model_name: str,
        context_length: int,
        num_ids: int,
        retry_s: float = _RETRY_S,
    ) -> None:
        """context_length: tokens of prompt and reply together. num_ids: rows of the model's vocabulary."""
        self.model_name = model_name
        self.context_length = context_length
        self.tokenizer = tokenizer
        self.num_ids = num_ids
        self.returns_masks = False
        self.weight_version = UNKNOWN_VERSION
        self._generate = generate
        self._retry_s = retry_s

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        """Tokens are yielded once a request is complete, because verl does not stream.

        Raises: EngineIncapable if verl returns no log-probs, EngineMalformed.
        """
        prompt, left = list(request.prompt_ids), request.max_tokens
        request_id = request.session_id or uuid4().hex
        while True:
            output = await self._generate(
                request_id=request_id, prompt_ids=prompt, sampling_params=_parameters(request, left)
            )
            tokens = self._tokens(output)
            left -= len(tokens)
            is_aborted = output.stop_reason in _ABORTED and left > 0
            for number, (token_id, logprob, version) in enumerate(tokens, 1):
                ends = number == len(tokens) and not is_aborted
                yield SampledToken(token_id, logprob, version, _reason(request, token_id, left) if ends else None)
            if not is_aborted:
                return
            prompt += [token_id for token_id, _, _ in tokens]
            await asyncio.sleep(self._retry_s)

    def _tokens(self, output: TokenOutput) -> list[tuple[int, float, int]]:
        """(id, log-prob, version) of each token."""
        if not output.token_ids:
            return []
        if output.log_probs is None:
            raise EngineIncapable("verl's engine gives no log-probs: set rollout.calculate_log_probs to true.")
        if len(output.log_probs) != len(output.token_ids):
            raise EngineMalformed(f"verl gave {len(output.token_ids)} tokens and {len(output.log_probs)} log-probs.")
        reported = output.extra_fields.get("global_steps")
        self.weight_version = version = UNKNOWN_VERSION if reported is None else int(reported)
        return [(one, logprob, version) for one, logprob in zip(output.token_ids, output.log_probs, strict=True)]

    async def pause(self, mode: PauseMode) -> None:
        raise InvalidRequest("verl pauses its engines itself.")

    async def resume(self) -> None:
        raise InvalidRequest("verl resumes its engines itself.")

    async def load_weights(self, path: Path) -> None:
        raise InvalidRequest("verl loads weights into its engines itself.")

    async def set_version(self, version: int) -> None:
        raise InvalidRequest("verl counts versions itself.")

    async def close(self) -> None:
        return None


def _parameters(request: SampleRequest, max_tokens: int) -> dict[str, Any]:
    """verl's parameter names, shared by its vLLM and SGLang servers. Neutral values are left out. verl may keep the
    dictionary.
    """
    if request.num_top_logprobs:
        raise InvalidRequest("verl's engines report no top_logprobs.")
    optional = {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "min_tokens": request.min_tokens,
        "seed": request.seed,
        "stop_token_ids": sorted(request.stop_ids),
    }
    return {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "max_tokens": max_tokens,
    } | {name: value for name, value in optional.items() if value}


def _reason(request: SampleRequest, last_id: int, left: int) -> FinishReason:
    """verl reports `completed` for both."""
    return "length" if last_id not in request.stop_ids and left <= 0 else "stop"
