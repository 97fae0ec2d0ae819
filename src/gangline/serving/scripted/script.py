"""The script of a scripted engine: maps requests to replies. JSON or TOML, written by people.

    {
      "rules": [
        {"turn": 0, "tool_calls": [{"run": "echo hi > out.txt"}]},
        {"turn": 1, "pattern": "error", "text": "That failed."},
        {"turn": 1, "text": "Done."}
      ],
      "default": {"text": "I have nothing to say."}
    }

Rules are tried in order, and the first matching rule answers. All conditions of a rule must hold.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import pydantic
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from gangline.domain.errors import InvalidRequest


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CallTool(_Frozen):
    """Call this tool, offered or not."""

    name: str
    arguments: dict[str, Any] = {}


class RunCommand(_Frozen):
    """Call the offered tool that runs shell commands."""

    run: str


class FileContent(_Frozen):
    path: str
    content: str


class WriteFile(_Frozen):
    """Call the offered tool that writes files, or else the tool that runs commands."""

    write: FileContent


class ReadFile(_Frozen):
    """Call the offered tool that reads files, or else the tool that runs commands."""

    read: str


ToolUse = CallTool | RunCommand | WriteFile | ReadFile


class Faults(_Frozen):
    """The faults of a reply."""

    status: int | None = Field(default=None, ge=400, le=599)
    """Answer with this HTTP status instead."""
    retry_after_s: NonNegativeFloat | None = None
    """`retry-after` header, in addition to `status`."""
    drop_connection: NonNegativeInt | None = None
    """Close the connection after this many tokens."""
    garbage: bool = False
    """Answer 200 with a body that is truncated in the middle of its JSON."""
    hang: bool = False
    """Accept the request and never answer."""
    times: PositiveInt | None = 1
    """How often the same request gets the four faults above; null means always."""
    no_token_ids: bool = False
    """Omit ids and weight versions, like a router that strips unknown fields. Always."""
    ignore_prompt_ids: bool = False
    """Ignore exact prompt ids and render instead, like older engines. Always."""
    nan_logprobs: bool = False
    """Every log-prob is not a number. Always."""


class Reply(_Frozen):
    text: str = ""
    thinking: str | None = None
    """Written before the text in think tags; omitted if the prompt has closed thinking."""
    tool_calls: tuple[ToolUse, ...] = ()
    finish: Literal["stop", "length"] = "stop"
    """`length` ends the reply without an end of turn."""
    delay_s: NonNegativeFloat = 0.0
    """Before the first token."""
    token_delay_s: NonNegativeFloat = 0.0
    """Before each further token."""
    logprob: float | None = None
    """Log-prob of every token; by default derived from position and id."""
    split: Literal["bytes", "chars"] | None = None
    """Sample the text as one token per byte or character: the same text, with ids that no tokenizer would choose."""
    faults: Faults = Faults()


class Rule(Reply):
    turn: NonNegativeInt | None = None
    """Number of assistant messages already in the request."""
    pattern: str | None = None
    """Regular expression searched in the text of messages."""
    where: Literal["last", "any"] = "last"
    """Whether `pattern` is searched in the last message or in all of them."""

    @pydantic.field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    def matches(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> bool:
        """A rule that needs a tool does not match calls without tools (titles, summaries)."""
        if not tools and any(not isinstance(use, CallTool) for use in self.tool_calls):
            return False
        if self.turn is not None and self.turn != sum(m.get("role") == "assistant" for m in messages):
            return False
        looked_at = messages if self.where == "any" else messages[-1:]
        pattern = self.pattern
        return pattern is None or any(re.search(pattern, message_text(m)) for m in looked_at)


class Script(_Frozen):
    rules: tuple[Rule, ...] = ()
    default: Reply = Reply(text="Done.")
    """The reply if no rule matches."""
    model: str = "scripted"
    """Name under which the model is served."""
    context_length: PositiveInt = 200_000
    """Tokens of prompt and reply together."""
    weight_version: NonNegativeInt = 0

    def reply_to(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> Reply:
        return next((rule for rule in self.rules if rule.matches(messages, tools)), self.default)


def load_script(path: Path) -> Script:
    """Read a script, as TOML if the name ends with `.toml`, otherwise as JSON.

    Raises:
        InvalidRequest: the file cannot be read, or is not a script; the message names each wrong field.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return Script.model_validate(tomllib.loads(text))
        return Script.model_validate_json(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"cannot read the script {path}: {error}") from error
    except pydantic.ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise InvalidRequest(f"{path} is not a script: {wrong}") from error


def message_text(message: dict[str, Any]) -> str:
    """The text of a message's content, in any of its formats."""
    content: object = message.get("content")
    if isinstance(content, str):
        return content
    parts = cast("list[object]", content) if isinstance(content, list) else []
    texts = [str(cast("dict[str, object]", part).get("text") or "") for part in parts if isinstance(part, dict)]
    return "\n".join(texts)
