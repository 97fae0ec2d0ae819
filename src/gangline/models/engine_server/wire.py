"""The messages on the OpenAI routes, with vLLM's additions: requests, replies, errors.

Requests ignore unknown fields, as vLLM does, with one exception: known fields that would change the sampling but are
not supported here (`UNSUPPORTED`) are rejected, never dropped. Replies have token fields only if the request asked for
them. Other fields are always present, even when null.

Source: vLLM 0.32/0.33 `entrypoints/openai` protocols; OpenAI API reference.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

# Known but unsupported fields -> the values at which they have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
}

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

_FIELD_PATH = re.compile(r" - at `\$\.?([^`]*)`")


class ApiError(Exception):
    """An error response in OpenAI's shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "BadRequestError",
        param: str | None = None,
        code: str | int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = status if code is None else code

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code},
        }


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Accepted for compatibility with clients; it does not constrain the sampling."""

    type: Literal["text", "json_object", "json_schema"]


class SamplingFields(msgspec.Struct, kw_only=True):
    """The common fields of chat and completions requests."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: ResponseFormat | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    kv_transfer_params: dict[str, Any] | None = None
    """May contain `prompt_token_ids`: the exact prompt, used instead of rendering or encoding."""
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether log-prob entries identify their token as `token_id:N` instead of by its text."""
    session_id: str | None = None
    """From the request's headers."""


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    """False hides the reasoning text; ids and log-probs stay."""


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[int]
    logprobs: int | None = None
    prompt_logprobs: Literal[0] | None = None
    """0: log-probs of the prompt's own ids, as in vLLM. Larger numbers, with other ids, are not supported."""


class GenerateSampling(SamplingFields, kw_only=True):
    logprobs: int | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """`/inference/v1/generate`: ids in, ids out."""

    token_ids: list[int]
    sampling_params: GenerateSampling
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Repeat the prompt ids in the reply."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    """Accepted for compatibility with vLLM. Has no effect: templates write their own special tokens."""
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class RpcRequest(msgspec.Struct, kw_only=True):
    method: str
    kwargs: dict[str, Any] = {}
    args: list[Any] = []
    timeout: float | None = None


class VersionRequest(msgspec.Struct, kw_only=True):
    new_version: str


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float | None
    """Null if the sampler reported NaN."""
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Four lists of equal length, one entry per sampled id."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None]]
    text_offset: list[int]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str
    """JSON text, exactly as sampled."""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall
    index: int | UnsetType = UNSET
    """Set only in streams."""


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]


class WeightSpan(msgspec.Struct):
    """Ids `[start, end)` of a choice were sampled with weights `version`."""

    version: str
    start: int
    end: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class ChatReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """On the first chunk."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice, whole or a part of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, dict[str, float]] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightSpan] | UnsetType = UNSET


class CompletionReply(msgspec.Struct, kw_only=True):
    """A whole reply or one chunk of a stream, which have the same shape on this route."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


class TopIdLogprob(msgspec.Struct):
    token_id: int
    logprob: float | None


class IdLogprob(msgspec.Struct):
    token_id: int
    logprob: float | None
    """Null if the sampler reported NaN."""
    top_logprobs: list[TopIdLogprob]


class IdLogprobs(msgspec.Struct):
    content: list[IdLogprob]


class GenerateChoice(msgspec.Struct, kw_only=True):
    """One choice, whole or a part of a stream."""

    index: int
    token_ids: list[int]
    logprobs: IdLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[WeightSpan] | None = None
    """Sent with the finish reason."""
    kept_ids: list[list[int]] | None = msgspec.field(default=None, name="sampling_mask")
    """For each id, the ids from which it was sampled."""


class GenerateReply(msgspec.Struct, kw_only=True):
    """A whole reply or one chunk of a stream."""

    request_id: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def encode(reply: object) -> bytes:
    return msgspec.json.encode(reply)


def decode_request(body: bytes, kind: type[RequestT], num_ids: int | None = None) -> RequestT:
    """Parse a request body.

    num_ids: size of the vocabulary. A bias for an id beyond it is rejected, and the error names this number, as in
        vLLM.

    Raises:
        ApiError: 400; `param` names the field of a wrong type or value.
    """
    raw = _decode_object(body)
    if num_ids is not None:
        _refuse_biased_ids(raw.get("logit_bias"), num_ids)
    for name, neutral in UNSUPPORTED.items():
        if name in raw and raw[name] not in neutral:
            raise ApiError(f"{name!r} is not supported by this engine; leave it out.", param=name)
    if raw.get("prompt_logprobs") is not None and kind is not CompletionRequest:
        raise ApiError("'prompt_logprobs' is for /v1/completions; leave it out.", param="prompt_logprobs")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _FIELD_PATH.search(message)
        if path is not None:
            message = f"{path.group(1)}: {message[: path.start()]}"
            raise ApiError(message, param=path.group(1)) from None
        missing = re.search(r"required field `(\w+)`", message)
        raise ApiError(message, param=missing.group(1) if missing else None) from None


def _refuse_biased_ids(biases: Any, num_ids: int) -> None:
    """Raises: ApiError when an id is outside the vocabulary."""
    if isinstance(biases, dict):
        ids = [int(name) for name in cast("dict[str, Any]", biases) if name.lstrip("-").isdecimal()]
        if wrong := [token for token in ids if not 0 <= token < num_ids]:
            raise ApiError(
                f"token_id(s) {wrong} in logit_bias contain out-of-vocab token ids. Vocabulary size: {num_ids}",
                param="logit_bias",
            )


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"The request body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ApiError("The request body must be a JSON object.")
    return cast("dict[str, Any]", raw)
