"""The one loss: by hand, by finite differences, and what must not matter to it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gangline.train.learning.algorithms import OVERRIDES, algorithm
from gangline.train.learning.loss import LossInputs, LossTotals, policy_loss
from gangline.train.learning.loss_settings import LossSettings
from gangline.train.learning.losses.divergences import kl_estimate


def inputs(seed: int = 0, lengths: tuple[int, ...] = (5, 3, 7, 1), spread: float = 0.3) -> LossInputs:
    """Random, float64; two traces are of one session."""
    random = torch.Generator().manual_seed(seed)
    num = sum(lengths)

    def noise(scale: float) -> Tensor:
        return torch.randn(num, generator=random, dtype=torch.float64) * scale

    behaviour = -noise(1.0).abs()
    old = behaviour + noise(0.1)
    return LossInputs(
        logprobs=(old + noise(spread)).requires_grad_(),
        behaviour_logprobs=behaviour,
        advantages=noise(1.0),
        weights=torch.ones(num, dtype=torch.float64),
        traces=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        sessions=torch.tensor([0, *range(len(lengths) - 1)]),
        old_logprobs=old,
        reference_logprobs=behaviour + noise(0.2),
        teacher_logprobs=behaviour + noise(0.3),
    )


EVERY = {name: algorithm(name).loss for name in OVERRIDES} | {
    "kl_k1": LossSettings.model_validate({"kl": {"coefficient": 0.1, "estimator": "k1"}}),
    "kl_k2": LossSettings.model_validate({"kl": {"coefficient": 0.1, "estimator": "k2"}}),
    "kl_k3": LossSettings.model_validate({"kl": {"coefficient": 0.1}}),
    "corrected_token": LossSettings.model_validate({"correction": {"level": "token", "cap": 1.05}}),
    "corrected_sequence": LossSettings.model_validate({"correction": {"level": "sequence"}}),
    "session_mean": LossSettings(aggregation="session_mean"),
}


def test_one_token_by_hand() -> None:
    one = LossInputs(
        logprobs=torch.tensor([math.log(0.5)], dtype=torch.float64),
        behaviour_logprobs=torch.tensor([math.log(0.4)], dtype=torch.float64),
        advantages=torch.tensor([2.0], dtype=torch.float64),
        weights=torch.ones(1, dtype=torch.float64),
        traces=torch.zeros(1, dtype=torch.int64),
    )
    found = policy_loss(one, LossSettings(clip_high=0.3))
    assert float(found.loss) == pytest.approx(-2.0 * 1.25)
    assert float(policy_loss(one, LossSettings()).loss) == pytest.approx(-2.0 * 1.2)
    assert policy_loss(one, LossSettings()).metrics["clipped_high"] == 1.0
    falling = replace(one, advantages=-one.advantages)
    assert float(policy_loss(falling, LossSettings()).loss) == pytest.approx(2.5)
    assert float(policy_loss(falling, LossSettings(dual_clip=1.1)).loss) == pytest.approx(2.2)
    weighted = policy_loss(one, algorithm("cispo", {"loss.clip_high": 0.2}).loss)
    assert float(weighted.loss) == pytest.approx(-1.2 * 2.0 * math.log(0.5))


def test_raft_is_fine_tuning_on_accepted_sessions() -> None:
    """Of four sessions two are accepted: the gradient of their mean log-prob, each of one weight."""
    one = inputs(lengths=(5, 3, 7, 1))
    accepted = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)[one.traces]
    fresh = one.logprobs.detach()
    on_policy = replace(one, sessions=None, advantages=accepted, old_logprobs=fresh, behaviour_logprobs=fresh)
    policy_loss(on_policy, algorithm("raft").loss).loss.backward()
    lengths = torch.tensor([5.0, 3.0, 7.0, 1.0], dtype=torch.float64)[one.traces]
    assert one.logprobs.grad is not None
    torch.testing.assert_close(one.logprobs.grad, -accepted / lengths / 4)


@pytest.mark.parametrize(
    ("estimator", "kl"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5)],
)
def test_the_kl_penalty_by_hand(estimator: str, kl: float) -> None:
    """A token twice as probable as under the reference, without an advantage: its loss is the penalty alone."""
    one = LossInputs(
        logprobs=torch.tensor([math.log(0.5)], dtype=torch.float64),
        behaviour_logprobs=torch.tensor([math.log(0.5)], dtype=torch.float64),
        advantages=torch.zeros(1, dtype=torch.float64),
        weights=torch.ones(1, dtype=torch.float64),
        traces=torch.zeros(1, dtype=torch.int64),
        reference_logprobs=torch.tensor([math.log(0.25)], dtype=torch.float64),
    )
    settings = LossSettings.model_validate({"kl": {"coefficient": 0.1, "estimator": estimator}})
    found = policy_loss(one, settings)
    assert float(found.loss) == pytest.approx(0.1 * kl)
    assert found.metrics["reference_kl"] == pytest.approx(kl)


STOPPED = ("cispo", "gspo", "dppo_tv", "dppo_kl", "clip_cov", "distill")
"""Parts of these have no gradient by definition, or a choice at random; theirs are checked below or against verl's."""
UNCORRECTED = {"loss.correction.level": "none"}
DIFFERENTIABLE = {name: settings for name, settings in EVERY.items() if name not in STOPPED}


