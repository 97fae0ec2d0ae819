"""Numbers of sampled tokens that a plug-in brings: kept in a record, and found again in a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.completion import Certificate, Completion, NumbersEvidence
from gangline.domain.conversation import Message, Text
from gangline.domain.evidence.contract import EvidenceWire, NumbersOfTokens, Tokens
from gangline.domain.tokens import decode_msgpack, encode_json, encode_msgpack
from gangline.rows.rows import rows_of
from gangline.settings import evidence
from support.engines.expert_talks import result_of


class Likeliest(NumbersOfTokens):
    name = "likeliest"
    title = "likeliest log-probs"
    what = "the likeliest log-probs of each token"

    def wire(self, engine: str, options: Mapping[str, Any]) -> EvidenceWire | None:
        return None


KIND = Likeliest()
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def tokens_of(num: int) -> Tokens:
    return Tokens(np.arange(num, dtype=np.int32), 0, 3, None, None)


def recorded(value: Any, num: int) -> Completion:
    """A call of three prompt ids and `num` sampled ones."""
    plain = Completion(
        completion_id="c1-000001",
        session_id="s1",
        attempt=1,
        status="complete",
        parent_id=None,
        branch_key="k",
        dialect="openai_chat",
        model="m",
        prompt_shared=0,
        prompt_suffix_ids=np.arange(3, dtype=np.int32),
        sampled_ids=np.arange(num, dtype=np.int32),
        logprobs=np.full(num, -0.5, np.float32),
        messages_shared=0,
        new_messages=(Message("user", (Text("x"),)),),
        response=Message("assistant", (Text("y"),)),
        certificate=Certificate(prompt_source="engine", context="first", logprobs="raw", finish_reason="stop"),
        started_at=0.0,
        finished_at=0.0,
    )
    return plain.with_evidence({KIND.name: KIND.keep(value, tokens_of(num))})


@st.composite
def reported(draw: st.DrawFn) -> list[Any]:
    num, width = draw(st.integers(1, 6)), draw(st.sampled_from([0, 2, 3]))
    one = st.lists(NUMBERS, min_size=width, max_size=width) if width else NUMBERS
    return draw(st.lists(one, min_size=num, max_size=num))


@given(reported())
def test_numbers_come_back_through_the_records_formats_and_in_the_row(value: list[Any]) -> None:
    record = recorded(value, len(value))
    assert record.num_evidence_bytes == 4 * np.asarray(value).size
    assert record.without_evidence_bytes().data_of(KIND.name) == b""
    assert record.without_evidence_bytes().certificate == record.certificate
    for again in (
        decode_msgpack(encode_msgpack(record), Completion),
        msgspec.json.decode(msgspec.json.encode(record.certificate), type=Certificate),
    ):
        found = again if isinstance(again, Certificate) else again.certificate
        assert found.evidence == record.certificate.evidence
    result = result_of([decode_msgpack(encode_msgpack(record), Completion)])
    (column,) = KIND.columns(result).values()
    assert (column.values, column.missing) == (value, None)


@given(reported(), st.integers(1, 3), st.booleans())
def test_any_other_number_of_tokens_is_refused_and_the_row_says_why(value: list[Any], by: int, longer: bool) -> None:
    num = len(value) + by if longer else max(0, len(value) - by)
    held = KIND.keep(value, tokens_of(num))
    assert held.evidence.refused is not None
    assert held.data == b""
    if num:
        (column,) = KIND.columns(result_of([recorded(value, num)])).values()
        assert held.evidence.refused in (column.missing or "")
        assert column.values == []


def test_a_turn_without_numbers_that_is_not_trained_on_leaves_the_others_known() -> None:
    first, second = recorded([1.0, 2.0], 2), recorded(None, 2)
    changed = msgspec.structs.replace(second.certificate, context="exact", untrainable="why not")
    second = msgspec.structs.replace(
        second, completion_id="c1-000002", parent_id="c1-000001", prompt_shared=5, certificate=changed
    )
    result = result_of([first, second])
    (column,) = KIND.columns(result).values()
    assert column.values == [1.0, 2.0, None, None, None, None, None]
    trained = msgspec.structs.replace(changed, untrainable=None)
    (column,) = KIND.columns(result_of([first, msgspec.structs.replace(second, certificate=trained)])).values()
    assert column.missing == "c1-000002: the engine reported no likeliest log-probs"


@pytest.mark.parametrize("value", [None, "abc", [[1.0], [1.0, 2.0]], [{}], {"a": 1}, [[[1.0]]], [1e400, "x"], 3.0])
def test_anything_else_is_refused_and_never_raised(value: Any) -> None:
    assert KIND.keep(value, tokens_of(1)).evidence.refused is not None


@given(reported(), st.integers(0, 7))
def test_tokens_behind_a_stop_string_are_cut_off(value: list[Any], num_cut: int) -> None:
    assert KIND.without_last(value, num_cut) == value[: max(0, len(value) - num_cut)]


def test_evidence_of_several_kinds_stands_side_by_side() -> None:
    record = recorded([1.0, 2.0], 2)
    both = record.with_evidence({"other": KIND.keep([3.0, 4.0], tokens_of(2))})
    assert isinstance(both.certificate.evidence, dict)
    assert set(both.certificate.evidence) == {"likeliest", "other"}
    assert both.data_of("likeliest") == record.data_of("likeliest")
    assert both.certificate.evidence_of("none") is None
    assert isinstance(both.certificate.evidence_of("other"), NumbersEvidence)
    assert (both.routed_experts, both.sampling_mask) == (b"", b"")


def test_a_row_has_it_where_the_kind_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = result_of([recorded([1.0, 2.0], 2)])
    monkeypatch.setattr("gangline.rows.rows.evidence_kinds", lambda: [*evidence.BUILT_IN, KIND])
    (row,) = rows_of(result)
    assert row.evidence
    assert row.evidence["likeliest"].values == [1.0, 2.0]
    assert b'"likeliest"' in encode_json(row)
