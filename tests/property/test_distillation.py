"""Distillation against the divergence itself: every token of a small vocabulary, weighed by its chance."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gangline.train.learning.loss import LossInputs, policy_loss
from gangline.train.learning.loss_settings import LossSettings

logits = st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=6)
coefficients = st.sampled_from([0.25, 1.0, 3.0])


def every_token(policy: torch.Tensor, sampler: torch.Tensor, teacher: torch.Tensor) -> LossInputs:
    """policy, sampler, teacher: [V] log-probs. Each token once, weighed by its chance at the sampler."""
    num = len(policy)
    return LossInputs(
        logprobs=policy,
        behaviour_logprobs=sampler,
        advantages=torch.zeros(num, dtype=torch.float64),
        weights=sampler.exp(),
        traces=torch.zeros(num, dtype=torch.int64),
        teacher_logprobs=teacher,
    )


def settings(coefficient: float, **changes: Any) -> LossSettings:
    unclipped = {"clip_low": 1.0, "clip_high": 1e9, "aggregation": "token_mean", "correction": {"level": "none"}}
    return LossSettings.model_validate({**unclipped, "distillation": {"coefficient": coefficient}, **changes})


@given(logits, st.randoms(use_true_random=False), coefficients)
def test_the_expected_gradient_is_that_of_the_reverse_divergence(
    values: list[float], random: Any, coefficient: float
) -> None:
    """Whoever sampled: the ratio corrects for an older policy."""
    parameters = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    older, teacher = (
        torch.tensor([random.uniform(-2, 2) for _ in values], dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    policy = parameters.log_softmax(0)
    divergence = (policy.exp() * (policy - teacher)).sum()
    (wanted,) = torch.autograd.grad(coefficient * divergence, parameters, retain_graph=True)
    for sampler in (policy.detach(), older):
        loss = policy_loss(every_token(policy, sampler, teacher), settings(coefficient)).loss
        (found,) = torch.autograd.grad(loss * len(values), parameters, retain_graph=True)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-9)


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, float]]:
    one = st.fixed_dictionaries(
        {
            "logprob": st.floats(-5, -0.01),
            "behaviour": st.floats(-5, -0.01),
            "teacher": st.floats(-5, -0.01),
            "advantage": st.floats(-2, 2),
            "weight": st.sampled_from([0.0, 1.0, 0.5]),
        }
    )
    return draw(st.lists(one, min_size=1, max_size=8))


@given(rows(), coefficients, st.sampled_from([0.0, 1.0, 0.3]))
def test_the_loss_is_ppos_with_the_teacher_in_the_advantages(
    rows: list[dict[str, float]], coefficient: float, reward_weight: float
) -> None:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], dtype=torch.float64)

    inputs = LossInputs(
        logprobs=column("logprob"),
        behaviour_logprobs=column("behaviour"),
        advantages=column("advantage"),
        weights=column("weight"),
        traces=torch.zeros(len(rows), dtype=torch.int64),
        teacher_logprobs=column("teacher"),
    )
    distilled = {"coefficient": coefficient, "reward_weight": reward_weight}
    chosen = LossSettings.model_validate({"aggregation": "token_mean", "distillation": distilled})
    trained = [row for row in rows if row["weight"]]
    total, distances = 0.0, list[float]()
    for row in trained:
        ratio = math.exp(row["logprob"] - row["behaviour"])
        advantage = reward_weight * row["advantage"] + coefficient * (row["teacher"] - row["logprob"])
        total += row["weight"] * max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
        distances.append(row["logprob"] - row["teacher"])
    found = policy_loss(inputs, chosen)
    assert float(found.loss) == pytest.approx(total / max(len(trained), 1), abs=1e-9)
    if trained:
        assert found.metrics["teacher_kl"] == pytest.approx(sum(distances) / len(distances), abs=1e-9)


@given(rows())
def test_a_policy_that_is_its_teacher_learns_nothing(rows: list[dict[str, float]]) -> None:
    logprobs = torch.tensor([row["logprob"] for row in rows], dtype=torch.float64, requires_grad=True)
    inputs = every_token(logprobs, logprobs.detach(), logprobs.detach())
    policy_loss(inputs, settings(1.0)).loss.backward()
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