@pytest.mark.parametrize("settings", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE.keys())
def test_gradients_are_those_of_finite_differences(settings: LossSettings) -> None:
    given = inputs(spread=0.15)

    def loss(logprobs: Tensor) -> Tensor:
        return policy_loss(replace(given, logprobs=logprobs), settings).loss

    assert torch.autograd.gradcheck(loss, (given.logprobs,))


def test_the_gradient_of_clipped_weights_is_the_weight() -> None:
    given = inputs()
    settings = algorithm("cispo", {"loss.clip_high": 0.1, **UNCORRECTED}).loss
    (gradient,) = torch.autograd.grad(policy_loss(given, settings).loss, given.logprobs)
    assert given.old_logprobs is not None
    weight = (given.logprobs - given.old_logprobs).exp().clamp(max=1.1).detach()
    assert torch.allclose(gradient, -weight * given.advantages / 16)
    assert bool((gradient != 0).all())


def test_the_gradient_of_a_sequence_ratio_is_that_of_the_published_ratio() -> None:
    given = inputs()
    per_trace = torch.tensor([0.5, -1.0, 2.0, -0.3], dtype=torch.float64)[given.traces]
    given = replace(given, advantages=per_trace)
    unclipped = {"loss.clip_low": 1.0, "loss.clip_high": 100.0, **UNCORRECTED}
    settings = algorithm("gspo", {"loss.aggregation": "sequence_mean", **unclipped}).loss
    (found,) = torch.autograd.grad(policy_loss(given, settings).loss, given.logprobs)
    assert given.old_logprobs is not None
    parts = list[Tensor]()
    for number in range(4):
        mine = given.traces == number
        ratio = (given.logprobs[mine] - given.old_logprobs[mine]).mean().exp()
        parts.append(-ratio * per_trace[mine][0])
    (published,) = torch.autograd.grad(torch.stack(parts).mean(), given.logprobs)
    assert torch.allclose(found, published)


@pytest.mark.parametrize("settings", EVERY.values(), ids=EVERY.keys())
def test_what_is_masked_does_not_matter(settings: LossSettings) -> None:
    given = inputs()
    weights = given.weights.clone()
    weights[[1, 6, 9]] = 0.0
    clean = replace(given, weights=weights)
    dirty = {}
    for name in (
        "logprobs",
        "behaviour_logprobs",
        "advantages",
        "old_logprobs",
        "reference_logprobs",
        "teacher_logprobs",
    ):
        values = getattr(given, name).detach().clone()
        values[weights == 0] = math.nan
        dirty[name] = values
    spoiled = replace(clean, **dirty)
    spoiled.logprobs.requires_grad_()
    found, expected = policy_loss(spoiled, settings), policy_loss(clean, settings)
    assert torch.equal(found.loss, expected.loss)
    assert found.metrics == expected.metrics
    (gradient,) = torch.autograd.grad(found.loss, spoiled.logprobs)
    assert torch.equal(gradient, torch.autograd.grad(expected.loss, clean.logprobs)[0])
    assert bool((gradient[weights == 0] == 0).all())


# The covariances of those two are within a micro-batch.
SEPARABLE = {name: settings for name, settings in EVERY.items() if name not in ("clip_cov", "kl_cov")}


@pytest.mark.parametrize("settings", SEPARABLE.values(), ids=SEPARABLE.keys())
def test_micro_batches_add_up_to_the_batch(settings: LossSettings) -> None:
    given = inputs()
    whole = policy_loss(given, settings).loss
    totals = LossTotals(num_tokens=16, num_traces=4, num_sessions=3)
    parts = list[Tensor]()
    for first in (given.traces < 2, given.traces >= 2):
        shifted = replace(given, weights=given.weights * first)
        parts.append(policy_loss(shifted, settings, totals).loss)
    assert torch.allclose(torch.stack(parts).sum(), whole)


def test_averages_weigh_tokens_traces_or_sessions() -> None:
    ones = replace(inputs(), logprobs=inputs().old_logprobs, weights=torch.ones(16, dtype=torch.float64))  # type: ignore[arg-type]
    advantages = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)[ones.traces]
    given = replace(ones, advantages=advantages)

    def loss(**settings: object) -> float:
        uncorrected = {**settings, "correction": {"level": "none"}}
        return -float(policy_loss(given, LossSettings.model_validate(uncorrected)).loss)

    assert loss(aggregation="token_mean") == pytest.approx((5 + 6 + 28 + 8) / 16)
    assert loss(aggregation="sequence_mean") == pytest.approx(15 / 4)
    assert loss(aggregation="session_mean") == pytest.approx(((5 + 6) / 8 + 4 + 8) / 3)
    assert loss(aggregation="fixed_length", fixed_length=10) == pytest.approx(47 / 40)


