"""The one loss against TRL's and verl's own functions: values and gradients, on random arrays, in float64."""

from __future__ import annotations

import importlib
import math
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import given as drawn
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from gangline.train.collecting.groups import Group
from gangline.train.learning.advantages import AdvantageSettings, batch_advantages, group_advantages
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.credit.critic.settings import CriticSettings
from gangline.train.learning.credit.critic.targets import estimate_traces
from gangline.train.learning.loss import LossInputs, policy_loss
from gangline.train.learning.loss_settings import CorrectionSettings, RejectionSettings
from gangline.train.learning.losses.corrections import correction_weights, kept_tokens
from gangline.train.learning.losses.divergences import kl_estimate
from gangline.train.learning.losses.reward_kl import RewardKLSettings, adapted
from gangline.train.learning.losses.values import value_loss
from gangline.train.learning.samples import make_samples, over_batch
from support.training.samples import session, trace

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
NUM_ROWS, WIDTH = 6, 11


@dataclass
class Table:
    """[B, T] as other trainers hold them; the mask has holes, as of tool output."""

    logprobs: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor

    def flat(self) -> LossInputs:
        return LossInputs(
            logprobs=self.logprobs.reshape(-1),
            behaviour_logprobs=self.behaviour.reshape(-1),
            advantages=self.advantages.expand(-1, WIDTH).reshape(-1),
            weights=self.mask.reshape(-1),
            traces=torch.arange(NUM_ROWS).repeat_interleave(WIDTH),
            old_logprobs=self.old.reshape(-1),
            reference_logprobs=self.reference.reshape(-1),
        )


def table(seed: int, spread: float) -> Table:
    random = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    old = -noise(NUM_ROWS, WIDTH).abs()
    mask = (torch.rand(NUM_ROWS, WIDTH, generator=random) < 0.7).double()
    mask[:, 0] = 1
    return Table(
        logprobs=(old + spread * noise(NUM_ROWS, WIDTH)).requires_grad_(),
        old=old,
        behaviour=old + 0.4 * noise(NUM_ROWS, WIDTH),
        reference=old + 0.3 * noise(NUM_ROWS, WIDTH),
        advantages=noise(NUM_ROWS, 1),
        mask=mask,
    )


UNCORRECTED = {"loss.correction.level": "none"}
"""TRL and verl are given no log-probs of the engine, unless a case says so."""


def both(given: Table, other: Tensor, name: str, overrides: dict[str, Any]) -> None:
    """Ours and the other's: equal, and equal in every gradient."""
    ours = policy_loss(given.flat(), algorithm(name, {**UNCORRECTED, **overrides}).loss).loss
    assert torch.allclose(ours, other, **CLOSE)
    expected = torch.autograd.grad(other, given.logprobs)[0]
    assert expected.any()
    assert torch.allclose(torch.autograd.grad(ours, given.logprobs)[0], expected, **CLOSE)


