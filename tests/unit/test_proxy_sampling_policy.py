"""The operator's word over the harness's sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.conversation import SamplingParams
from gangline.domain.task import SamplingPolicy
from gangline.node.calls.sampling_policy import apply_policies


@pytest.mark.parametrize(
    ("policy", "wished", "used"),
    [
        ({}, {"temperature": 0.3, "seed": 1}, {"temperature": 0.3, "seed": 1}),
        ({"temperature": {"override": 1}}, {"temperature": 0.0}, {"temperature": 1.0}),
        ({"temperature": {"override": 1}}, {}, {"temperature": 1.0}),
        ({"temperature": {"min": 0.7}}, {"temperature": 0.2}, {"temperature": 0.7}),
        ({"temperature": {"max": 0.7}}, {}, {"temperature": 0.7}),
        ({"temperature": {"min": 0.5, "max": 2}}, {"temperature": 0.9}, {"temperature": 0.9}),
        ({"max_tokens": {"max": 100}}, {"max_tokens": 4000}, {"max_tokens": 100}),
        ({"max_tokens": {"max": 100}}, {}, {"max_tokens": 100}),
        ({"max_tokens": {"min": 10}}, {}, {}),
        ({"max_tokens": {"default": 64, "max": 100}}, {}, {"max_tokens": 64}),
        ({"top_p": {"default": 0.9}}, {}, {"top_p": 0.9}),
        ({"top_p": {"default": 0.9}}, {"top_p": 0.5}, {"top_p": 0.5}),
        ({"seed": {"max": 5}}, {}, {}),
        ({"frequency_penalty": {"max": -0.5}}, {}, {"frequency_penalty": -0.5}),
    ],
)
def test_parameters_are_overridden_clamped_or_passed(
    policy: dict[str, Any], wished: dict[str, Any], used: dict[str, Any]
) -> None:
    applied = apply_policies([SamplingPolicy.model_validate(policy)], SamplingParams(stop=("x",), **wished))
    assert applied == SamplingParams(stop=("x",), **used)
    assert isinstance(applied.max_tokens, int | None)


def test_the_last_policy_has_the_last_word() -> None:
    first, last = ({"temperature": {"override": value}} for value in (0.5, 1.0))
    policies = [SamplingPolicy.model_validate(policy) for policy in (first, last)]
    assert apply_policies(policies, SamplingParams()).temperature == 1.0


@pytest.mark.parametrize("rule", [{"min": 2, "max": 1}, {"override": 1, "max": 2}, {"overide": 1}])
def test_rules_that_make_no_sense_are_refused(rule: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        SamplingPolicy.model_validate({"temperature": rule})
