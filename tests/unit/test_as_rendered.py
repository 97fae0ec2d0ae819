"""Stitched prompts against a template's rendering: a generation prompt is cut off where there is one, and no more."""

from __future__ import annotations

import pytest

from gangline.domain.tokens import token_ids
from gangline.models.engines.templates.as_rendered import difference

OPENING = token_ids([8, 9])
"""`<|assistant|>`, `<think>`"""
REPLY, RESULT = [30, 31], [40, 41]


@pytest.mark.parametrize("opening", [[8, 9], [9], []], ids=["whole", "in part", "none"])
def test_turns_of_the_model_may_be_written_otherwise(opening: list[int]) -> None:
    whole = token_ids([1, 2, *REPLY[1:], *RESULT, 30, 5, 8, 9])
    added = [token_ids([*RESULT, *opening]), token_ids([5, 8, 9])]
    assert difference(whole, token_ids([1, 2, *OPENING]), added, OPENING) is None


@pytest.mark.parametrize("end", [[3], [3, 4]])
def test_an_end_that_is_no_generation_prompt_is_compared(end: list[int]) -> None:
    front = token_ids([1, 2, *end])
    whole = token_ids([1, 2, 30, *RESULT, 8, 9])
    assert difference(whole, front, [token_ids([*RESULT, 8, 9])], OPENING) is not None


def test_messages_after_an_earlier_turn_are_compared() -> None:
    whole = token_ids([1, 2, 30, 40, 30, 5, 8, 9])
    added = [token_ids([*RESULT, 8, 9]), token_ids([5, 8, 9])]
    told = difference(whole, token_ids([1, 2, 8, 9]), added, OPENING)
    assert told is not None
    assert "turn 1 of 2" in told
