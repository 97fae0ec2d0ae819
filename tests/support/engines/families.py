"""Model families: real tokenizers and templates, replies as their models write them, and an engine that says so.

`FamilyEngine` is an engine in the process: it renders like a real one, takes exact prompt ids, and remembers what it
conditioned every reply on. That memory is the truth that records and rows are held against.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gangline.domain.completion import VersionSpan
from gangline.domain.conversation import Image, Message, ModelCall, ToolCall, ToolDefinition, ToolResult
from gangline.domain.errors import EngineRefused, InvalidRequest
from gangline.domain.node_views import TemplateFacts
from gangline.domain.tokens import TokenIds, logprobs, token_ids
from gangline.models.engine_server.wire import ApiError
from gangline.models.engines.contract import (
    EngineCapabilities,
    EngineChoice,
    EngineDelta,
    EngineReply,
    EngineRequest,
    assistant_message,
    whole_deltas,
)
from gangline.models.engines.fields import messages_fields, tool_fields
from gangline.models.language.contract import ChatTokenizer
from gangline.models.language.messages import template_messages
from gangline.serving.scripted.tokens import scripted_logprob
from support.engines import tokenizers

MEDIA_ID = 7
"""What an image expands to, four times."""


@dataclass(frozen=True)
class Turn:
    """What a model says."""

    text: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """name, JSON text of the arguments"""
    finish: str = "stop"
    """`length`: without an end of turn."""
    split: bool = False
    """One id per character: ids that no tokenizer would choose."""
    end: str | None = None
    """Another end of turn than the usual one."""
    stop_reason: str | None = None
    raw: str | None = None
    """Sampled text in place of what the family would write; the message stays what the other fields say."""
    ids: tuple[int, ...] | None = None
    """Sampled ids in place of everything else."""
    logprob: float | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    strips_ids: bool = False


@dataclass(frozen=True)
class Family:
    """One tokenizer, one template, one way of writing."""

    name: str
    tokenizer: Callable[[], ChatTokenizer]
    write: Callable[[Turn], tuple[list[str], str]]
    """The sampled text, in pieces of which tags stand alone, and the end of turn."""
    has_tools: bool = True
    has_thinking: bool = True
    parallel_calls: bool = True

    def sampled(self, turn: Turn) -> list[int]:
        if turn.ids is not None:
            return list(turn.ids)
        pieces, end = self.write(turn)
        pieces = pieces if turn.raw is None else [turn.raw]
        tokenizer = self.tokenizer()
        ids = [token for piece in pieces for token in self._piece_ids(piece, turn.split)]
        by_string = turn.stop_reason is not None and not turn.stop_reason.isdigit()
        ended = turn.finish == "stop" and not by_string
        return [*ids, *(tokenizer.encode(end if turn.end is None else turn.end) if ended else [])]

    def _piece_ids(self, piece: str, split: bool) -> list[int]:
        tokenizer = self.tokenizer()
        whole = tokenizer.encode(piece)
        if not split or len(whole) == 1:
            return whole
        return [token for char in piece for token in tokenizer.encode(char)]

    def message(self, turn: Turn) -> Message:
        calls = [ToolCall(f"engine-{i}", name, arguments) for i, (name, arguments) in enumerate(turn.calls)]
        text = f"\n\n{turn.text}" if self.name == "qwen3" and turn.thinking and turn.text else turn.text
        return assistant_message(turn.thinking, text, calls)


def _hermes(turn: Turn) -> tuple[list[str], str]:
    pieces = ["<think>", f"\n{turn.thinking}\n", "</think>", "\n\n"] if turn.thinking else []
    pieces += [turn.text] if turn.text else []
    for number, (name, arguments) in enumerate(turn.calls):
        pieces += ["\n"] if number or turn.text else []
        pieces += ["<tool_call>", f'\n{{"name": "{name}", "arguments": {arguments}}}\n', "</tool_call>"]
    return pieces, "<|im_end|>"


def _llama(turn: Turn) -> tuple[list[str], str]:
    calls = [f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in turn.calls]
    return [turn.text + "; ".join(calls)], "<|eot_id|>"


def _harmony(turn: Turn) -> tuple[list[str], str]:
    pieces: list[str] = []
    if turn.thinking:
        pieces += ["<|channel|>", "analysis", "<|message|>", turn.thinking, "<|end|>", "<|start|>", "assistant"]
    if turn.calls:
        name, arguments = turn.calls[0]
        pieces += ["<|channel|>", f"commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>", arguments]
        return pieces, "<|call|>"
    return [*pieces, "<|channel|>", "final", "<|message|>", turn.text], "<|return|>"


def _glm(turn: Turn) -> tuple[list[str], str]:
    pieces = ["\n", "<think>", turn.thinking, "</think>", "\n" + turn.text if turn.text else ""]
    for name, arguments in turn.calls:
        pairs = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in json.loads(arguments).items()
        ]
        pieces += ["\n", "<tool_call>", f"{name}\n{''.join(pairs)}", "</tool_call>"]
    return pieces, "<|observation|>" if turn.calls else "<|user|>"


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3", tokenizers.qwen3, _hermes),
        Family("llama31", tokenizers.llama31, _llama, has_thinking=False, parallel_calls=False),
        Family("gpt_oss", tokenizers.gpt_oss, _harmony, parallel_calls=False),
        Family("glm", tokenizers.glm, _glm),
        Family("smollm2", tokenizers.smollm2, _hermes, has_tools=False, has_thinking=False),
    )
}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.has_tools]
WITH_THINKING = [name for name, family in FAMILIES.items() if family.has_thinking]


@dataclass(frozen=True)
class Conditioned:
    """What the engine saw, and what it sampled then."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]


