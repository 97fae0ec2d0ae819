"""Bodies as they come, for every dialect: halves of characters are mended, and integers that no record can hold are
refused, before anything is sampled.

JavaScript clients may cut tool output inside an emoji and send the rest as a lone escape (`"\ud83d"`), which is not a
character and which strict decoders reject. An agent must not fail because of that: each lone surrogate becomes U+FFFD,
and `dropped` reports it. It is replaced in the same way when it comes back as history, so the conversation still
matches. Valid bodies are not affected: the search runs only on rejected ones.

Records and engines hold integers of 64 bits. In the arguments of tool calls longer ones are carried: those are text, as
the model wrote them, and an agent that echoes its own history must not be refused. Dropped fields are not looked at.

A dialect's request fields are served, refused or dropped: `DeclaredFields`. The parsers read these tables, and
docs/reference/dialect-fields.md is made from them. A field that carries state, or that would change the conversation,
is served or refused. Dropped fields are those that change no token an engine here could sample, those that the provider
itself would act on, and hints. A field that no table has is refused where its name speaks of state, since nobody here
knows what it would do.

What clients say of thinking becomes one wish in every dialect: a switch or a kind of thinking turns it on or off; a
word for the effort turns it on, and `none` off; a budget of 0 turns it off, and any other on. Where a client says
nothing, nothing is sent, and the template decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec

from gangline.domain.conversation import ModelCall, ThinkingWish
from gangline.domain.errors import InvalidRequest

LONE_SURROGATES = "lone surrogates"
"""Entry in `ModelCall.dropped`: lone surrogates were replaced."""

# Matches every escape, so that an escaped backslash before a `u` is not mistaken for one. Pairs match before single
# surrogates.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)

_LONG = re.compile(rb"\d{19}")
"""Without a match there is no such integer; a match may also be part of a text."""
_LEAST, _MOST = -(2**63), 2**63 - 1

_STATE = re.compile(
    r"(?:^|[_.-])(?:assistant|attachment|cached|checkpoint|code_exec|compact|container|context|continu|conversation"
    r"|data_?s(?:ource|tore)|document|fallback|file_ids?$|grounding|histor|instruction|knowledge|mcp|memor|plugin|previous|prompt$|rag(?:$|_)"
    r"|resum|retriev|search|skill|snapshot|state|system(?:$|_)|template|thread|transform|truncat|vector)"
)
_UPPER = re.compile(r"(?<=[a-z0-9])([A-Z])")
_NOTHING = frozenset({"null", "false", "0", '""', "[]", "{}"})

THINKING_KINDS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
"""Value of `type` -> whether thinking is on. For other values, such as `auto`, the template decides."""
_UNSAID = ("", "auto", "default", "thinking_level_unspecified")


def wish_of_effort(word: str | None) -> ThinkingWish:
    word = (word or "").lower()
    if word in _UNSAID:
        return ThinkingWish()
    return ThinkingWish(is_on=False) if word == "none" else ThinkingWish(is_on=True, effort=word)


def speaks_of_state(field: str, value: str) -> bool:
    """Whether the name of an undeclared field suggests that it adds to or changes the conversation. value: JSON."""
    words = _UPPER.sub(r"_\1", field).lower()
    return value.strip() not in _NOTHING and _STATE.search(words) is not None


class DeclaredFields(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is in one of the three tables. A field in no table is dropped as unknown, but the call is rejected if
    its name suggests state or it contains the id of a reply of the session.
    """

    served: frozenset[str]
    refused: Mapping[str, tuple[Any, ...]]
    """Field -> values that have no effect."""
    dropped: Mapping[str, str]
    """Field -> why it can be dropped."""
    limits: Mapping[str, str] = {}
    """Served field -> the part of it that is rejected."""

    def refuses(self, field: str, value: Any) -> bool:
        return field in self.refused and value not in self.refused[field]

    def undeclared(self, fields: Iterable[str]) -> list[str]:
        return [name for name in fields if name not in self.served | self.refused.keys() | self.dropped.keys()]


def role_in(metadata: object) -> str | None:
    """The role in a request's metadata: `{"role": "solver"}`."""
    role = cast("Mapping[str, object]", metadata).get("role") if isinstance(metadata, Mapping) else None
    return role if isinstance(role, str) else None


def parse_body(parse: Callable[[bytes], ModelCall], body: bytes, *, index: str = "[{}]") -> ModelCall:
    """The call that `parse` returns. `index`: this provider's notation for list positions in its errors.

    Raises: InvalidRequest, naming the field.
    """
    call = parse_mended(parse, body)
    for field, value in call.undeclared.items():
        if speaks_of_state(field, value):
            raise InvalidRequest(
                f"The `{field}` parameter is not supported here: nobody knows it, and by its name it brings or changes "
                "a part of the conversation. Leave it out, and send the whole conversation.",
                param=field,
            )
    recorded = _recorded(call)
    if _LONG.search(msgspec.json.encode(recorded)):  # short compared with the body and its conversation
        for number in _integers(recorded):
            if not _LEAST <= number <= _MOST:
                path = _path_of(number, msgspec.json.decode(body), index)
                where = (path or "").removeprefix(".") or "body"
                raise InvalidRequest(f"{where}: an integer of more than 64 bits cannot be carried.", param=where)
    return call


def parse_mended(parse: Callable[[bytes], ModelCall], body: bytes) -> ModelCall:
    """The call that `parse` returns for the body, with lone surrogates replaced. Raises: the errors of `parse`."""
    try:
        return parse(body)
    except InvalidRequest:
        mended = _mended(body)
        if mended == body:
            raise
    call = parse(mended)
    return msgspec.structs.replace(call, dropped=(*call.dropped, LONE_SURROGATES))


def _mended(body: bytes) -> bytes:
    return _ESCAPE.sub(lambda escape: escape[0] if escape[1] is None else rb"\ufffd", body)


def decoded(body: bytes | msgspec.Raw, kind: Any, refusal: Callable[[msgspec.ValidationError], InvalidRequest]) -> Any:
    """The JSON as `kind`. refusal: creates the provider's error for a wrong type. Raises: InvalidRequest."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise refusal(error) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from None


def _recorded(call: ModelCall) -> list[Any]:
    """The values that are recorded or sent to an engine as numbers."""
    tools = [(tool.parameters, tool.grammar) for tool in call.tools]
    counts = [call.num_choices, call.num_top_logprobs]
    return [msgspec.structs.asdict(call.sampling), counts, tools, call.template_kwargs, call.response_format]


def _integers(value: Any) -> Iterator[int]:
    match value:
        case bool():
            return
        case int():
            yield value
        case dict():
            for inner in cast("dict[str, Any]", value).values():
                yield from _integers(inner)
        case list() | tuple():
            for inner in cast("list[Any]", value):
                yield from _integers(inner)
        case _:
            return


def _path_of(number: int, value: Any, index: str) -> str | None:
    """Path of the first occurrence of the number, such as `.tools[0].parameters.maximum`."""
    if value == number and isinstance(value, int):
        return ""
    entries: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        entries = [(f".{key}", inner) for key, inner in cast("dict[str, Any]", value).items()]
    elif isinstance(value, list):
        entries = [(index.format(i), inner) for i, inner in enumerate(cast("list[Any]", value))]
    for name, inner in entries:
        below = _path_of(number, inner, index)
        if below is not None:
            return name + below
    return None
