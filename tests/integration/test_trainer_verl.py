"""Groups as verl's batches: judged by the kit, by verl's own advantages and loss, and by a model."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from gangline.domain.completion import Certificate
from gangline.domain.conversation import SamplingParams
from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.trajectory import Trace
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import Algorithm, algorithm
from gangline.train.learning.forward import loss_inputs, token_logprobs
from gangline.train.learning.loss import policy_loss
from gangline.train.learning.packing import pack
from gangline.train.learning.samples import make_samples
from support.engines.expert_talks import twenty_thousand_tokens
from support.engines.models import CONFIGS
from support.training.samples import group, session, trace
from support.training.verl_loops import agent_loops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what verl imports
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    from gangline.train.trainers.verl import batches as adapter


def read(batch: Any) -> list[ReadRow]:
    """By the masks, as verl's trainer does."""
    tensors, labels = batch.batch, batch.non_tensor_batch
    width = tensors["prompts"].shape[1]
    found = list[ReadRow]()
    for number in range(len(batch)):
        is_token = tensors["attention_mask"][number].bool()
        prompt, response = is_token[:width], is_token[width:]
        ids = tensors["input_ids"][number]
        assert ids[width:][response].tolist() == tensors["responses"][number][response].tolist()
        assert ids[:width][prompt].tolist() == tensors["prompts"][number][prompt].tolist()
        found.append(
            ReadRow(
                task_id=labels["uid"][number],
                session_id=labels["session_id"][number],
                prompt_ids=ids[:width][prompt].tolist(),
                response_ids=ids[width:][response].tolist(),
                loss_mask=tensors["response_mask"][number][response].tolist(),
                logprobs=tensors["rollout_log_probs"][number][response].tolist(),
                versions=tensors["rollout_versions"][number][response].tolist(),
                reward=tensors["token_level_scores"][number].sum().item(),
            )
        )
    return found


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
@pytest.mark.parametrize("widths", [{}, {"prompt_length": 40, "response_length": 50}], ids=["narrow", "wide"])
def test_the_adapter_keeps_the_contract(check: Check, widths: dict[str, int]) -> None:
    def convert(groups: Any, num_samples: int) -> Any:
        return adapter.to_data_proto(groups, num_samples, **widths)

    run_check(check, Subject(convert=convert, read=read, contract=adapter.CONTRACT))