def test_weights_multiply_and_do_not_average_out() -> None:
    given = inputs()
    for aggregation in ("token_mean", "sequence_mean", "session_mean", "fixed_length"):
        settings = LossSettings.model_validate({"aggregation": aggregation})
        once = policy_loss(given, settings).loss
        assert torch.allclose(policy_loss(replace(given, weights=2 * given.weights), settings).loss, 2 * once)


def test_nothing_to_train_on_is_a_loss_of_zero() -> None:
    given = inputs()
    found = policy_loss(replace(given, weights=0 * given.weights), LossSettings())
    assert float(found.loss.detach()) == 0.0
    assert found.metrics == {}
    (gradient,) = torch.autograd.grad(found.loss, given.logprobs)
    assert not gradient.any()


def test_a_ratio_beyond_all_bounds_stays_finite() -> None:
    given = inputs()
    far = replace(given, logprobs=(given.logprobs + 900).detach(), advantages=-given.advantages.abs())
    assert math.isfinite(float(policy_loss(far, LossSettings()).loss))


def test_the_effective_sample_falls_with_the_spread_of_ratios() -> None:
    near = policy_loss(inputs(spread=0.01), LossSettings()).metrics["effective_sample_share"]
    far = policy_loss(inputs(spread=2.0), LossSettings()).metrics["effective_sample_share"]
    assert far < near <= 1.0


def six_tokens() -> LossInputs:
    """Ratios 0.5 to 1.5 of the policy in training over the old one, and 0.25 to 4 of that over the one that sampled."""
    ratio = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5, 1.5], dtype=torch.float64)
    weight = torch.tensor([1.0, 0.5, 4.0, 1.0, 1.0, 0.25], dtype=torch.float64)
    old = torch.full((6,), -2.0, dtype=torch.float64)
    return LossInputs(
        logprobs=old + ratio.log(),
        behaviour_logprobs=old - weight.log(),
        advantages=torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
        weights=torch.ones(6, dtype=torch.float64),
        traces=torch.tensor([0, 0, 1, 1, 2, 2]),
        old_logprobs=old,
        reference_logprobs=old,
        entropies=torch.arange(6, dtype=torch.float64),
    )


def settings_of(**fields: object) -> LossSettings:
    return LossSettings.model_validate({"clip_low": 0.2, "clip_high": 0.2} | fields)


def test_the_metrics_by_hand() -> None:
    given = six_tokens()
    found = policy_loss(given, settings_of(correction={"mode": "mask", "cap": 2.0})).metrics
    assert found == pytest.approx(
        {
            "ratio_mean": 6.5 / 6,
            "ratio_max": 1.5,
            "clipped_low": 1 / 6,
            "clipped_high": 1 / 6,
            "correction_mean": (1 + 0.5 + 0 + 1 + 1 + 0.25) / 6,
            "correction_zero": 1 / 6,
            "effective_sample_share": 4.125**2 / (4.953125 * 6),
            "old_kl": sum(1 / r + math.log(r) - 1 for r in (0.5, 0.5, 1.0, 1.5, 1.5, 1.5)) / 6,
            "behaviour_kl": sum(x - math.log(x) - 1 for x in (0.5, 0.25, 4.0, 1.5, 1.5, 0.375)) / 6,
            "reference_kl": sum(1 / r + math.log(r) - 1 for r in (0.5, 0.5, 1.0, 1.5, 1.5, 1.5)) / 6,
            "entropy": 2.5,
        }
    )
    both = policy_loss(given, settings_of(clipping="weights")).metrics
    assert (both["clipped_low"], both["clipped_high"]) == pytest.approx((2 / 6, 3 / 6))
    assert both["correction_mean"] == pytest.approx((1 + 0.5 + 2 + 1 + 1 + 0.25) / 6)


@pytest.mark.parametrize(
    ("by", "rejected"), [("token_k2", [2, 5]), ("sequence_max_k2", [2, 3, 4, 5]), ("sequence_sum_k1", [2, 3, 4, 5])]
)
def test_rejected_tokens_lose_nothing_and_count_in_the_mean(by: str, rejected: list[int]) -> None:
    given = six_tokens()
    settings = {"aggregation": "token_mean"}
    found = policy_loss(given, settings_of(rejection={"by": by, "most": 0.9}, **settings))
    weights = given.weights.clone()
    weights[rejected] = 0.0
    totals = LossTotals(num_tokens=6, num_traces=3, num_sessions=3)
    kept = policy_loss(replace(given, weights=weights), settings_of(**settings), totals)
    assert float(found.loss) == pytest.approx(float(kept.loss))
    assert found.metrics["correction_zero"] == pytest.approx(len(rejected) / 6)


def test_an_entropy_bonus_needs_entropies() -> None:
    with pytest.raises(ValueError, match="entropies"):
        policy_loss(inputs(), settings_of(entropy=0.01))


def test_a_penalty_needs_its_reference() -> None:
    with pytest.raises(ValueError, match="reference_logprobs"):
        policy_loss(replace(inputs(), reference_logprobs=None), EVERY["kl_k3"])
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
