"""verl's engines as a `Sampler`, so that our own engine server can serve them to the nodes.

Tokens come from verl's client, which chooses the engine: by the request's id, so a session's calls all have the
session's, and go to the replica that has its prefix. verl aborts calls when it updates weights. An aborted call
continues from the tokens sampled so far, as a separate request, so every token has the version that sampled it. verl's
own retry only reports the first and the last version of a reply, so it is not used.

Source: verl 0.9.1, `workers/rollout/llm_server.py` (`LLMServerClient`, `FullyAsyncLLMServerClient`).
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, cast
from uuid import uuid4

from gangline.models.engine_server.sampler import UNKNOWN_VERSION, FinishReason, SampledToken, SampleRequest
from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.tokenizer import load_tokenizer
from gangline.train.trainers.own_engine import OwnEngine, Reply, num_rows
from gangline.train.trainers.verl.settings import GanglineSettings

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


class VerlSampler(OwnEngine):
    trainer = "verl"
    no_logprobs = "set rollout.calculate_log_probs to true"

    def __init__(
        self, generate: Generate, tokenizer: ChatTokenizer, *, retry_s: float = _RETRY_S, **model: Any
    ) -> None:
        """model: as for `OwnEngine`."""
        super().__init__(tokenizer, **model)
        self._generate = generate
        self._retry_s = retry_s

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        """Tokens are yielded once a request is complete, because verl does not stream.

        Raises: as `OwnEngine.sample`.
        """
        self.refuse_top_logprobs(request)
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
        reported = output.extra_fields.get("global_steps")
        version = UNKNOWN_VERSION if reported is None else int(reported)
        return self.checked(Reply(output.token_ids, output.log_probs, [version] * len(output.token_ids), "stop"))


def make_sampler(config: Any, client: Any, settings: GanglineSettings) -> VerlSampler:
    """verl's client as a sampler, with the tokenizer that verl loads. Raises: NotFound."""
    copy_to_local: Callable[[str], str] = importlib.import_module("verl.utils.fs").copy_to_local
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    folder = copy_to_local(model.path)
    tokenizer_path = model.get("tokenizer_path")
    return VerlSampler(
        one_attempt(client),
        load_tokenizer(folder if tokenizer_path is None else copy_to_local(tokenizer_path)),
        model_name=settings.model_name,
        context_length=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        num_ids=num_rows(folder),
    )


def _parameters(request: SampleRequest, max_tokens: int) -> dict[str, Any]:
    """verl's parameter names, shared by its vLLM and SGLang servers. Neutral values are left out. verl may keep the
    dictionary.
    """
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
