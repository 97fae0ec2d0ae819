"""The gateway's interface to every engine: requests, replies, streams, capabilities.

A request always carries the conversation and, if the engine takes them, its exact prompt ids. An engine that ignores
the ids still answers, from its own rendering, and the ids that it reports show which it used.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec

from gangline.domain.completion import LogprobKind, ParseStatus, PromptSource, VersionSpan
from gangline.domain.conversation import Message, ModelCall, Part, Text, Thinking, ToolCall, ToolDefinition, Usage
from gangline.domain.evidence.contract import AskedEvidence
from gangline.domain.images import ImageEvidence
from gangline.domain.node_views import TemplateFacts
from gangline.domain.reply import ReplyDelta, TokenLogprob, whole_delta
from gangline.domain.tokens import Logprobs, TokenIds, logprobs, token_ids


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's capabilities, determined by real calls and not by its claims."""

    engine: str
    """Wire format: `vllm`, `sglang`, `openai_text`, `generate_vllm`, `generate_sglang`."""
    version: str
    model: str
    """The name under which the engine serves its model."""
    max_context: int | None
    """Tokens of prompt and reply together; None if the engine does not report it."""
    reports_ids: bool
    takes_prompt_ids: bool
    """Exact prompt ids were echoed as sent: stitching is possible."""
    takes_images: bool = False
    """Exact prompt ids may come with images."""
    sees_images: bool | None = None
    """Whether an image processor is known, without which calls with images cannot be trained on. None: unknown."""
    evidence: frozenset[str] = frozenset()
    """Names of the kinds of evidence that whole replies report."""
    streams_ids: bool
    renders: bool
    """Whether `render` works: a conversation -> its prompt ids."""
    logprob_kind: LogprobKind
    num_ids: int | None = None
    """Size of the vocabulary: ids are below it. None if only the engine knows."""
    reports_versions: bool = False
    """Policy versions come with each reply."""
    prompt_source: PromptSource = "engine"
    """Where prompts of calls without exact ids are rendered; `rendered` (T2): by this client."""
    template: TemplateFacts = TemplateFacts()

    @property
    def tier(self) -> str:
        """The highest capture tier for prompts, and its reason; for people."""
        if self.takes_prompt_ids:
            return "auto: exact prompt ids are taken"
        if self.reports_ids:
            return "observe: takes no exact prompt ids, so it renders each prompt, and its replies tell the ids"
        return "text: reports no token ids, so nothing can be trained on"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    call: ModelCall
    prompt_ids: TokenIds | None = None
    """Exact prompt [T]; None lets the engine render `call.messages`. Given with images only if the engine takes
    both."""
    evidence: tuple[AskedEvidence, ...] = ()
    """Kinds of evidence to report; only for `chat`, with an engine that reports them."""
    session_id: str | None = None
    """For balancers between here and the engine, which keep a session at the replica that has its prefix."""
    traceparent: str | None = None
    """The call's span, as W3C's Trace Context writes it; None: there are no traces."""


class ChoiceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a whole choice. In a stream the last given values count."""

    finish_reason: str | None = None
    """None: the engine never reported one; the reply was cut off."""
    stop_reason: str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    weights_known: bool = True
    """False: the engine may have other weights than the gate's policy version. In a stream a single False counts."""
    parse: ParseStatus | None = None
    """How the reply's text was parsed, if that was done on this side; None: the engine did it."""
    images: ImageEvidence | None = None
    """Evidence of the prompt's images, the same for every choice; None without images, or if they were not examined."""


class EngineChoice(ChoiceFacts, frozen=True, kw_only=True):
    """One sampled reply."""

    index: int
    message: Message
    """Tool-call ids are the engine's; the gateway assigns its own."""
    sampled_ids: TokenIds | None
    """[T], end of turn included; None: not reported."""
    logprobs: Logprobs | None
    """[T]. NaN where the engine sent null; None: not reported."""
    token_logprobs: tuple[TokenLogprob, ...] = ()
    """For clients that request them."""
    evidence: dict[str, Any] = {}
    """Evidence reported with the ids, by the name of its kind. `logprobs` are the ones that match it."""


class EngineReply(msgspec.Struct, frozen=True, kw_only=True):
    prompt_ids: TokenIds | None
    """The prompt ids from which the engine generated the reply [T]; None: not reported."""
    choices: tuple[EngineChoice, ...]
    usage: Usage | None = None
    metadata: dict[str, Any] = {}
    """Fields to record with the tokens, such as `backend_replaced`."""


class EngineDelta(ChoiceFacts, frozen=True, kw_only=True):
    """One piece of a stream: the part visible to the harness, and the tokens behind it."""

    shown: ReplyDelta = ReplyDelta()
    sampled_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    """One per entry of `sampled_ids`; NaN where the engine sent null."""
    prompt_ids: TokenIds | None = None
    """On the first piece, if the engine reports them."""
    usage: Usage | None = None
    metadata: dict[str, Any] = {}
    """As in `EngineReply`."""


