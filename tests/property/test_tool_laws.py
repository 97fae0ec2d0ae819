"""Laws of tools: observations stay within their limit, and any arguments are read or refused."""

from __future__ import annotations

import contextlib

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gangline.agents.tools.answers import Captured
from gangline.agents.tools.arguments import read
from gangline.agents.tools.bounding import captured, head_and_tail
from gangline.agents.tools.contract import ToolFailed
from gangline.settings import plugins

TEXTS = st.text(st.characters(), max_size=300)
NOTICE = 64
"""Bytes of the longest notice."""


@given(TEXTS, st.integers(-10, 200))
def test_a_bounded_text_has_head_tail_and_the_count_between(text: str, limit: int) -> None:
    data = text.encode(errors="replace")
    bounded = head_and_tail(text, limit)
    if len(data) <= limit:
        assert bounded.encode() == data
        return
    head, _, rest = bounded.partition("\n[") if "\n[" not in text else ("", "", "")
    assert len(bounded.encode()) <= max(0, limit) + NOTICE
    if head or rest:
        count, _, tail = rest.partition(" bytes left out]\n")
        assert data.startswith(head.encode())
        assert data.endswith(tail.encode())
        assert int(count) + len(head.encode()) + len(tail.encode()) == len(data)


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(1, 1 << 40), st.integers(0, 300))
def test_output_without_its_middle_counts_both_gaps(head: bytes, tail: bytes, omitted: int, limit: int) -> None:
    shown = captured(Captured(head=head, tail=tail, omitted_bytes=omitted), limit)
    assert len(shown.encode()) <= limit + NOTICE
    num_decoded = sum(len(part.decode(errors="replace").encode()) for part in (head, tail))
    if num_decoded <= limit:
        assert f"[{omitted} bytes left out]" in shown


class _Arguments(msgspec.Struct):
    name: str
    count: int | msgspec.UnsetType = msgspec.UNSET


@given(
    st.dictionaries(st.sampled_from(["name", "count", "other"]), st.none() | st.integers() | TEXTS | st.lists(TEXTS))
)
def test_arguments_are_read_or_refused(arguments: dict[str, object]) -> None:
    with contextlib.suppress(ToolFailed):
        given_ = read(arguments, _Arguments)
        assert given_.name == arguments["name"]
        assert "other" not in arguments or arguments["other"] is None


def test_every_built_in_tool_has_a_flat_schema_that_a_model_can_read() -> None:
    for name in plugins.names("tool"):
        tool = plugins.make_tool(name, {})
        assert tool.name == name
        assert len(tool.description) > 40
        assert tool.parameters["type"] == "object"
        for field in tool.parameters["properties"].values():
            assert field["type"] in ("string", "number", "integer", "boolean", "array")
            assert "$ref" not in field
