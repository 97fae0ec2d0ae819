"""Placeholders such as `{instruction}` in commands and files.

Only the names of `environment.PLACEHOLDERS` are placeholders; all other braces (`${HOME}`, `{a,b}`, JSON) are kept, and
so is a name after a dollar sign (`${model}` is the shell's).

In a shell command a value never becomes part of the text: a placeholder becomes an expansion of the variable with the
value, quoted for its position. So an instruction can never become shell code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gangline.agents.harnesses.shared.environment import PLACEHOLDERS

_PLACEHOLDER = r"(?<!\$)\{(" + "|".join(PLACEHOLDERS) + r")\}"
_TEMPLATE = re.compile(_PLACEHOLDER)
_SHELL = re.compile(rf"(?P<comment>(?:^|(?<=\s))#[^\n]*)|(?P<escaped>\\.)|(?P<quote>['\"])|{_PLACEHOLDER}", re.DOTALL)


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
