"""What looks like a tool call in text, of any known family of models: where none was read, one was lost.

The same rule for replies that are read here, and for those of engines that parse by themselves.

- A mark that is followed by what a call begins with, or that begins a line, is a call. So is a special token, and a
  JSON object that names an offered tool and its arguments.
- A tag that a sentence speaks of is prose: `<tool_call>` in inline code, in quotes, or in the middle of a line with
  nothing of a call behind it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["lost_calls", "speaks_a_call"]

_TAG = r"(?:\w+[:_])?(?:tool_?calls?|function_calls?|start_function_call)(?:_begin|_start)?"
_BODY = r"\s*(?:[{\[]|```|call:|<function=|<invoke |<(?:tool_call|parameter|name|\w+:invoke)\b|[\w.:/-]+\s*<arg_key>)"
_CALLS = (
    # A tag before the beginning of a call, or alone at the beginning of a line.
    rf"<{_TAG}>{_BODY}",
    rf"^[^\S\n]*<{_TAG}>",
    r"^[^\S\n]*</?(?:function|parameter|invoke)(?:[= ][^<>\n]*)?>",
    r"^[^\S\n]*</?arg_(?:key|value)>",
    # The end of a call without its beginning.
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
    """
    text, thinking: what is left of a reply beside the calls that were read.
    names: of the offered tools.

    A call in a thought was only thought of, unless the reply is nothing else.
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
