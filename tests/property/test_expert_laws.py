"""Routed experts: the codecs of both engines, and the array of a row from the parts that its calls hold."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gangline.domain.completion import Certificate, Completion, CompletionTree
from gangline.domain.conversation import Message, Text
from gangline.domain.evidence.contract import Tokens
from gangline.domain.evidence.experts import EXPERTS, context_experts, experts_of_file, experts_of_numbers
from gangline.domain.experts import ExpertsMissing, RowExperts
from gangline.domain.tokens import decode_msgpack, encode_json, encode_msgpack
from support.engines.expert_engines import Routing

SHAPES = st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 3))
TYPES = st.sampled_from(["uint8", "uint16", "int32"])


@st.composite
def arrays(draw: st.DrawFn, largest: int = 65_535) -> NDArray[Any]:
    shape, dtype = draw(SHAPES), np.dtype(draw(TYPES))
    most = min(largest, np.iinfo(dtype).max)
    return np.random.default_rng(draw(st.integers(0, 99))).integers(0, most, shape, dtype=dtype, endpoint=True)


def _file(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


@given(arrays())
def test_a_numpy_file_gives_back_its_numbers_in_one_or_two_bytes_each(array: NDArray[Any]) -> None:
    found = experts_of_file(_file(array))
    assert found.dtype in (np.uint8, np.uint16)
    assert np.array_equal(found, array)


@given(arrays())
def test_numbers_without_a_shape_give_back_the_array(array: NDArray[Any]) -> None:
    found = experts_of_numbers(array.tobytes(), array.dtype.name, *array.shape[1:])
    assert np.array_equal(found, array)


@given(arrays(), st.data())
def test_no_damaged_file_is_read_as_another_number_of_tokens(array: NDArray[Any], data: st.DataObject) -> None:
    whole = _file(array)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        found = experts_of_file(cut)
    except ValueError:
        return
    assert np.array_equal(found, array)


@pytest.mark.parametrize("number", [-1, 65_536])
def test_a_number_that_no_expert_has_is_refused(number: int) -> None:
    wrong = np.array([[[0, number]]], np.int32)
    with pytest.raises(ValueError, match=f"it has expert {number}, which no model has"):
        experts_of_file(_file(wrong))
    with pytest.raises(ValueError, match="which no model has"):
        experts_of_numbers(wrong.tobytes(), "int32", 1, 2)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (_file(np.zeros((2, 2), np.uint8)), "its shape is"),
        (_file(np.zeros((1, 1, 1), np.float32)), "of float32, and not"),
        (b"[1, 2]", "not a NumPy file"),
        (b"", "not a NumPy file"),
    ],
)
def test_another_file_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        experts_of_file(data)


def test_a_part_of_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of tokens of 24 bytes"):
        experts_of_numbers(bytes(25), "int32", 3, 2)
    with pytest.raises(ValueError, match="its type is float32"):
        experts_of_numbers(bytes(24), "float32", 3, 2)


@given(arrays())
def test_a_rows_experts_travel_unchanged_as_json_and_messagepack(array: NDArray[Any]) -> None:
    row = RowExperts.of(experts_of_file(_file(array)))
    assert msgspec.json.decode(encode_json(row), type=RowExperts) == row
    assert decode_msgpack(encode_msgpack(row), RowExperts) == row
    assert np.array_equal(row.array(), array)


# -- conversations -------------------------------------------------------------------------------------------------

Step = tuple[int, int, int, bool]
"""(how many ids of the parent's context are dropped from its end, new prompt ids, sampled ids, whether the engine
is asked for the new positions alone)"""
STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(1, 4), st.booleans()), min_size=1, max_size=6
)


def _record(
    tree: CompletionTree, parent: Completion | None, step: Step, routing: Routing, chance: np.random.Generator
) -> Completion:
    """A call that continues from `parent`, with experts as the engine reports and capture keeps them."""
    dropped, num_new, num_sampled, asks_for_new = step
    context = np.empty(0, np.int32) if parent is None else tree.context_ids(parent)
    shared = max(0, len(context) - dropped)
    suffix, sampled = (chance.integers(0, 500, number, dtype=np.int32) for number in (num_new, num_sampled))
    ids = np.concatenate([context[:shared], suffix, sampled])
    before = None if parent is None else parent.certificate
    # Exact ids are only sent where the prompt begins with the parent's context.
    start = EXPERTS.num_known(before) if asks_for_new and dropped == 0 else 0
    kept = EXPERTS.keep(routing.of(ids)[start:], Tokens(sampled, shared, shared + num_new, None, before))
    return Completion(
        completion_id=f"c{len(tree):03d}",
        session_id="s",
        attempt=1,
        status="complete",
        parent_id=None if parent is None else parent.completion_id,
        branch_key="k",
        dialect="openai_chat",
        model="m",
        prompt_shared=shared,
        prompt_suffix_ids=suffix,
        sampled_ids=sampled,
        logprobs=np.zeros(num_sampled, np.float32),
        messages_shared=0,
        new_messages=(),
        response=Message("assistant", (Text("x"),)),
        certificate=Certificate(
            prompt_source="engine",
            context="first" if parent is None else "exact" if dropped == 0 else "diverged",
            logprobs="raw",
            finish_reason="stop",
            routed_experts=kept.evidence,
        ),
        routed_experts=kept.data,
        started_at=0.0,
        finished_at=0.0,
    )


@given(STEPS, st.lists(st.integers(0, 5), min_size=6, max_size=6), st.integers(0, 99))
def test_every_context_of_a_branching_session_has_its_experts_and_each_position_is_held_once(
    steps: list[Step], parents: list[int], seed: int
) -> None:
    routing, chance = Routing(seed=seed), np.random.default_rng(seed)
    tree = CompletionTree()
    for number, step in enumerate(steps):
        parent = None if number == 0 else list(tree)[parents[number] % number]
        tree.add(_record(tree, parent, step, routing, chance))
    for one in tree:
        assert np.array_equal(context_experts(tree, one), routing.of(tree.context_ids(one)))
        alone = EXPERTS.alone(tree, one)
        assert alone is not None
        assert np.array_equal(alone.evidence.array(alone.data), routing.of(tree.context_ids(one)))
        evidence = one.certificate.routed_experts
        assert evidence is not None
        before = None if one.parent_id is None else tree[one.parent_id].certificate
        assert evidence.start == min(EXPERTS.num_known(before), one.prompt_shared)
        assert evidence.end == tree.num_context_ids(one.completion_id) - 1


@given(STEPS.filter(lambda steps: len(steps) > 1), st.data())
def test_a_context_with_a_lost_or_changed_part_is_never_filled_up(steps: list[Step], data: st.DataObject) -> None:
    routing, chance = Routing(), np.random.default_rng(1)
    tree, parent = CompletionTree(), None
    for step in steps:
        parent = _record(tree, parent, (0, *step[1:]), routing, chance)
        tree.add(parent)
    records = list(tree)
    harmed = data.draw(st.integers(0, len(records) - 1))
    evidence = records[harmed].certificate.routed_experts
    assert evidence is not None
    if data.draw(st.booleans()):
        flipped = bytes([records[harmed].routed_experts[0] ^ 1]) + records[harmed].routed_experts[1:]
        records[harmed] = msgspec.structs.replace(records[harmed], routed_experts=flipped)
    else:
        refused = msgspec.structs.replace(
            records[harmed].certificate, routed_experts=msgspec.structs.replace(evidence, refused="lost")
        )
        records[harmed] = msgspec.structs.replace(records[harmed], certificate=refused, routed_experts=b"")
    broken = CompletionTree(records)
    for number, one in enumerate(broken):
        if number >= harmed:
            with pytest.raises(ExpertsMissing, match=records[harmed].completion_id):
                context_experts(broken, one)
        else:
            assert np.array_equal(context_experts(broken, one), routing.of(broken.context_ids(one)))


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 9), st.integers(1, 9))
def test_a_report_of_any_other_number_of_tokens_is_refused(
    num_rows: int, num_before: int, num_prompt: int, num_sampled: int
) -> None:
    """Rows that are neither all nor the new ones belong to nobody knows which positions."""
    first = EXPERTS.keep(
        np.zeros((num_before, 2, 2), np.uint8), Tokens(np.zeros(1, np.int32), 0, num_before, None, None)
    )
    before = Certificate(
        prompt_source="engine", context="first", logprobs="raw", finish_reason="stop", routed_experts=first.evidence
    )
    sampled = np.zeros(num_sampled, np.int32)
    kept = EXPERTS.keep(np.zeros((num_rows, 2, 2), np.uint8), Tokens(sampled, num_prompt, num_prompt, None, before))
    end = num_prompt + num_sampled - 1
    fits = num_rows == end or (num_rows == end - num_before and num_before <= num_prompt)
    assert (kept.evidence.refused is None) == fits
    assert fits or kept.data == b""
