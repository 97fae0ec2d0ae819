"""However a stream is cut, it says the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gangline.models.language.text import IncrementalText, StopStrings
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer

# A busy machine is not a failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOKENIZER = TinyTokenizer()
SPECIAL = "<|im_end|>"
NUM_IDS = TOKENIZER.encode("</think>")[0] + 1  # the last added token has the highest id

any_ids = st.lists(st.integers(0, NUM_IDS - 1), max_size=40)
cuts = st.lists(st.integers(0, 200), max_size=12)


def pieces(text: str, at: Sequence[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in at), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


@patient
@given(any_ids)
def test_text_of_any_ids_streamed_is_their_text_decoded_at_once(ids: list[int]) -> None:
    incremental = IncrementalText(TOKENIZER)
    streamed = "".join(incremental.feed(token_id) for token_id in ids) + incremental.flush()
    assert streamed == TOKENIZER.decode([i for i in ids if not TOKENIZER.is_special(i)])


@patient
@given(st.text(max_size=30))
def test_no_piece_of_a_valid_text_holds_half_a_character(text: str) -> None:
    incremental = IncrementalText(TOKENIZER, skip_special=False)
    streamed = [incremental.feed(token_id) for token_id in TOKENIZER.encode(text)]
    assert "".join(streamed) + incremental.flush() == text
    assert all("�" not in piece for piece in streamed) or "�" in text


@patient
@given(any_ids)
def test_special_tokens_can_be_kept(ids: list[int]) -> None:
    incremental = IncrementalText(TOKENIZER, skip_special=False)
    streamed = "".join(incremental.feed(token_id) for token_id in ids) + incremental.flush()
    assert streamed == TOKENIZER.decode(ids)


def stopped(chunks: Sequence[str], stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    cutter, text = StopStrings(stops, include=include), ""
    for chunk in chunks:
        delta, stop = cutter.feed(chunk)
        text += delta
        if stop is not None:
            return text, stop
    return text + cutter.flush(), None


def stopped_by_definition(text: str, stops: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """The first end of any stop string; of those that end there, the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@patient
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", max_size=4), max_size=4),
    at=cuts,
    include=st.booleans(),
)
@example(text="abc", stops=["abc", "b"], at=[], include=False)
def test_stop_strings_cut_any_stream_where_their_definition_says(
    text: str, stops: list[str], at: list[int], include: bool
) -> None:
    expected = stopped_by_definition(text, stops, include=include)
    assert stopped(pieces(text, at), stops, include=include) == expected
