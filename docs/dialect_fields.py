"""The page of request fields: read from the tables that the parsers use."""

from __future__ import annotations

from collections.abc import Iterator

from gangline.wire.dialects.anthropic.request import MESSAGES_FIELDS
from gangline.wire.dialects.chat.request import CHAT_FIELDS
from gangline.wire.dialects.declared import DeclaredFields
from gangline.wire.dialects.google.request import GOOGLE_CONFIG_FIELDS, GOOGLE_FIELDS
from gangline.wire.dialects.responses.request import RESPONSES_FIELDS

_INTRODUCTION = """\
# Request fields

What a node does with each field of a model call. **Served** fields do what the provider says. **Refused** fields are
answered with a 400 that names them, except at values that change nothing: they carry state that only the provider has,
or would make another reply. **Dropped** fields are named in the record (`dropped`), and the call goes on without them.

A field that is in no table is dropped as well, and named in the record. The call is refused instead where the field's
name speaks of a part of the conversation (`memory_store`, `thread_id`, `documents`, `system_prompt`), or its value
names an earlier reply of the session by its id: without that field it would be another conversation. Empty values
change nothing.
"""

_DIALECTS = {
    "OpenAI Chat": CHAT_FIELDS,
    "OpenAI Responses": RESPONSES_FIELDS,
    "Anthropic Messages": MESSAGES_FIELDS,
    "Google generateContent": GOOGLE_FIELDS,
    "Google generateContent: `generationConfig`": GOOGLE_CONFIG_FIELDS,
}


def dialect_fields() -> str:
    """docs/reference/dialect-fields.md"""
    parts = ["<!-- Made by docs/generate.py from the code; `make docs` makes it again. -->\n", _INTRODUCTION]
    for title, declared in _DIALECTS.items():
        parts += [f"## {title}\n", "| field | | |\n|---|---|---|", *_rows(declared), ""]
    return "\n".join(parts)


def _rows(declared: DeclaredFields) -> Iterator[str]:
    rows = [(name, "served", declared.limits.get(name, "")) for name in declared.served]
    rows += [(name, "refused", _neutral(values)) for name, values in declared.refused.items()]
    rows += [(name, "dropped", why) for name, why in declared.dropped.items()]
    for name, outcome, remark in sorted(rows):
        yield f"| `{name}` | {outcome} | {remark} |"


def _neutral(values: tuple[object, ...]) -> str:
    shown = [f"`{value!r}`" for value in values if value is not None]
    return f"but for {', '.join(shown)}" if shown else ""