@dataclass
class FamilyEngine:
    """Implements `Engine`. `turns` answers in order; with `by_turn`, by the number of assistant messages."""

    family: Family
    turns: Sequence[Turn]
    by_turn: bool = False
    takes_prompt_ids: bool = True
    renders: bool = True
    coerces_arguments: bool = False
    """Arguments that are not object become an empty one, as in vLLM."""
    template: TemplateFacts = field(default_factory=TemplateFacts)
    seen: list[Conditioned] = field(default_factory=list[Conditioned])
    sent_ids: list[list[int] | None] = field(default_factory=list[list[int] | None])
    num_rendered: list[int] = field(default_factory=list[int])
    _num_calls: int = 0

    async def probe(self) -> EngineCapabilities:
        return EngineCapabilities(
            engine="family",
            version="1",
            model="m",
            max_context=None,
            reports_ids=True,
            takes_prompt_ids=self.takes_prompt_ids,
            streams_ids=True,
            renders=self.renders,
            logprob_kind="processed",
            template=self.template,
        )

    async def capabilities(self) -> EngineCapabilities:
        return await self.probe()

    async def chat(self, request: EngineRequest) -> EngineReply:
        call = request.call
        self.sent_ids.append(None if request.prompt_ids is None else request.prompt_ids.tolist())
        if request.prompt_ids is None:
            prompt = self._rendered(call.messages, call.tools, call.template_kwargs)
        else:
            prompt = request.prompt_ids.tolist()
        turn = self._next_turn(call)
        choices = [self._choice(index, replace(turn), prompt) for index in range(call.num_choices)]
        return EngineReply(prompt_ids=None if turn.strips_ids else token_ids(prompt), choices=tuple(choices))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        for delta in whole_deltas(await self.chat(request)):
            yield delta

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition] = (),
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> TokenIds:
        self.num_rendered.append(len(messages))
        return token_ids(self._rendered(messages, tools, template_kwargs, add_generation_prompt))

    async def detokenize(self, ids: Sequence[int]) -> str:
        return self.family.tokenizer().decode(list(ids))

    async def check_health(self, timeout_s: float) -> None:
        return None

    async def close(self) -> None:
        return None

    def _next_turn(self, call: ModelCall) -> Turn:
        number = sum(message.role == "assistant" for message in call.messages) if self.by_turn else self._num_calls
        self._num_calls += 1
        return self.turns[min(number, len(self.turns) - 1)]

    def _choice(self, index: int, turn: Turn, prompt: list[int]) -> EngineChoice:
        ids = self.family.sampled(turn)
        values = [scripted_logprob(i, token) if turn.logprob is None else turn.logprob for i, token in enumerate(ids)]
        self.seen.append(Conditioned(prompt, ids, values))
        return EngineChoice(
            index=index,
            message=self.family.message(turn),
            finish_reason="tool_calls" if turn.calls and turn.finish == "stop" else turn.finish,
            stop_reason=turn.stop_reason,
            sampled_ids=None if turn.strips_ids else token_ids(ids),
            logprobs=logprobs(values),
            version_spans=turn.version_spans,
        )

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        template_kwargs: dict[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """An image is four placeholder ids at the end of what comes with it."""
        num_images = sum(isinstance(piece, Image) for message in messages for piece in _pieces(message))
        texts = [replace_images(message) for message in messages]
        if self.coerces_arguments:
            texts = [_coerced(message) for message in texts]
        try:
            ids = self.family.tokenizer().render(
                template_messages(messages_fields(texts)),
                tools=[tool_fields(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                template_kwargs=template_kwargs,
            )
        except (InvalidRequest, ApiError) as refused:
            raise EngineRefused(str(refused), status=400) from refused
        return ids + [MEDIA_ID] * 4 * num_images


def replace_images(message: Message) -> Message:
    kept = tuple(part for part in message.parts if not isinstance(part, Image))
    return Message(message.role, kept, message.name)


def _coerced(message: Message) -> Message:
    parts = [
        msgspec.structs.replace(part, arguments="{}")
        if isinstance(part, ToolCall) and not isinstance(json.loads(part.arguments or "{}"), dict)
        else part
        for part in message.parts
    ]
    return Message(message.role, tuple(parts), message.name)


def _pieces(message: Message) -> list[Any]:
    return [piece for part in message.parts for piece in (part.content if isinstance(part, ToolResult) else (part,))]


def family(name: str) -> Family:
    """Skips the test where the tokenizer is not here."""
    found = FAMILIES[name]
    found.tokenizer()
    return found


def same_ids(a: Any, b: Any) -> bool:
    return np.array_equal(np.asarray(a), np.asarray(b))


families = pytest.mark.parametrize("name", list(FAMILIES))
families_with_tools = pytest.mark.parametrize("name", WITH_TOOLS)
families_with_thinking = pytest.mark.parametrize("name", WITH_THINKING)
