"""Lists of texts that a dataset stores as one text: JSON, a Python list, an array as NumPy prints it, lines."""

from __future__ import annotations

import ast
import io
import json
import tokenize
import warnings
from typing import Any, cast

_NOTHING = {"", "nan", "none", "null", "<na>"}
_BRACKETS = {"[", "]", "(", ")", "{", "}", ","}
_LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER}


def texts_of(given: Any) -> list[str]:
    """Returns the texts in a list, a tuple, an array, or a text in one of these forms; empty for null.

    Raises: ValueError when it is anything else, or contains other values than texts.
    """
    if hasattr(given, "tolist"):  # NumPy's
        given = given.tolist()
    if given is None or given != given:  # NaN, which is pandas' null
        return []
    if isinstance(given, str):
        return _written(given.strip())
    if isinstance(given, list | tuple | set | frozenset):
        return _only_texts(list(cast("list[Any]", given)))
    raise ValueError(f"is a {type(given).__name__}, not a list of texts")


def _written(text: str) -> list[str]:
    if text.casefold() in _NOTHING:
        return []
    if text[0] not in "[({\"'" and not text.startswith("array("):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _of_python(text)
    return _written(found.strip()) if isinstance(found, str) else _only_texts(found)


def _only_texts(found: Any) -> list[str]:
    if not isinstance(found, list):
        raise ValueError(f"is a {type(found).__name__}, not a list of texts")
    for at, one in enumerate(cast("list[Any]", found)):
        if not isinstance(one, str):
            raise ValueError(f"item {at} is not text: {str(one)[:40]}")
    return cast("list[str]", found)


def _of_python(text: str) -> list[str]:
    """Parse token by token: NumPy prints no commas, and Python itself would join adjacent texts."""
    found: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes that are not escapes
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.STRING:
                    found.append(ast.literal_eval(token.string))
                elif token.string == "...":
                    raise ValueError("was cut short where it was written: it has `...`")
                elif token.type not in _LAYOUT and token.string not in {*_BRACKETS, *("array", "dtype", "=", "object")}:
                    raise ValueError(f"is neither JSON nor a list of texts: it has {token.string[:40]!r}")
    except (tokenize.TokenError, SyntaxError) as error:
        raise ValueError(f"is neither JSON nor a list of texts: {error.args[0]}") from error
    return _only_texts(found)
