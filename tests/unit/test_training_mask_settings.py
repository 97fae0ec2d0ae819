"""Masks as an experiment names them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from gangline.domain.errors import InvalidRequest
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.mask_settings import GroupMasks, MaskSettings, Phase
from gangline.train.learning.samples import make_samples
from support.training.samples import scored, session, trace

ADAPTER: TypeAdapter[MaskSettings] = TypeAdapter(MaskSettings)
FIRST = Phase(0, 0)
TURNS = ((10, 2), (50, 11, 51, 2), (13, 2))


def weights(settings: dict[str, Any], found: Group, phase: Phase = FIRST, encode: Any = None) -> list[list[float]]:
    """Weights of each sample's sampled tokens."""
    mask = GroupMasks(ADAPTER.validate_python(settings), encode).mask(found, phase)
    samples = make_samples(found, algorithm("grpo"), mask)
    return [[round(float(one), 3) for one in sample.weights] for sample in samples]


def pair(*traces: Any) -> Group:
    return Group("task-1", (session("s0", 1.0, *traces), session("s1", 0.0, *traces)))


def test_full_is_the_default_and_every_sampled_token() -> None:
    assert weights({"kind": "full"}, pair(trace(turns=TURNS[:2]))) == [[1, 1, 0, 0, 1, 1, 1, 1]] * 2


@pytest.mark.parametrize("marks", [{"begin": [50], "end": [51]}, {}], ids=["ids", "texts"])
def test_action_only_takes_ids_or_texts(marks: dict[str, Any]) -> None:
    encode = {"<think>": [50], "</think>": [51]}.__getitem__
    assert weights({"kind": "action_only", **marks}, pair(trace(turns=TURNS[1:2])), encode=encode) == [[0, 0, 0, 1]] * 2


def test_a_mark_that_is_several_tokens_is_refused() -> None:
    settings = ADAPTER.validate_python({"kind": "action_only"})
    with pytest.raises(InvalidRequest, match=r"mask.begin: '<think>' is 3 tokens"):
        GroupMasks(settings, lambda _: [1, 2, 3])
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        GroupMasks(settings)


@pytest.mark.parametrize(
    ("unit", "number", "num_turns"),
    [("epochs", 0, 1), ("epochs", 1, 2), ("epochs", 2, 3), ("epochs", 7, 3), ("steps", 0, 1), ("steps", 2, 3)],
)
def test_progressive_grows_to_all_turns(unit: str, number: int, num_turns: int) -> None:
    phase = Phase(step=number, epoch=0) if unit == "steps" else Phase(step=0, epoch=number)
    settings = {"kind": "progressive", "max_turns": 3, "unit": unit, "until": 3}
    found = weights(settings, pair(trace(turns=((10, 2),) * 3)), phase)
    assert found == [[*[0.0] * 4 * (3 - num_turns), *([1, 1, 0, 0] * num_turns)[:-2]]] * 2


def test_progressive_trains_on_all_turns_in_the_end_however_many() -> None:
    """As published: the last turn, the last three, all."""
    settings = {"kind": "progressive", "max_turns": 5, "until": 3}
    long = pair(trace(turns=((10,),) * 9))
    counts = [sum(weights(settings, long, Phase(0, epoch))[0]) for epoch in range(4)]
    assert counts == [1, 3, 9, 9]


def test_outcome_weighted_follows_the_sessions_reward() -> None:
    found = Group("task-1", (session("s0", 1.0, trace(reward=0.0)), session("s1", 0.5), session("s2", 0.0)))
    assert weights({"kind": "outcome_weighted"}, found) == [[2.0] * 3, [1.05] * 3, [0.1] * 3]


@pytest.mark.parametrize(("unscored", "kept"), [("leave_out", 0.0), ("train", 1.0)])
def test_turn_selective_takes_the_scores_of_spans(unscored: str, kept: float) -> None:
    settings = {"kind": "turn_selective", "threshold": 0.5, "unscored": unscored}
    found = weights(settings, pair(scored(0.4, 0.5, None)))
    assert found == [[0.0] * 3 + [0.0] * 2 + [1.0] * 3 + [0.0] * 2 + [kept] * 3] * 2