def trl_loss(given: Table, **settings: Any) -> Tensor:
    """`GRPOTrainer._compute_loss`, with log-probs instead of a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        trainer = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    chosen = {"loss_type": "grpo", "level": "token", "low": 0.2, "high": 0.2, "beta": 0.0, "delta": None} | settings
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (given.logprobs, torch.zeros_like(given.old), None),
        args=SimpleNamespace(delta=chosen["delta"], use_bias_correction_kl=False),
        loss_type=chosen["loss_type"],
        importance_sampling_level=chosen["level"],
        epsilon_low=chosen["low"],
        epsilon_high=chosen["high"],
        beta=chosen["beta"],
        max_completion_length=chosen.get("length"),
        use_vllm="correction" in chosen,
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda one: one, reduce=lambda one, **_: one),
    )
    batch = {
        "prompt_ids": torch.zeros(NUM_ROWS, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(NUM_ROWS, 1),
        "completion_ids": torch.zeros(NUM_ROWS, WIDTH, dtype=torch.int64),
        "completion_mask": given.mask,
        "advantages": given.advantages[:, 0],
        "old_per_token_logps": given.old,
        "ref_per_token_logps": given.reference,
        "importance_sampling_ratio": chosen.get("correction"),
        "num_items_in_batch": given.mask.sum(),
    }
    return trainer._compute_loss(fake, fake.model, batch)


TRL_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", {}, {}),
    ("grpo", {"loss.kl.coefficient": 0.04}, {"beta": 0.04}),
    ("dr_grpo", {"loss.fixed_length": 32}, {"loss_type": "dr_grpo", "length": 32}),
    ("dapo", {}, {"loss_type": "dapo", "high": 0.28}),
    ("dapo", {"loss.kl.coefficient": 0.1}, {"loss_type": "dapo", "high": 0.28, "beta": 0.1}),
    ("rloo", {"loss.aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    ("gspo", {}, {"level": "sequence", "low": 3e-4, "high": 4e-4}),
    ("gspo", {"loss.clip_low": 0.2, "loss.clip_high": 0.2}, {"level": "sequence"}),
    ("cispo", {}, {"loss_type": "cispo", "high": 5.0}),
    ("cispo", {"loss.clip_high": 0.1}, {"loss_type": "cispo", "high": 1.1}),
    ("grpo_pp", {}, {}),
    ("ppo_clip", {"loss.dual_clip": 1.3}, {"loss_type": "bnpo", "delta": 1.3}),
]


@pytest.mark.parametrize("spread", [0.02, 0.5])
@pytest.mark.parametrize(("name", "overrides", "theirs"), TRL_CASES, ids=str)
def test_as_trl(name: str, overrides: dict[str, Any], theirs: dict[str, Any], spread: float) -> None:
    for seed in range(5):
        given = table(seed, spread)
        if overrides.get("loss.clip_high") is None and name == "gspo" and spread > 0.1:
            given.advantages = -given.advantages.abs()  # else every sequence of these is clipped, and has no gradient
        both(given, trl_loss(given, **theirs), name, overrides)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_correction_is_as_trls(level: str) -> None:
    given = table(7, 0.3)
    difference = (given.old - given.behaviour) * given.mask
    weights = (difference if level == "token" else difference.sum(-1, keepdim=True)).exp().clamp(max=1.5)
    overrides = {"loss.correction.level": level, "loss.correction.cap": 1.5}
    both(given, trl_loss(given, correction=weights), "grpo", overrides)


@pytest.fixture(scope="module")
def verl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("verl.trainer.ppo.core_algos")


def verl_loss(core: Any, given: Table, kind: str, mode: str, weights: Tensor | None = None, **clip: Any) -> Tensor:
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **clip)
    advantages = given.advantages.expand(-1, WIDTH)
    compute = core.get_policy_loss_fn(kind)
    loss, _ = compute(given.old, given.logprobs, advantages, given.mask, mode, config, weights)
    return loss


VERL_CASES: list[tuple[str, dict[str, Any], str, str, dict[str, Any]]] = [
    ("grpo", {"loss.dual_clip": 3.0}, "vanilla", "seq-mean-token-mean", {}),
    ("ppo_clip", {}, "vanilla", "token-mean", {}),
    ("ppo_clip", {"loss.dual_clip": 1.2}, "vanilla", "token-mean", {"clip_ratio_c": 1.2}),
    ("dapo", {"loss.dual_clip": 3.0}, "vanilla", "token-mean", {"clip_ratio_high": 0.28}),
    ("dr_grpo", {"loss.dual_clip": 3.0, "loss.fixed_length": WIDTH}, "vanilla", "seq-mean-token-sum-norm", {}),
    ("rloo", {"loss.dual_clip": 3.0}, "vanilla", "seq-mean-token-mean", {}),
    ("gspo", {}, "gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    ("gspo", {"loss.clip_high": 0.3}, "gspo", "seq-mean-token-mean", {"clip_ratio_low": 3e-4, "clip_ratio_high": 0.3}),
    ("cispo", {}, "cispo", "token-mean", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    (
        "cispo",
        {"loss.clip_low": 0.1, "loss.clip_high": 0.2},
        "cispo",
        "token-mean",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2},
    ),
]


@pytest.mark.parametrize("spread", [0.02, 0.5])
@pytest.mark.parametrize(("name", "overrides", "kind", "mode", "clip"), VERL_CASES, ids=str)
def test_as_verl(
    verl: Any, name: str, overrides: dict[str, Any], kind: str, mode: str, clip: dict[str, Any], spread: float
) -> None:
    for seed in range(5):
        given = table(seed, spread)
        if name == "gspo" and spread > 0.1:
            given.advantages = -given.advantages.abs()
        # verl adds 1e-8 to a sequence's number of tokens.
        ours = policy_loss(given.flat(), algorithm(name, {**UNCORRECTED, **overrides}).loss).loss
        theirs = verl_loss(verl, given, kind, mode, **clip)
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
        gradients = [torch.autograd.grad(one, given.logprobs)[0] for one in (ours, theirs)]
        assert torch.allclose(*gradients, rtol=1e-6, atol=1e-6)
        assert gradients[1].any()


@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_distillation_is_as_verls_policy_gradient_with_k1(verl: Any, spread: float) -> None:
    """`distillation_loss.loss_mode: k1`, `use_policy_gradient: true`, `use_task_rewards: false`."""
    given = table(3, spread)
    teacher = given.reference
    distances = verl.kl_penalty(logprob=given.logprobs, ref_logprob=teacher, kl_penalty="k1")
    theirs = verl_loss(verl, replace(given, advantages=-distances.detach()), "vanilla", "token-mean")
    inputs = replace(given.flat(), teacher_logprobs=teacher.reshape(-1))
    ours = policy_loss(inputs, algorithm("distill", {"loss.dual_clip": 3.0, **UNCORRECTED}).loss).loss
    assert torch.allclose(ours, theirs, **CLOSE)
    gradients = [torch.autograd.grad(one, given.logprobs)[0] for one in (ours, theirs)]
    assert torch.allclose(*gradients, **CLOSE)
    assert gradients[1].any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_correction_is_as_verls(verl: Any, level: str) -> None:
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    given = table(7, 0.3)
    weights, _ = helper.compute_rollout_correction_weights(given.old - given.behaviour, given.mask, level, 1.5)
    overrides = {"loss.correction.level": level, "loss.correction.cap": 1.5}
    both(given, verl_loss(verl, given, "vanilla", "token-mean", weights), "ppo_clip", overrides)


MORE_OF_VERL: list[tuple[str, dict[str, Any], str, str, dict[str, Any]]] = [
    ("gpg", {}, "gpg", "token-mean", {}),
    ("gmpo", {}, "geo_mean", "token-mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    ("gmpo", {"loss.clip_high": 0.1}, "geo_mean", "token-mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.1}),
    ("sapo", {"loss.soft.down": 1.3}, "sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.3}),
    ("dppo_tv", {}, "dppo_tv", "token-mean", {"clip_ratio": 0.2, "clip_ratio_c": 20.0}),
    ("dppo_tv", {"loss.divergence_cap": 1.1}, "dppo_tv", "token-mean", {"clip_ratio": 0.2, "clip_ratio_c": 1.1}),
    ("dppo_kl", {}, "dppo_kl", "token-mean", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0}),
    (
        "clip_cov",
        {"loss.covariance": {"share": 0.3, "least": 0.0, "most": 5.0}},
        "clip_cov",
        "token-mean",
        {"policy_loss": {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 5.0}},
    ),
    (
        "kl_cov",
        {"loss.covariance": {"share": 0.3, "penalty": 0.7}},
        "kl_cov",
        "token-mean",
        {"policy_loss": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7}},
    ),
    ("dro", {"loss.quadratic": 0.4}, "dro", "token-mean", {"policy_loss": {"dro_beta": 0.4}}),
]


@pytest.mark.parametrize("spread", [0.02, 0.5])
@pytest.mark.parametrize(("name", "overrides", "kind", "mode", "config"), MORE_OF_VERL, ids=str)
def test_every_surrogate_is_as_verls(
    verl: Any, name: str, overrides: dict[str, Any], kind: str, mode: str, config: dict[str, Any], spread: float
) -> None:
    from verl.workers.config import PolicyLossConfig

    chosen = config | ({"policy_loss": PolicyLossConfig(**config["policy_loss"])} if "policy_loss" in config else {})
    for seed in range(5):
        given = table(seed, spread)
        torch.manual_seed(seed)  # Clip-Cov chooses tokens at random
        ours = policy_loss(given.flat(), algorithm(name, {**UNCORRECTED, **overrides}).loss).loss
        torch.manual_seed(seed)
        theirs = verl_loss(verl, given, kind, mode, **chosen)
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
        gradients = [torch.autograd.grad(one, given.logprobs)[0] for one in (ours, theirs)]
        assert torch.allclose(*gradients, rtol=1e-6, atol=1e-6)
        assert gradients[1].any()


@drawn(st.integers(0, 10**6), st.sampled_from([0.1, 0.4, 1.5]))
def test_the_entropy_bonus_is_as_verls(verl: Any, seed: int, coefficient: float) -> None:
    given = table(seed, 0.2)
    entropies = table(seed + 1, 0.2).logprobs.detach().abs()
    settings = algorithm("ppo_clip", {**UNCORRECTED, "loss.entropy": coefficient}).loss
    ours = policy_loss(replace(given.flat(), entropies=entropies.reshape(-1)), settings)
    bonus = verl.agg_loss(entropies, given.mask, "token-mean")
    theirs = verl_loss(verl, given, "vanilla", "token-mean") - coefficient * bonus
    assert torch.allclose(ours.loss, theirs, **CLOSE)
    assert ours.metrics["entropy"] == pytest.approx(float(bonus))


@pytest.fixture(scope="module")
def corrections() -> Any:
    return importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


levels, bounds = st.sampled_from(["token", "sequence"]), st.tuples(st.floats(0.3, 0.9), st.floats(1.1, 3.0))


@drawn(st.integers(0, 10**6), levels, bounds)
def test_masked_importance_sampling_is_as_verls_icepop_and_as_trls(
    corrections: Any, seed: int, level: Any, bounds: tuple[float, float]
) -> None:
    given, (low, high) = table(seed, 0.3), bounds
    difference = (given.old - given.behaviour) * given.mask
    settings = CorrectionSettings(level=level, mode="mask", floor=low, cap=high)
    flat = given.flat()
    kept = flat.weights != 0
    ours = correction_weights(difference.reshape(-1)[kept], flat.traces[kept], settings)
    assume(bool(ours.any()))  # verl divides by the mean of the weights
    theirs, _ = corrections.compute_rollout_correction_weights(difference, given.mask, level, f"{low}_{high}")
    assert torch.allclose(ours, theirs.reshape(-1)[kept], **CLOSE)
    # TRL's lines (`vllm_importance_sampling_mode`), which are in the middle of a method.
    ratio = (difference if level == "token" else difference.sum(-1, keepdim=True)).exp()
    trls = ratio.masked_fill((ratio < low) | (ratio > high), 0.0).expand_as(given.mask)
    assert torch.allclose(ours, trls.reshape(-1)[kept], **CLOSE)


@drawn(st.integers(0, 10**6), st.sampled_from(get_args(RejectionSettings.model_fields["by"].annotation)))
def test_rejection_is_as_verls(corrections: Any, seed: int, by: Any) -> None:
    given = table(seed, 0.3)
    difference = (given.old - given.behaviour) * given.mask
    most = 0.9 if "sum" in by else 0.15
    threshold = f"{math.exp(-most / 2)}_{math.exp(most)}" if by.endswith("k1") else most
    settings = RejectionSettings(by=by, most=most, least=-most / 2 if by.endswith("k1") else None)
    flat = given.flat()
    kept = flat.weights != 0
    ours = kept_tokens(difference.reshape(-1)[kept], flat.traces[kept], settings)
    option = by.replace("sequence", "seq")
    theirs, _ = corrections.compute_rollout_rejection_mask(difference, given.mask, option, threshold)
    assert ours.tolist() == (theirs.reshape(-1)[kept] > 0).tolist()


@drawn(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5),
    st.floats(0.01, 0.5),
    st.integers(1, 512),
    st.integers(1, 10**4),
)
def test_the_coefficient_of_a_penalty_adapts_as_verls(
    verl: Any, divergences: list[float], target: float, num_rows: int, horizon: int
) -> None:
    settings = RewardKLSettings(coefficient=0.1, target=target, horizon=horizon)
    theirs, ours = verl.AdaptiveKLController(0.1, target, horizon), 0.1
    for divergence in divergences:
        theirs.update(divergence, num_rows)
        ours = adapted(ours, divergence, num_rows, settings)
        assert ours == pytest.approx(theirs.value)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_is_as_verls(verl: Any, estimator: str) -> None:
    given = table(3, 0.5)
    theirs = verl.kl_penalty(given.logprobs, given.reference, estimator)
    assert torch.allclose(kl_estimate(given.logprobs, given.reference, estimator), theirs, **CLOSE)


@pytest.mark.parametrize(
    ("function", "arguments", "settings"),
    [
        ("compute_grpo_outcome_advantage", {}, AdvantageSettings(deviation="sample")),
        ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}, AdvantageSettings(scale="none")),
        ("compute_rloo_outcome_advantage", {}, AdvantageSettings(scale="none", baseline="leave_one_out")),
    ],
    ids=["grpo", "dr_grpo", "rloo"],
)
def test_advantages_are_as_verls(
    verl: Any, function: str, arguments: dict[str, Any], settings: AdvantageSettings
) -> None:
    rewards = np.random.default_rng(0).random((5, 8))
    scores = torch.tensor(rewards.reshape(-1, 1))
    labels = np.repeat(np.arange(5), 8)
    theirs, _ = getattr(verl, function)(scores, torch.ones(40, 1, dtype=torch.float64), labels, **arguments)
    ours = np.concatenate([group_advantages(one, settings) for one in rewards])
    # verl computes a group's statistics in single precision where rewards are; these are double.
    assert ours == pytest.approx(theirs[:, 0].numpy(), abs=1e-6)


@drawn(st.integers(0, 10**6), st.sampled_from(["opo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"]))
def test_estimators_are_as_verls(verl: Any, seed: int, name: str) -> None:
    """Groups of eight sessions of one trace, with lengths and their own rewards."""
    random = np.random.default_rng(seed)
    rewards, lengths = random.random((4, 8)), random.integers(1, WIDTH + 1, (4, 8))
    mask = torch.tensor(np.arange(WIDTH) < lengths.reshape(-1, 1)).double()
    scores = torch.zeros(32, WIDTH, dtype=torch.float64)
    scores[torch.arange(32), torch.tensor(lengths.reshape(-1)) - 1] = torch.tensor(rewards.reshape(-1))
    function = {
        "opo": verl.compute_opo_outcome_advantage,
        "pass_at_k": verl.compute_grpo_passk_outcome_advantage,
        "reinforce_pp": verl.compute_reinforce_plus_plus_outcome_advantage,
        "reinforce_pp_baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }[name]
    arguments: dict[str, Any] = {"token_level_rewards": scores, "response_mask": mask}
    if name in ("pass_at_k", "reinforce_pp"):
        arguments["config"] = OmegaConf.create({"gamma": 1.0, "norm_adv_by_std_in_grpo": True})
    if name != "reinforce_pp":
        arguments["index"] = np.repeat(np.arange(4), 8)
    theirs, _ = function(**arguments)
    settings = algorithm(name, {"advantage.deviation": "sample"})
    found = [
        sample
        for number in range(4)
        for sample in make_samples(
            Group(
                f"task-{number}",
                tuple(
                    session(f"s{number}-{at}", float(reward), trace(turns=[[7] * int(length)]))
                    for at, (reward, length) in enumerate(zip(rewards[number], lengths[number], strict=True))
                ),
            ),
            settings,
        )
    ]
    ours = np.concatenate([sample.advantages for sample in over_batch(found, settings.advantage)])
    assert ours == pytest.approx(theirs[mask > 0].numpy(), abs=2e-6)


@drawn(st.integers(0, 10**6), st.sampled_from([1.0, 0.95]), st.sampled_from([0.0, 0.9, 1.0]))
def test_advantages_by_a_critic_are_as_verls(verl: Any, seed: int, gamma: float, lam: float) -> None:
    """With rewards after any trained token, and tokens in the middle of a response that are not trained on."""
    given, other = table(seed, 0.2), table(seed + 1, 0.2)
    values, rewards = given.old, other.reference * given.mask
    theirs, returns = verl.compute_gae_advantage_return(rewards, values, given.mask, gamma, lam)
    chosen = given.mask.reshape(-1) != 0
    ours = estimate_traces(
        rewards.reshape(-1)[chosen].numpy(),
        values.reshape(-1)[chosen].numpy(),
        given.flat().traces[chosen].numpy(),
        CriticSettings(gamma=gamma, lam=lam),
    )
    whitened = batch_advantages(ours.advantages, algorithm("ppo").advantage)
    assert whitened == pytest.approx(theirs.reshape(-1)[chosen].numpy(), abs=1e-9)
    assert ours.returns == pytest.approx(returns.reshape(-1)[chosen].numpy(), abs=1e-9)


@drawn(st.integers(0, 10**6), st.sampled_from([0.05, 0.5, 2.0]), st.sampled_from(["token_mean", "sequence_mean"]))
def test_the_critics_loss_is_as_verls(verl: Any, seed: int, clip: float, aggregation: str) -> None:
    given = table(seed, 0.5)
    values, old, returns = given.logprobs, given.old, given.behaviour
    mode = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}[aggregation]
    theirs, clipped = verl.compute_value_loss(values, returns, old, given.mask, clip, mode)
    chosen = given.mask.reshape(-1) != 0
    flat = given.flat()
    ours, metrics = value_loss(
        *(one.reshape(-1)[chosen] for one in (values, old, returns)),
        replace(flat, traces=flat.traces[chosen]),
        algorithm("ppo", {"loss.aggregation": aggregation}).loss,
        clip=clip,
    )
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert metrics["value_clipped"] == pytest.approx(float(clipped))
    gradients = [torch.autograd.grad(one, values)[0] for one in (ours, theirs)]
    assert torch.allclose(*gradients, rtol=1e-6, atol=1e-6)
    assert gradients[1].any()
