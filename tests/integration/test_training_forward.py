"""Layouts: packed, padded and tree batches give a real model's log-probs and gradients alike, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gangline.domain.conversation import SamplingParams
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.forward import loss_inputs, token_logprobs
from gangline.train.learning.loss import LossTotals, policy_loss
from gangline.train.learning.packing import Batch, LayoutKind, pack, pack_all
from gangline.train.learning.samples import make_samples
from support.engines.models import CONFIGS
from support.training.samples import EXACT, sample, session, trace

PROMPT = [5, 6, 7, 8, 9, 10]
SAMPLES = [
    sample(PROMPT, [11, 12, 2], session_id="s0"),
    sample([*PROMPT, 11, 12, 2, 7], [13, 2], session_id="s0"),  # continues from the first
    sample(PROMPT, [11, 12, 2], session_id="s1", seed=1),  # the same ids, sampled again
    sample(PROMPT, [14, 15, 7, 7, 16, 2], session_id="s1", weights=[1, 1, 0, 0, 0.5, 1]),
    sample([20], [21], session_id="s2"),  # shares nothing
    sample(PROMPT[:3], [8, 30, 2], session_id="s3"),  # its response begins as others' prompts go on
]
CLOSE = 1e-6
"""transformers takes norms, and eager attention's softmax, in float32 whatever the model's type is."""
KINDS: tuple[LayoutKind, ...] = ("padded", "packed", "tree")


@pytest.fixture(scope="module", params=["llama-sdpa", "llama-eager", "qwen3-sdpa"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    family, attention = request.param.split("-")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation=attention).double().eval()


def alone(model: PreTrainedModel) -> Tensor:
    """Log-probs of the trained tokens, each sample by itself, without a layout."""
    parts = list[Tensor]()
    for one in SAMPLES:
        ids = torch.tensor([[*one.prompt_ids.tolist(), *one.response_ids.tolist()]])
        logits = model(input_ids=ids).logits[0].log_softmax(-1)
        chosen = logits[:-1].gather(-1, ids[0, 1:, None])[:, 0][len(one.prompt_ids) - 1 :]
        parts.append(chosen[torch.from_numpy(one.weights) != 0])
    return torch.cat(parts)


def logprobs(model: PreTrainedModel, batch: Batch) -> Tensor:
    return token_logprobs(model, batch)  # type: ignore[arg-type]


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_changes_no_logprob(model: PreTrainedModel, kind: LayoutKind) -> None:
    assert torch.allclose(logprobs(model, pack(SAMPLES, kind)), alone(model), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_a_layout_changes_no_loss_and_no_gradient(model: PreTrainedModel, name: str) -> None:
    settings = algorithm(name, {"loss.clip_low": 0.9, "loss.clip_high": 9.0}).loss
    found = list[tuple[Tensor, list[Tensor]]]()
    for kind in KINDS:
        batch = pack(SAMPLES, kind)
        loss = policy_loss(loss_inputs(batch, logprobs(model, batch)), settings).loss
        found.append((loss, gradients(model, loss)))
    padded, *others = found
    assert any(bool((gradient.abs() > 1e-3).any()) for gradient in padded[1])
    for loss, others_gradients in others:
        assert torch.allclose(loss, padded[0], rtol=0, atol=CLOSE)
        for one, expected in zip(others_gradients, padded[1], strict=True):
            assert torch.allclose(one, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_small_batches_add_up_to_one(model: PreTrainedModel, kind: LayoutKind) -> None:
    settings = algorithm("grpo", {"loss.aggregation": "session_mean"}).loss
    whole = pack(SAMPLES, kind)
    expected = policy_loss(loss_inputs(whole, logprobs(model, whole)), settings).loss
    batches = list(pack_all(SAMPLES, kind, max_places=20))
    assert len(batches) > 1
    totals = LossTotals(num_tokens=len(whole.targets), num_traces=6, num_sessions=4)
    parts = [policy_loss(loss_inputs(one, logprobs(model, one)), settings, totals).loss for one in batches]
    assert torch.allclose(torch.stack(parts).sum(), expected, rtol=0, atol=CLOSE)


def test_temperature_is_that_of_the_sampling(model: PreTrainedModel) -> None:
    logits = model(input_ids=torch.tensor([[20, 21]])).logits[0, 0]
    both = logprobs(model, pack([sample([20], [21], temperature=0.7), sample([20], [21], session_id="s1")]))
    assert torch.allclose(both[0], (logits / 0.7).log_softmax(-1)[21], atol=CLOSE)
    assert torch.allclose(both[1], logits.log_softmax(-1)[21])


@pytest.mark.parametrize(("kind", "temperature"), [("processed", 0.7), ("temperature_scaled", 0.7), ("raw", 1.0)])
def test_the_temperature_is_the_one_that_the_log_probs_are_of(kind: Any, temperature: float) -> None:
    sampling = SamplingParams(temperature=0.7)
    certified = msgspec.structs.replace(EXACT, logprobs=kind, sampling=sampling)
    second = trace(turns=[(11, 12, 2), (13, 2)], certificates=(EXACT, certified))
    (one,) = make_samples(Group("task-1", (session("s0", 1.0, second),)), algorithm("grpo"))
    assert one.temperatures.tolist() == pytest.approx([1.0] * 5 + [temperature] * 2)


def test_a_step_along_the_gradient_makes_what_was_rewarded_likelier(model: PreTrainedModel) -> None:
    first = trace(turns=[(11, 12, 2), (13, 2)])
    second = trace(turns=[(11, 14, 2)])
    settings = algorithm("dr_grpo", {"loss.correction.level": "none"})  # no model gave these log-probs
    found = Group("task-1", (session("s0", 1.0, first), session("s1", 0.0, second)))
    batch = pack(make_samples(found, settings), "tree")
    stepped = copy.deepcopy(model)
    before = logprobs(stepped, batch)
    loss = policy_loss(loss_inputs(batch, before, old_logprobs=before.detach()), settings.loss).loss
    optimizer = torch.optim.SGD(stepped.parameters(), lr=1.0)
    loss.backward()
    optimizer.step()
    gain = (logprobs(stepped, batch) - before).detach()
    rewarded = torch.from_numpy(batch.traces) == 0
    assert float(gain[rewarded].sum()) > 0 > float(gain[~rewarded].sum())
