"""The page of request fields: read from the tables that the parsers use."""

from __future__ import annotations

from collections.abc import Iterator

from gangline.wire.dialects.anthropic.request import MESSAGES_FIELDS
from gangline.wire.dialects.bodies import DeclaredFields
from gangline.wire.dialects.chat.request import CHAT_FIELDS
from gangline.wire.dialects.google.request import GOOGLE_CONFIG_FIELDS, GOOGLE_FIELDS
from gangline.wire.dialects.responses.request import RESPONSES_FIELDS

_INTRODUCTION = """\
# Request fields

What a node does with each field of a model call:

- **Served** fields do what the provider says.
- **Refused** fields are answered with a 400 that names them: they carry state that only the provider has, or would make
  another reply. Values in brackets change nothing, and are accepted.
- **Dropped** fields are named in the record (`dropped`), and the call goes on without them. So are fields that are not
  listed here, unless the field's name speaks of a part of the conversation (`memory_store`, `thread_id`, `documents`,
  `system_prompt`) or its value is the id of an earlier reply of the session: those are refused.

Empty values change nothing.
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
        parts += [f"## {title}\n", *_lines(declared), ""]
    return "\n".join(parts)


def _lines(declared: DeclaredFields) -> Iterator[str]:
    limited = [f"`{name}` ({declared.limits[name]})" for name in sorted(declared.limits)]
    served = [f"`{name}`" for name in sorted(declared.served) if name not in declared.limits]
    refused = [f"`{name}`{_neutral(values)}" for name, values in sorted(declared.refused.items())]
    yield f"- Served: {', '.join([*served, *limited])}"
    if refused:
        yield f"- Refused: {', '.join(refused)}"
    by_reason: dict[str, list[str]] = {}
    for name, why in sorted(declared.dropped.items()):
        by_reason.setdefault(why, []).append(f"`{name}`")
    yield from (f"- Dropped, since {why}: {', '.join(names)}" for why, names in by_reason.items())


def _neutral(values: tuple[object, ...]) -> str:
    shown = [f"`{value!r}`" for value in values if value not in (None, "", [], {})]
    return f" ({', '.join(shown)})" if shown else ""
