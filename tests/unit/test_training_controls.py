"""Control arms of an experiment: what is taken away, and that the rest stays."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import InvalidRequest
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.mask_settings import FullMask, GroupMasks, Phase
from gangline.train.learning.masks import all_sampled
from gangline.train.learning.samples import make_samples
from gangline.train.run.controls import controlled_mask
from gangline.train.run.experiment import read_experiment
from support.training.samples import session, trace

TURNS = st.lists(st.lists(st.integers(10, 99), min_size=1, max_size=6), min_size=1, max_size=5)


@given(turns=TURNS, seed=st.integers(0, 5))
def test_a_random_mask_has_as_many_tokens_at_other_places(turns: list[list[int]], seed: int) -> None:
    one = trace(turns=turns)
    scattered = controlled_mask("random_mask", seed, all_sampled)
    assert sorted(scattered(one)) == sorted(all_sampled(one))
    assert scattered(one).tolist() == scattered(one).tolist()


def test_a_random_mask_takes_tokens_that_nobody_sampled() -> None:
    one = trace(turns=[range(10, 40)] * 4, between=range(50, 80))
    scattered = controlled_mask("random_mask", 0, all_sampled)(one)
    assert 0.3 < scattered[all_sampled(one) == 0].mean() < 0.8


def test_frozen_trains_on_nothing() -> None:
    masks = GroupMasks(FullMask(), control=partial(controlled_mask, "frozen", 0))
    found = Group("task-1", (session("s0", 1.0), session("s1", 0.0)))
    samples = make_samples(found, algorithm("grpo"), masks.mask(found, Phase(0, 0)))
    assert not any(sample.weights.any() for sample in samples)


@pytest.mark.parametrize(("correction", "refused"), [({}, True), ({"loss.correction.level": "none"}, False)])
def test_a_random_mask_has_nothing_to_correct_by(tmp_path: Path, correction: dict[str, str], refused: bool) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        f"{{name: x, model: smollm2, control: random_mask, data: {{tasks: t}}, algorithm: {{overrides: {correction}}}}}"
    )
    if refused:
        with pytest.raises(InvalidRequest, match=r"loss\.correction\.level"):
            read_experiment(path)
    else:
        assert read_experiment(path).control == "random_mask"
