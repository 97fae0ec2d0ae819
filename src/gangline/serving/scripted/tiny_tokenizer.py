"""A small complete tokenizer without files: byte-level BPE, ChatML, tools and thinking in the hermes/Qwen3 format.

For tests and scripted engines without a model's tokenizer. Any text and any bytes can be encoded. A few hundred words
are single tokens, so re-encoding may differ from the sampled ids, as with real tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_WORDS = """
the and you are is to of in for on with that this file read write answer name argument arguments command content
path text echo cat printf function type string system user assistant tool result hello world done
"""


class TinyTokenizer:
    """Implements `ChatTokenizer`."""

    def __init__(self) -> None:
        self._core = _build()
        self.num_ids = self._core.get_vocab_size()
        self._specials = frozenset(self.encode("".join(_SPECIAL)))
        self.eos_ids: frozenset[int] = frozenset(self.encode("<|im_end|>"))

    def encode(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._core.decode(list(ids), skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._specials

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        parts = [_turn("system", "# Tools\n" + "\n".join(json.dumps(tool) for tool in tools))] if tools else []
        parts += [_turn(message["role"], _body(message)) for message in messages]
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
            if (template_kwargs or {}).get("enable_thinking") is False:
                parts.append("<think>\n\n</think>\n\n")
        return self.encode("".join(parts))


def _turn(role: str, body: str) -> str:
    return f"<|im_start|>{role}\n{body}<|im_end|>\n"


def _body(message: dict[str, Any]) -> str:
    thought = message.get("reasoning_content")
    parts = [f"<think>\n{thought.strip()}\n</think>\n\n" if thought else "", message.get("content") or ""]
    for call in message.get("tool_calls") or ():
        parts.append(f"\n<tool_call>\n{json.dumps(call['function'])}\n</tool_call>")
    return "".join(parts)


def _build() -> Tokenizer:
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in [form for bare in _WORDS.split() for form in (bare, "Ġ" + bare)]:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    core.add_tokens([AddedToken(token, special=False) for token in _TAGS])
    return core
