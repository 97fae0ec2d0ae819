"""Clean rows never alarm, whatever their form; a planted fault is always found."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.tasks.check_rows.check import check_records
from gangline.tasks.check_rows.rules import Vocabulary
from support.dumps import CLEAN, EOS, PLANTS, conversation

SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize("form", CLEAN)
def test_a_thousand_clean_rows_raise_no_alarm(form: str) -> None:
    chance = random.Random(7)
    report = check_records(
        (CLEAN[form](conversation(chance)) for _ in range(1000)), vocabulary=Vocabulary(size=1000, stop_ids={EOS})
    )
    assert report.ok, report.findings[:3]
    assert report.num_records == 1000


@given(SEEDS, st.sampled_from(sorted(CLEAN)), st.floats(0.0, 0.3))
def test_clean_rows_never_alarm(seed: int, form: str, zeros: float) -> None:
    chance = random.Random(seed)
    report = check_records(CLEAN[form](conversation(chance, zeros=zeros)) for _ in range(3))
    assert not report.counts.keys() - {"header_trained"}, report.findings  # by chance, in one file of a thousand


@given(SEEDS, st.sampled_from([(fault, form) for fault, (_, forms) in sorted(PLANTS.items()) for form in forms]))
def test_planted_fault_is_always_found(seed: int, pair: tuple[str, str]) -> None:
    fault, form = pair
    plant, forms = PLANTS[fault]
    chance = random.Random(seed)
    talks = [conversation(chance, num_turns=chance.randint(2, 4), zeros=0.0) for _ in range(2)]
    for talk in talks:
        context, sampled, values = talk.turns[-1]
        more = [chance.randint(10, 900) for _ in range(60)]
        talk.turns[-1] = (context, more + sampled, [-chance.random() - 0.01 for _ in more] + values)
    records = [CLEAN[form](talk) for talk in talks]
    plant(form, records)
    assert forms[form] & set(check_records(records).counts)