def test_rows_are_padded_as_verls_agent_loops_do() -> None:
    batch = adapter.to_data_proto([group(1.0, 0.5)], 2, pad_id=9, prompt_length=5, response_length=4).batch
    assert batch["input_ids"][0].tolist() == [9, 9, 1, 4, 5, 10, 11, 2, 9]
    assert batch["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0]
    assert batch["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 5]
    assert batch["rm_scores"][1].tolist() == [0, 0, 0.5, 0]


async def test_routing_is_equal_to_that_of_verls_own_agent_loops(tmp_path: Path) -> None:
    """20,000 tokens of 48 layers and 8 experts, given to verl's own `AgentLoopOutput` as its engine client does."""
    routing, result = await twenty_thousand_tokens(tmp_path)
    batch = adapter.to_data_proto([Group("t1", (result,))], 1, replays_experts=True, prompt_length=3000).batch
    assert result.trajectory is not None
    (one,) = result.trajectory.traces
    ids = [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
    with agent_loops(tmp_path) as loops:
        theirs = loops.AgentLoopOutput(
            prompt_ids=one.prompt_ids.tolist(),
            response_ids=one.response_ids.tolist(),
            response_mask=one.loss_mask.tolist(),
            routed_experts=routing.of(ids),
            metrics=loops.AgentLoopMetrics(),
        ).as_dict()["routed_experts"]
    padding = 3000 - len(one.prompt_ids)
    ours = batch["routed_experts"][0]
    assert ours.dtype == theirs.dtype == torch.int16
    assert torch.equal(ours[padding:], theirs)
    assert not ours[:padding].any()
    assert len(theirs) >= 20_000


def test_a_batch_says_at_which_temperature_it_was_sampled() -> None:
    cool = Certificate(
        prompt_source="engine",
        context="first",
        finish_reason="stop",
        logprobs="processed",
        sampling=SamplingParams(temperature=0.7),
    )
    groups = [Group("task-1", tuple(session(f"s{n}", float(n), trace(certificates=(cool,))) for n in range(2)))]
    assert adapter.to_data_proto(groups, 2, temperature=0.7).meta_info == {"temperature": 0.7}
    with pytest.raises(InvalidGroup, match=r"c0000 in s0/0 are of temperature 0\.7, and the trainer's are of 1:"):
        adapter.to_data_proto(groups, 2)


@pytest.mark.parametrize("narrow", [{"prompt_length": 2}, {"response_length": 2}], ids=str)
def test_nothing_is_cut_to_fit(narrow: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"has 3 ids, and .*_length is 2"):
        adapter.to_data_proto([group(1.0, 0.0)], 2, **narrow)


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="sdpa").double().eval()


def logprobs(model: PreTrainedModel, batch: Any) -> Tensor:
    """[B, T] of the responses, as verl computes them: all rows at once, padded."""
    tensors, width = batch.batch, batch.batch["responses"].shape[1]
    fields = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**fields, use_cache=False).logits[:, -width - 1 : -1].log_softmax(-1)
    return logits.gather(-1, tensors["responses"][..., None])[..., 0]


def near(model: PreTrainedModel, one: Trace, seed: int) -> Trace:
    """The trace with log-probs as an engine reports them: nearly the model's."""
    with torch.no_grad():
        ids = torch.tensor([[*one.prompt_ids.tolist(), *one.response_ids.tolist()]])
        exact = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    noise = 0.3 * np.random.default_rng(seed).normal(size=len(one.response_ids))
    reported = (exact[len(one.prompt_ids) - 1 :].numpy() + noise) * one.loss_mask
    return msgspec.structs.replace(one, response_logprobs=reported.astype(np.float32))


def collected(model: PreTrainedModel) -> list[Group]:
    turns = [[(10, 11, 2)], [(12, 2), (13, 14, 2)], [(15, 16, 17, 2), (18, 2), (2,)], [(19, 2)]]
    rewards = [[1.0, 0.0, 0.0, 0.5], [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    return [
        Group(
            f"task-{number}",
            tuple(
                session(f"t{number}s{sample}", reward, near(model, trace(turns=turns[sample]), 10 * number + sample))
                for sample, reward in enumerate(mine)
            ),
        )
        for number, mine in enumerate(rewards)
    ]


GRPO_AS_VERL: dict[str, Any] = {"loss.dual_clip": 3.0, "advantage.deviation": "sample"}


def ours(model: PreTrainedModel, groups: list[Group], settings: Algorithm) -> Tensor:
    batch = pack([sample for one in groups for sample in make_samples(one, settings)])
    found = token_logprobs(model, batch)  # type: ignore[arg-type]
    return policy_loss(loss_inputs(batch, found), settings.loss).loss


def theirs(model: PreTrainedModel, batch: Any, advantages: Tensor) -> Tensor:
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    mask, old = batch.batch["response_mask"].double(), batch.batch["rollout_log_probs"].double()
    compute = core.get_policy_loss_fn("vanilla")
    return compute(old, logprobs(model, batch), advantages, mask, "seq-mean-token-mean", config, None)[0]


def test_verls_advantages_and_loss_are_ours_with_the_same_gradient(model: PreTrainedModel) -> None:
    groups, settings = collected(model), algorithm("grpo", GRPO_AS_VERL)
    batch = adapter.to_data_proto(groups, 4, pad_id=3, prompt_length=7, response_length=20, algorithm=settings)
    tensors = batch.batch
    advantages, _ = core.compute_grpo_outcome_advantage(
        tensors["token_level_scores"].double(), tensors["response_mask"].double(), batch.non_tensor_batch["uid"]
    )
    assert torch.allclose(advantages, tensors["advantages"].double(), rtol=0, atol=1e-6)
    one, other = ours(model, groups, settings), theirs(model, batch, advantages)
    assert torch.allclose(one, other, rtol=0, atol=1e-6)
    weights = list(model.parameters())
    for mine, verls in zip(torch.autograd.grad(one, weights), torch.autograd.grad(other, weights), strict=True):
        assert torch.allclose(mine, verls, rtol=0, atol=1e-5)
        assert mine.any()


def test_a_session_of_several_traces_weighs_one_in_the_advantages_that_come_along(model: PreTrainedModel) -> None:
    several = session("s0", 1.0, trace(), trace(prompt_ids=np.array([1, 4], np.int32)), trace(turns=[(12, 2)]))
    groups = [Group("task-1", (several, session("s1", 0.0), session("s2", 0.0)))]
    settings = algorithm("grpo", {"loss.aggregation": "sequence_mean"})  # verl's own loss knows rows only
    batch = adapter.to_data_proto(groups, 3, algorithm=settings)
    found = batch.batch["advantages"][:, 0].tolist()
    assert found == pytest.approx([2**0.5] * 3 + [-(2**-0.5)] * 2, abs=1e-5)
    one, other = ours(model, groups, settings), theirs(model, batch, batch.batch["advantages"].double())
    assert torch.allclose(one, other, rtol=0, atol=1e-6)