class Engine(Protocol):
    """The client of one engine. All methods may raise EngineUnavailable, EngineRefused, ContextOverflow."""

    async def probe(self) -> EngineCapabilities:
        """Determine the engine's capabilities by real calls.

        Raises: EngineIncapable when it reports no ids or no log-probs, naming the start option that it needs;
        EngineUnavailable, naming the URL, when it does not answer.
        """
        ...

    async def capabilities(self) -> EngineCapabilities:
        """The result of the last probe. Probes if there was none."""
        ...

    async def chat(self, request: EngineRequest) -> EngineReply: ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Closing the iterator early cancels the call in the engine."""
        ...

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        """Prompt ids [T] of a conversation in the engine's own template."""
        ...

    async def detokenize(self, ids: Sequence[int]) -> str: ...

    async def check_health(self, timeout_s: float) -> None:
        """Raises: EngineUnavailable when the engine is down, or does not answer in time."""
        ...

    async def close(self) -> None: ...


class _Growing:
    """One choice of a stream."""

    def __init__(self) -> None:
        self.thinking: list[str] = []
        self.text: list[str] = []
        self.calls: dict[int, tuple[str, str, list[str]]] = {}
        self.ids: list[int] | None = None
        self.logprobs: list[float] | None = None
        self.token_logprobs: list[TokenLogprob] = []
        self.version_spans: tuple[VersionSpan, ...] = ()
        self.weights_known = True
        self.finish_reason: str | None = None
        self.stop_reason: str | None = None
        self.parse: ParseStatus | None = None

    def feed(self, delta: EngineDelta) -> None:
        shown = delta.shown
        self.thinking.append(shown.thinking)
        self.text.append(shown.text)
        self.token_logprobs.extend(shown.logprobs)
        for piece in shown.tool_calls:
            call_id, name, arguments = self.calls.get(piece.index, ("", "", []))
            arguments.append(piece.arguments)
            self.calls[piece.index] = (call_id or piece.call_id or "", name or piece.name or "", arguments)
        if delta.sampled_ids is not None:
            self.ids = self.ids or []
            self.ids.extend(delta.sampled_ids)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(delta.logprobs)
        self.version_spans = delta.version_spans or self.version_spans
        self.weights_known = self.weights_known and delta.weights_known
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason or self.stop_reason
        self.parse = delta.parse or self.parse

    def choice(self, index: int, images: ImageEvidence | None) -> EngineChoice:
        return EngineChoice(
            index=index,
            message=self._message(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            sampled_ids=None if self.ids is None else token_ids(self.ids),
            logprobs=None if self.logprobs is None else logprobs(self.logprobs),
            version_spans=self.version_spans,
            weights_known=self.weights_known,
            token_logprobs=tuple(self.token_logprobs),
            parse=self.parse,
            images=images,
        )

    def _message(self) -> Message:
        calls = [ToolCall(call_id, name, "".join(pieces)) for _, (call_id, name, pieces) in sorted(self.calls.items())]
        return assistant_message("".join(self.thinking), "".join(self.text), calls)


class ReplyAccumulator:
    """Folds a stream into the reply that the same call would have returned whole. Partial at any time."""

    def __init__(self) -> None:
        self.prompt_ids: TokenIds | None = None
        """As reported so far."""
        self._choices: dict[int, _Growing] = {}
        self._usage: Usage | None = None
        self._images: ImageEvidence | None = None
        self._metadata: dict[str, Any] = {}

    def feed(self, delta: EngineDelta) -> None:
        self._metadata |= delta.metadata
        if delta.prompt_ids is not None:
            self.prompt_ids = delta.prompt_ids
        self._usage = delta.usage or self._usage
        self._images = delta.images or self._images
        self._choices.setdefault(delta.shown.choice_index, _Growing()).feed(delta)

    def reply(self) -> EngineReply:
        choices = tuple(growing.choice(index, self._images) for index, growing in sorted(self._choices.items()))
        return EngineReply(
            prompt_ids=self.prompt_ids, choices=choices, usage=self._usage, metadata=dict(self._metadata)
        )


def assistant_message(thinking: str, text: str, calls: Sequence[ToolCall] = ()) -> Message:
    parts: list[Part] = [Thinking(thinking)] if thinking else []
    parts += [Text(text)] if text else []
    return Message("assistant", (*parts, *calls))


def whole_deltas(reply: EngineReply) -> list[EngineDelta]:
    """A whole reply as a stream of one delta per choice."""
    return [
        EngineDelta(
            shown=whole_delta(choice.index, choice.message, choice.token_logprobs),
            sampled_ids=None if choice.sampled_ids is None else choice.sampled_ids.tolist(),
            logprobs=None if choice.logprobs is None else choice.logprobs.tolist(),
            **{name: getattr(choice, name) for name in ChoiceFacts.__struct_fields__},
            prompt_ids=reply.prompt_ids,
            usage=reply.usage,
            metadata=reply.metadata,
        )
        for choice in reply.choices
    ]
