"""Tool calls that a model writes without the tags of its template.

An engine's parser finds calls by their tags, so such a call arrives as text, and would be taken for an answer. One
counts where a line of the reply begins with a JSON object that names an offered tool and goes on with its arguments,
whether or not the rest is JSON. The same words inside a sentence are talk about a call.
"""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["has_untagged_call"]

_CALL = re.compile(
    r'^[ \t]*\[?[ \t]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"function"\s*:\s*\{\s*)?'
    r'"name"\s*:\s*"(?P<name>[^"\n]*)"\s*,\s*"(?:arguments|parameters)"\s*:',
    re.MULTILINE,
)


def has_untagged_call(text: str, names: Collection[str]) -> bool:
    """names: of the offered tools."""
    return any(found["name"] in names for found in _CALL.finditer(text))
