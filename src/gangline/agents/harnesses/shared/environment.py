"""Environment variables of every agent program: the task, the model, the URL for model calls, the key.

The variables of all common SDKs are set together, since a command may well start a program we know nothing of.
Variables that the task sets in `agent.env` take precedence over them, but not over the `GANGLINE_*` ones.

Placeholders such as `{instruction}` in commands and files have the same values. Only the names of `PLACEHOLDERS` are
placeholders; all other braces (`${HOME}`, `{a,b}`, JSON) stay as they are, and so does a name after a dollar sign
(`${model}` is the shell's). In a shell command a value never becomes part of the text: a placeholder turns into an
expansion of the variable that carries the value, quoted as its place needs. So no content of an instruction can become
shell code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gangline.domain.contracts import HarnessContext

PLACEHOLDERS = {
    "instruction": "GANGLINE_INSTRUCTION",
    "model": "GANGLINE_MODEL",
    "base_url": "GANGLINE_BASE_URL",
    "api_key": "GANGLINE_API_KEY",
    "session_id": "GANGLINE_SESSION_ID",
    "max_turns": "GANGLINE_MAX_TURNS",
}
"""Placeholder name -> the variable with the same value."""

_PLACEHOLDER = r"(?<!\$)\{(" + "|".join(PLACEHOLDERS) + r")\}"
_TEMPLATE = re.compile(_PLACEHOLDER)
_SHELL = re.compile(rf"(?P<comment>(?:^|(?<=\s))#[^\n]*)|(?P<escaped>\\.)|(?P<quote>['\"])|{_PLACEHOLDER}", re.DOTALL)

_MAX_ARGUMENT_BYTES = 130_000  # Linux takes 131,072 a string, the variable's name and the closing NUL included


def fits_argument(text: str) -> bool:
    """Whether `text` can be passed to a process as one argument or variable."""
    return "\0" not in text and len(text.encode()) <= _MAX_ARGUMENT_BYTES


def values_of(context: HarnessContext) -> dict[str, str]:
    """Placeholder -> value. `max_turns` is empty if the task sets no limit."""
    return {
        "instruction": context.instruction,
        "model": context.model,
        "base_url": context.base_url,
        "api_key": context.api_key,
        "session_id": context.session_id,
        "max_turns": "" if context.max_turns is None else str(context.max_turns),
    }


def provider_environment(context: HarnessContext) -> dict[str, str]:
    """The harness's environment, without the runtime's own variables.

    An instruction that is too long for a variable is omitted.
    """
    url, key, model = context.base_url.rstrip("/"), context.api_key, context.model
    values = values_of(context)
    if not fits_argument(context.instruction):
        del values["instruction"]
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        "GEMINI_MODEL": model,
        **context.env,
        **{PLACEHOLDERS[name]: value for name, value in values.items()},
    }


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder by its value, in one pass: placeholders inside values are not replaced."""
    return _TEMPLATE.sub(lambda match: values[match[1]], template)


def mentions(template: str, name: str) -> bool:
    return any(match[1] == name for match in _TEMPLATE.finditer(template))


def shell_text(command: str) -> str:
    """A shell command whose placeholders are expansions of variables.

    Raises:
        ValueError: a placeholder is between single quotes, where a shell expands nothing.
    """
    pieces: list[str] = []
    position, quote = 0, ""
    while match := _SHELL.search(command, position):
        pieces.append(command[position : match.start()])
        position = match.end()
        text = match[0]
        if (match["escaped"] and quote == "'") or (match["comment"] and quote):
            text = text[0]
            position = match.start() + 1
        elif match["quote"]:
            quote = _after_quote(quote, text)
        elif match[4]:
            text = _expansion(match[4], quote)
        pieces.append(text)
    return "".join(pieces) + command[position:]


def _after_quote(quote: str, mark: str) -> str:
    """The open quote ("" if there is none) after reading a quotation mark while `quote` was open."""
    if not quote:
        return mark
    return "" if mark == quote else quote


def _expansion(name: str, quote: str) -> str:
    if quote == "'":
        raise ValueError(
            f"{{{name}}} stands between single quotes, where it cannot be filled: write it outside of quotes (it is "
            f"quoted for you), or read ${PLACEHOLDERS[name]}"
        )
    expansion = f"${{{PLACEHOLDERS[name]}}}"
    return expansion if quote else f'"{expansion}"'
