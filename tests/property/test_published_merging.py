"""`splice` gives the rows of Polar's published merging, token by token, wherever that loses nothing."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines.tokenizers import qwen3_folder
from support.merging.comparing import Row, as_row, ours, published, tally
from support.merging.published import LoggedCall, PublishedRow, published_rows
from support.merging.sessions import KINDS, Recorded, record

END = 2
SAME = ("linear", "compaction", "three sub-agents")
"""Kinds of sessions of which the published merging loses nothing, and in which no client edits."""
LOSING = ("retries", "three sub-agents with equal prompts", "random branches")
engines = pytest.mark.parametrize("takes_ids", [False, True], ids=["renders", "takes ids"])
few = settings(max_examples=5, deadline=None)
seeds = st.integers(0, 10**6)


@pytest.fixture(scope="module", autouse=True)
def tokenizer() -> None:
    qwen3_folder()


def recorded(kind: str, seed: int, takes_ids: bool) -> Recorded:
    return asyncio.run(record(kind, seed, takes_ids=takes_ids))


def joins_an_edited_reply(row: PublishedRow, session: Recorded) -> bool:
    return any(before in session.edited for (before, _), _ in pairwise(row.places))


def joins_another_conversation(row: PublishedRow, session: Recorded) -> bool:
    """Whether a call stands behind a reply that it does not continue: another sample of the same prompt."""
    return any(session.continued[number] != before for (before, _), (number, _) in pairwise(row.places))


def is_part(row: Row, of: Row) -> bool:
    """Whether the row's calls follow each other in the other row, with the same ids, mask and log-probs."""
    numbers = [number for number, _ in of.places]
    first = numbers.index(row.places[0][0])
    start = of.places[first][1]
    part = slice(start, start + len(row.response_ids))
    same = (of.response_ids[part], of.loss_mask[part], of.logprobs[part])
    return numbers[first : first + len(row.places)] == [number for number, _ in row.places] and same == (
        row.response_ids,
        row.loss_mask,
        row.logprobs,
    )


def by_first_call(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.places)


@engines
@pytest.mark.parametrize("kind", SAME)
@few
@given(seed=seeds)
def test_all_rows_are_equal_where_nothing_is_lost_or_edited(kind: str, takes_ids: bool, seed: int) -> None:
    session = recorded(kind, seed, takes_ids)
    theirs = published(session)
    assert not any(row.dropped for row in theirs)
    assert by_first_call(ours(session, "splice")) == by_first_call([as_row(row) for row in theirs])


@engines
@pytest.mark.parametrize("kind", KINDS)
@few
@given(seed=seeds)
def test_a_published_row_that_is_whole_and_of_one_unedited_conversation_is_one_of_ours(
    kind: str, takes_ids: bool, seed: int
) -> None:
    """Or, where the published rule has lost the calls before it, the end of one of ours."""
    session = recorded(kind, seed, takes_ids)
    theirs, spliced = published(session), ours(session, "splice")
    has_lost = any(row.dropped for row in theirs)
    for row in theirs:
        if not (row.dropped or joins_an_edited_reply(row, session) or joins_another_conversation(row, session)):
            (holder,) = [one for one in spliced if row.places[0][0] in dict(one.places)]
            begins_alike = holder.places[0][0] == row.places[0][0]
            assert holder == as_row(row) if begins_alike else has_lost and is_part(as_row(row), holder)


@engines
@pytest.mark.parametrize("kind", KINDS)
@few
@given(seed=seeds)
def test_ours_lose_no_sampled_token_and_split_rows_are_what_the_engine_read(
    kind: str, takes_ids: bool, seed: int
) -> None:
    session = recorded(kind, seed, takes_ids)
    split, spliced = (tally(session, ours(session, how)) for how in ("split", "splice"))
    assert (split.lost, split.elsewhere, spliced.lost) == (0, 0, 0)
    assert spliced.rows <= split.rows


@engines
@pytest.mark.parametrize("kind", LOSING)
def test_the_published_rule_loses_what_follows_a_prompt_that_is_sent_twice(kind: str, takes_ids: bool) -> None:
    """So that the tests above can fail, and the sessions hold what they are named for."""
    sessions = [recorded(kind, seed, takes_ids) for seed in range(8)]
    assert sum(tally(one, [as_row(row) for row in published(one)]).lost for one in sessions) > 0


def test_a_client_that_edits_makes_the_published_rule_join_what_the_model_never_read() -> None:
    sessions = [recorded("client edits replies", seed, False) for seed in range(8)]
    assert any(joins_an_edited_reply(row, one) for one in sessions for row in published(one))


def test_a_prompt_that_is_sent_twice_makes_the_published_rule_join_behind_the_other_reply() -> None:
    sessions = [recorded("random branches", seed, False) for seed in range(8)]
    assert any(joins_another_conversation(row, one) for one in sessions for row in published(one))


def call(prompt: list[int], sampled: list[int], *, ended: bool = True) -> LoggedCall:
    return LoggedCall(prompt, sampled, [-1.0] * len(sampled), ended)


def rows_of(*calls: LoggedCall, end_id: int | None = None) -> list[tuple[list[int], list[int], list[int]]]:
    return [(row.response_ids, row.loss_mask, row.dropped) for row in published_rows(calls, end_id)]


Expected = list[tuple[list[int], list[int], list[int]]]
"""(response, mask, dropped calls) of each row"""
RULES: list[tuple[list[LoggedCall], Expected]] = [
    # The paper's u_m: what follows the first end of turn in the rendered tail; the reply is as sampled.
    ([call([1, 4], [10, 11, END]), call([1, 4, 99, END, 7, 1], [12, END])],
     [([10, 11, END, 7, 1, 12, END], [1, 1, 1, 0, 0, 1, 1], [])]),
    # A reply that was cut is closed by the rendered end.
    ([call([1, 4], [10, END]), call([1, 4, 10, END, 7], [11], ended=False),
      call([1, 4, 10, END, 7, 11, END, 8], [12])],
     [([10, END, 7, 11, END, 8, 12], [1, 1, 0, 1, 0, 0, 1], [])]),
    # A prompt that begins with no last prompt begins a chain.
    ([call([1, 4], [10, END]), call([1, 5], [11, END])], [([10, END], [1, 1], []), ([11, END], [1, 1], [])]),
    # The longest last prompt wins.
    ([call([1], [9, END]), call([1, 9, END, 4], [10, END]), call([1], [8, END]),
      call([1, 9, END, 4, 10, END, 5], [11, END])],
     [([9, END, 4, 10, END, 5, 11, END], [1, 1, 0, 1, 1, 0, 1, 1], []), ([8, END], [1, 1], [])]),
    # A prompt that is sent twice has no tail, so the chain ends there.
    ([call([1, 4], [10, END]), call([1, 4], [11, END]), call([1, 4, 11, END, 7], [12, END])],
     [([10, END], [1, 1], [1, 2])]),
    # No reply ended by itself, so that no end of turn is known.
    ([call([1], [10], ended=False), call([1, 10, END, 7], [11], ended=False)], [([10], [1], [1])]),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "expected"), RULES)
def test_the_published_rule_is_what_its_description_says(calls: list[LoggedCall], expected: Expected) -> None:
    assert rows_of(*calls) == expected


def test_a_configured_end_of_turn_is_the_one_that_is_looked_for() -> None:
    calls = [call([1], [10], ended=False), call([1, 10, END, 7], [11], ended=False)]
    assert rows_of(*calls, end_id=END) == [([10, END, 7, 11], [1, 0, 0, 1], [])]
