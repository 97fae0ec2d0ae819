"""Detects lost tool calls: text that looks like a tool call of any known model family, although no call was parsed.

The same rule applies to replies parsed here and by engines.

- A mark followed by the start of a call, or at the beginning of a line, is a call. So is a special token, and a JSON
  object that names an offered tool and its arguments.
- A tag mentioned in a sentence is prose: `<tool_call>` in inline code, in quotes, or in the middle of a line without
  the start of a call after it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_TAG = r"(?:\w+[:_])?(?:tool_?calls?|function_calls?|start_function_call)(?:_begin|_start)?"
_BODY = r"\s*(?:[{\[]|```|call:|<function=|<invoke |<(?:tool_call|parameter|name|\w+:invoke)\b|[\w.:/-]+\s*<arg_key>)"
_CALLS = (
    # A tag before the start of a call, or alone at the beginning of a line.
    rf"<{_TAG}>{_BODY}",
    rf"^[^\S\n]*<{_TAG}>",
    r"^[^\S\n]*</?(?:function|parameter|invoke)(?:[= ][^<>\n]*)?>",
    r"^[^\S\n]*</?arg_(?:key|value)>",
    # The end of a call without its start.
    rf"(?:^[^\S\n]*|[>}}\]]\s*)</{_TAG}>",
)
_TOKENS = (
    r"<[|｜](?:DSML[|｜])?/?(?:tool[_▁]calls?|function_calls?|invoke|python_tag|action_start|START_ACTION)(?:[\W_▁][^<>\n]*)?>",
    r"\[TOOL_CALLS?\]",
    r"<invoke name=",
    r"\bto=functions\.\S",
    r"<\|channel\|>[^<\n]*\bto=",
)
_CALL = re.compile("|".join(f"(?:{one})" for one in _CALLS), re.IGNORECASE | re.MULTILINE)
_TOKEN = re.compile(rf"(?P<before>[^\n]?)(?:{'|'.join(_TOKENS)})", re.IGNORECASE)
_NAMED = re.compile(
    r"""["'](?:name|function)["']\s*:\s*["']([^"'\n]+)["']\s*,\s*["'](?:arguments|parameters)["']\s*:"""
    r"""|<function[= ](?:name=)?["']?([^<>"'\n]+)["']?>"""
)
_QUOTES = "`\"'“‘«"


def lost_calls(text: str, thinking: str, *, num_calls: int, names: Collection[str]) -> bool:
    """text, thinking: the rest of a reply without the parsed calls.
    names: the offered tools'.

    A call inside thinking counts only if the reply contains nothing else.
    """
    return speaks_a_call(text, names) or (not num_calls and not text.strip() and speaks_a_call(thinking, names))


def speaks_a_call(text: str, names: Collection[str]) -> bool:
    if not ("<" in text or "[" in text or "{" in text or "to=" in text):
        return False
    return (
        _CALL.search(text) is not None
        or any(token["before"] not in _QUOTES or not token["before"] for token in _TOKEN.finditer(text))
        or any((named[1] or named[2]).strip() in names for named in _NAMED.finditer(text))
    )
