"""The canonical form of conversations between harness and model. Every dialect is parsed into it and rendered from
it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# Messages and their parts contain no cycles, so the collector can skip them (`gc=False`): long conversations have
# thousands of objects, and examining them takes tens of milliseconds.
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Text(msgspec.Struct, frozen=True, gc=False, tag="text"):
    text: str


class Thinking(msgspec.Struct, frozen=True, gc=False, tag="thinking"):
    text: str
    signature: str | None = None
    """The provider's opaque field (signature, encrypted_content, thoughtSignature). Ours contains a record key, so that
    an echo finds its completion."""


class Image(msgspec.Struct, frozen=True, gc=False, tag="image"):
    url: str
    """`https://...`, or `data:MEDIA_TYPE;base64,...`."""
    detail: str | None = None


class Document(msgspec.Struct, frozen=True, gc=False, tag="document"):
    url: str
    """`https://...`, or `data:MEDIA_TYPE;base64,...`."""
    name: str | None = None


class ToolCall(msgspec.Struct, frozen=True, gc=False, tag="tool_call"):
    call_id: str
    name: str
    arguments: str
    """JSON text, as the model wrote it or the client echoed it."""


class ToolResult(msgspec.Struct, frozen=True, gc=False, tag="tool_result"):
    call_id: str
    content: tuple[Text | Image | Document, ...]
    is_error: bool = False


Part = Text | Thinking | Image | Document | ToolCall | ToolResult


class Message(msgspec.Struct, frozen=True, gc=False):
    role: Role
    parts: tuple[Part, ...] = ()
    name: str | None = None


class ToolDefinition(msgspec.Struct, frozen=True):
    name: str
    """As the engine sees it: unique. For a tool in a namespace, `NAMESPACE__NAME`."""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    kind: Literal["function", "custom"] = "function"
    """`custom`: takes free text, with or without a grammar; the engine sees a function of one string, `input`."""
    grammar: dict[str, Any] | None = None
    """Grammar of a custom tool, as the client sent it."""
    namespace: str | None = None
    local_name: str | None = None
    """The client's name for it inside its namespace; None without a namespace."""


class ToolChoice(msgspec.Struct, frozen=True):
    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters in use, after the operator's policy. None: neutral (temperature 1, nothing cut off), regardless of
    the model's own defaults."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Amounts of thinking, in the providers' words, least first."""


class ThinkingWish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A client's request about thinking, in its dialect's terms; None: not set."""

    is_on: bool | None = None
    effort: str | None = None
    """Usually one of `EFFORTS`."""


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a harness, independent of the provider."""

    dialect: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    sampling: SamplingParams = SamplingParams()
    num_choices: int = 1
    stream: bool = False
    include_usage: bool = False
    num_top_logprobs: int | None = None
    """Number that the *client* asked for; None when it did not."""
    wants_token_ids: bool = False
    """Whether the client asked for the ids of its prompt and of the reply, which a whole reply has."""
    response_format: dict[str, Any] | None = None
    template_kwargs: dict[str, Any] = {}
    thinking: ThinkingWish = ThinkingWish()
    """Settings that are not yet part of `template_kwargs`."""
    template_wished: dict[str, Any] = {}
    """The client's own settings for both, if its task overrides them."""
    dropped: tuple[str, ...] = ()
    """Request fields and hosted tools that have no meaning here and were left out; kept for the record."""
    undeclared: dict[str, str] = {}
    """Field -> its JSON text, for the fields in `dropped` that the dialect does not know: they may carry state."""
    previous_reply_id: str | None = None
    """The call continues the conversation of this earlier reply of the session; `messages` has only the new ones."""
    keeps_tools: bool = False
    """With `previous_reply_id`: the tools of that reply's call apply, and `tools` is empty."""
    leads_with_instructions: bool = False
    """The first message applies to this call alone; a call that continues from its reply drops it."""
    agent_id: str | None = None
    """The client's own name for the calling agent, if it distinguishes agents."""
    agent_role: str | None = None
    """The caller's role among several, as it named it: only a label, for rewards and credit."""
    of_environment: bool = False
    """Whether an environment of the session makes the call, rather than the agent."""
    echo: dict[str, Any] = {}
    """Request fields that the dialect's reply repeats; not read elsewhere."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    num_prompt_tokens: int
    num_sampled_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens that the engine had in its cache."""
    num_thinking_tokens: int = 0
    """Sampled tokens of thinking, if the engine reports them."""


def message_text(message: Message) -> str:
    """Returns all plain text of a message, including tool results but not thinking."""
    texts: list[str] = []
    for part in message.parts:
        if isinstance(part, Text):
            texts.append(part.text)
        elif isinstance(part, ToolResult):
            texts.extend(piece.text for piece in part.content if isinstance(piece, Text))
    return "".join(texts)
