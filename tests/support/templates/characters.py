"""A tokenizer of characters, in which each special token that a template's text names is one id."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from transformers.utils.chat_template_utils import _compile_jinja_template  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]

from gangline.models.language.tokenizer import HfChatTokenizer

__all__ = ["BOS", "EOS", "Characters", "plain_text"]

BOS, EOS = "<s>", "</s>"
"""What templates call `bos_token` and `eos_token`."""

_SPECIAL = re.compile(
    r"<[|｜][^<>\n{}]{1,60}?[|｜]>"  # <|im_end|>, of most
    r'|<\|[a-z_"]{1,30}>|<[a-z_"]{1,30}\|>'  # <|turn> and <turn|>, of Gemma 4
    r"|</?[a-z_]{2,30}(?::[a-z_]{2,30})?>"  # <tool_call>
    r"|\[/?[A-Z_]{3,30}\]"  # [INST]
    r"|\]~!?[a-z]\[|\]~[a-z]\]|\[e~\["  # of MiniMax
    r"|<SPECIAL_[0-9]+>"
)


class _Added(NamedTuple):
    special: bool = True


class Characters:
    """As much of a transformers tokenizer as `HfChatTokenizer` uses."""

    def __init__(self, template: str) -> None:
        self._template = template
        named = {name for name in _SPECIAL.findall(template) if "{" not in name}
        self.specials = sorted(named | {BOS, EOS})
        self._ids = {name: number for number, name in enumerate(self.specials)}
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self.added_tokens_decoder = dict.fromkeys(range(len(self.specials)), _Added())
        self.eos_token_id = self._ids[EOS]

    def __len__(self) -> int:
        return len(self.specials) + 0x110000

    def chat_tokenizer(self) -> HfChatTokenizer:
        return HfChatTokenizer(self)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        first, pieces = len(self.specials), list[Any]()
        for number, piece in enumerate(self._pattern.split(text)):
            if number % 2:
                pieces.append([self._ids[piece]])
            else:
                pieces.append(np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), np.int32) + first)
        return np.concatenate(pieces).tolist()

    def decode(self, ids: Sequence[int], **_how: Any) -> str:
        first, all_ids = len(self.specials), np.asarray(ids, np.int32)
        if not len(all_ids):
            return ""
        runs = np.split(all_ids, np.flatnonzero(np.diff(all_ids < first)) + 1)
        return "".join(
            "".join(self.specials[one] for one in run.tolist())
            if run[0] < first
            else (run - first).astype("<i4").tobytes().decode("utf-32-le", "surrogatepass")
            for run in runs
        )

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tokenize: bool, **arguments: Any) -> str:
        """By transformers' own environment."""
        compiled: Any = _compile_jinja_template(self._template)
        return compiled.render(messages=messages, bos_token=BOS, eos_token=EOS, **arguments)


def plain_text(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
    prompt: bool,
) -> str:
    """The judge's rendering: Jinja as the documentation of chat templates describes it, with nothing of ours.

    Raises: whatever the template raises.
    """
    arguments: dict[str, Any] = kwargs if tools is None else kwargs | {"tools": tools}
    return _compiled(template).render(
        messages=messages, add_generation_prompt=prompt, bos_token=BOS, eos_token=EOS, **arguments
    )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what is sampled, and writes nothing."""

    tags: ClassVar[set[str]] = {"generation"}  # pyright: ignore[reportIncompatibleVariableOverride]

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


_cache: dict[str, jinja2.Template] = {}


def _compiled(template: str) -> jinja2.Template:
    if template not in _cache:
        environment: Any = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        _cache[template] = environment.from_string(template)
    return _cache[template]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
