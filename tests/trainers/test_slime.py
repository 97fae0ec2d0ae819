"""Our samples in slime itself, from a checkout named by GANGLINE_SLIME: its rollout manager, checks and schedule.

    git clone https://github.com/THUDM/slime && GANGLINE_SLIME=slime make test-trainers

SGLang is absent: nothing of what is used here calls it, and its names are stand-ins so that slime can be imported.
Last run with slime at 624b824 on 2026-11-23.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gangline.domain.errors import InvalidGroup
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.collecting.groups import Group
from gangline.train.trainers import slime as adapter
from gangline.train.trainers.slime.arguments import IGNORED_BY_ROLLOUTS
from support.engines.expert_talks import twenty_thousand_tokens
from support.engines.mask_talks import TEMPERATURE, WHOLE, drawn_session
from support.engines.models import reference_model
from support.slime import types as slime_types
from support.slime.checkout import ABSENT, parsed_arguments
from support.training.absent_modules import importable
from support.training.samples import group, session, trace

GUIDE = Path(__file__).parents[2] / "docs/guides/trainers.md"
CHECKOUT = os.environ.get("GANGLINE_SLIME")
pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="GANGLINE_SLIME names no checkout of slime"),
    pytest.mark.filterwarnings("ignore"),
]
ARGS = SimpleNamespace(
    reward_key=None,
    advantage_estimator="grpo",
    rewards_normalization=True,
    grpo_std_normalization=True,
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    global_batch_size=4,
    use_dynamic_batch_size=False,
    micro_batch_size=1,
    balance_data=False,
    balance_by_flops=False,
)
PARALLEL = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


@pytest.fixture(scope="module", autouse=True)
def slime() -> Iterator[None]:
    with importable(str(CHECKOUT), *ABSENT):
        yield


def manager(**changes: Any) -> Any:
    """slime's rollout manager without its engines."""
    actor = importlib.import_module("slime.ray.rollout").RolloutManager
    made = object.__new__(actor.__ray_metadata__.modified_class)
    made.args = SimpleNamespace(**{**vars(ARGS), **changes})
    made.custom_reward_post_process_func = adapter.post_process_rewards
    made.custom_convert_samples_to_train_data_func = None
    return made


def flat(samples: Any) -> list[Any]:
    """As `RolloutManager._get_rollout_data` does, its check included."""
    importlib.import_module("slime.observability.rollout_data_utils").validate_rollout_id_annotated(samples)
    while isinstance(samples[0], list):
        samples = list(itertools.chain.from_iterable(samples))
    return samples


def several() -> list[Group]:
    """Four sessions, one of them with three traces."""
    long = session("s0", 1.0, trace(), trace(turns=[(12, 2)]), trace(turns=[(13, 2)]))
    return [Group("task-1", (long, session("s1", 0.0))), group(0.0, 1.0)]


def trained(data: dict[str, Any]) -> set[int]:
    """Places of the samples that slime's schedule puts into a step."""
    build = importlib.import_module("slime.utils.dp_schedule").build_dp_schedule
    lengths = [len(tokens) for tokens in data["tokens"]]
    partitions = build(
        ARGS, PARALLEL, lengths, global_batch_size=ARGS.global_batch_size, rollout_indices=data["rollout_ids"]
    )[0]
    return {place for partition in partitions for place in partition}


def test_every_sample_of_every_session_is_trained_and_each_session_counts_once() -> None:
    samples = flat(adapter.to_samples(several(), 2))
    data = manager()._convert_samples_to_train_data(samples)
    assert data["rollout_ids"] == [0, 0, 0, 1, 2, 3]
    assert data["rollout_mask_sums"][:3] == [sum(sum(one.loss_mask) for one in samples[:3])] * 3
    assert trained(data) == set(range(6))


def test_without_the_ids_of_sessions_slime_would_drop_some() -> None:
    """What the adapter did before: so the test above can fail."""
    samples = flat(adapter.to_samples(several(), 2))
    for sample in samples:
        sample.rollout_id = None
    assert trained(manager()._convert_samples_to_train_data(samples)) == set(range(4))


def test_rewards_of_traces_reach_slimes_batch() -> None:
    told = session("s0", 1.0, trace(reward=0.25), trace(turns=[(12, 2)], reward=0.75))
    data = manager()._convert_samples_to_train_data(
        flat(adapter.to_samples([Group("task-1", (told, session("s1", 0.0))), group(0.0, 1.0)], 2))
    )
    assert data["raw_reward"] == [0.25, 0.75, 0.0, 0.0, 1.0]
    assert 0 < data["rewards"][0] < data["rewards"][1]


def test_routing_of_20_000_tokens_reaches_slimes_batch_bit_by_bit(tmp_path: Path) -> None:
    """Through its own check of replays and its own alignment with the trained tokens."""
    routing, result = asyncio.run(twenty_thousand_tokens(tmp_path))
    (sample,) = flat(adapter.to_samples([Group("t1", (result,))], 1, replays_experts=True))
    here = manager(use_rollout_routing_replay=True, num_layers=48, moe_router_topk=8)
    data = here._convert_samples_to_train_data([sample])
    want = torch.from_numpy(routing.of(sample.tokens).astype("int32"))
    assert len(sample.tokens) >= 20_000
    assert torch.equal(data["rollout_routed_experts"][0], want)
    assert data["rollout_routed_experts"][0].dtype == torch.int32
    module = importlib.import_module("slime.backends.megatron_utils.cp_utils")
    padded = module._pad_routed_experts(data["rollout_routed_experts"][0], 1, 128)
    assert padded.shape == (len(sample.tokens), 48, 8)
    sample.rollout_routed_experts[:, 7] = 0
    with pytest.raises(ValueError, match=r"all zero for MoE layers \[7\]"):  # its check is on
        here._convert_samples_to_train_data([sample])


def test_sampling_masks_reach_slimes_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its check of lengths, its batch and its loss, whose log-probs are then those that were recorded."""
    result = asyncio.run(drawn_session(tmp_path))
    model = reference_model(tmp_path)
    samples = flat(adapter.to_samples([Group("t1", (result,))], 1, temperature=TEMPERATURE, replays_masks=True))
    data = manager(rollout_top_p=0.8)._convert_samples_to_train_data(samples)
    loss = importlib.import_module("slime.backends.megatron_utils.loss")
    monkeypatch.setattr(
        loss,
        "mpu",
        SimpleNamespace(get_context_parallel_world_size=lambda: 1, get_tensor_model_parallel_rank=lambda: 0),
    )
    num_ids, lengths = TinyTokenizer().num_ids, [len(one.tokens) for one in samples]
    keep = loss._build_topp_keep_mask(
        sum(lengths),
        num_ids,
        torch.device("cpu"),
        data["rollout_top_p_token_ids"],
        data["rollout_top_p_token_offsets"],
        lengths,
        [one.response_length for one in samples],
        allgather_cp=False,
    )
    ids = torch.tensor([token for one in samples for token in one.tokens])
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor([one.tokens])).logits[0] for one in samples]) / TEMPERATURE
    log_probs = importlib.import_module("slime.utils.ppo_utils")._VocabParallelLogProbEntropy
    shifted = torch.roll(ids, -1)
    values, _ = log_probs.apply(logits, shifted, keep, None, False, False)
    end = 0
    for sample, length in zip(samples, lengths, strict=True):
        sample._validate_response_metadata_lengths()
        end += length
        trained = torch.tensor(sample.loss_mask, dtype=torch.bool)
        found = values[end - sample.response_length - 1 : end - 1, 0][trained]
        assert torch.allclose(found, torch.tensor(sample.rollout_log_probs)[trained], atol=1e-4)
        assert (found < -0.1).any()


def test_tokens_of_the_whole_vocabulary_are_refused_beside_masks(tmp_path: Path) -> None:
    """slime's log-prob of a token without kept ids is 0."""
    result = asyncio.run(drawn_session(tmp_path, sampling=WHOLE))
    with pytest.raises(InvalidGroup, match="slime takes them for certain"):
        adapter.to_samples([Group("t1", (result,))], 1, temperature=TEMPERATURE, replays_masks=True)


def choices() -> list[str]:
    source = (Path(str(CHECKOUT)) / "slime/utils/arguments.py").read_text()
    found = re.search(r'"--advantage-estimator".*?choices=\[(.*?)\]', source, re.DOTALL)
    assert found
    return re.findall(r'"(\w+)"', found[1])


def test_rewards_are_compared_as_by_slime_for_each_of_its_estimators() -> None:
    assert choices()
    for estimator in choices():
        for divided in (True, False):
            here = manager(advantage_estimator=estimator, grpo_std_normalization=divided)
            samples = flat(adapter.to_samples([group(1.0, 0.25), group(0.5, 0.5)], 2))
            ours = here._post_process_rewards(samples)
            here.custom_reward_post_process_func = None
            theirs = here._post_process_rewards(samples)
            assert ours[0] == theirs[0], estimator
            assert ours[1] == pytest.approx(theirs[1], abs=1e-5), estimator


def test_each_of_its_estimators_makes_advantages_of_our_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own `compute_advantages_and_returns`, on one rank: better sessions get more, in every trace."""
    loss = importlib.import_module("slime.backends.megatron_utils.loss")
    parallel = SimpleNamespace(
        is_pipeline_last_stage=lambda: True,
        get_context_parallel_rank=lambda: 0,
        get_context_parallel_world_size=lambda: 1,
    )
    for name in ("slime.backends.megatron_utils.loss", "slime.backends.megatron_utils.cp_utils"):
        monkeypatch.setattr(importlib.import_module(name), "mpu", parallel)
    monkeypatch.setattr(importlib.import_module("megatron.core"), "mpu", parallel)
    for estimator in choices():
        samples = flat(adapter.to_samples(several(), 2))
        data = manager(advantage_estimator=estimator)._convert_samples_to_train_data(samples)
        lengths = data["response_lengths"]
        batch = {
            "rewards": data["rewards"],
            "rollout_log_probs": [torch.tensor(one) for one in data["rollout_log_probs"]],
            "log_probs": [torch.tensor(one) for one in data["rollout_log_probs"]],
            "values": [torch.zeros(length) for length in lengths],
            "response_lengths": lengths,
            "total_lengths": [len(tokens) for tokens in data["tokens"]],
            "loss_masks": [torch.tensor(mask) for mask in data["loss_masks"]],
        }
        settings: dict[str, Any] = {"kl_coef": 0.0, "gamma": 1.0, "lambd": 1.0, "custom_advantage_function_path": None}
        flags = {"use_rollout_logprobs": True, "use_opd": False, "normalize_advantages": False}
        loss.compute_advantages_and_returns(SimpleNamespace(advantage_estimator=estimator, **settings, **flags), batch)
        of_first = [float(one[0]) for one in batch["advantages"]]
        assert len(of_first) == len(samples), estimator
        assert min(of_first[:3]) > of_first[3], estimator
        assert of_first[5] > of_first[4], estimator


# The stand-ins of `make test` and this file are compared with slime itself.


def test_the_stand_in_of_its_sample_has_its_fields_and_defaults() -> None:
    real = importlib.import_module("slime.utils.types").Sample
    theirs = {field.name: field for field in dataclasses.fields(real)}
    for field in dataclasses.fields(slime_types.Sample):
        assert field.name in theirs, field.name
        assert getattr(slime_types.Sample(), field.name) == getattr(real(), field.name) or field.name == "status"
    assert {one.name: one.value for one in slime_types.Status} == {one.name: one.value for one in real.Status}
    assert real(reward={"a": 1.0}).get_reward_value(SimpleNamespace(reward_key="a")) == 1.0
    assert real().status.value == slime_types.Sample().status.value


def test_the_stand_in_of_its_comparing_gives_its_numbers() -> None:
    samples = flat(adapter.to_samples([group(1.0, 0.25), group(0.5, 0.5)], 2))
    for divided in (True, False):
        here = manager(grpo_std_normalization=divided)
        here.custom_reward_post_process_func = None
        theirs = here._post_process_rewards(samples)[1]
        assert slime_types.normalised(samples, 2, divided=divided) == pytest.approx(theirs, abs=1e-5)


def test_the_options_that_are_refused_are_options_of_it() -> None:
    known = vars(parsed_arguments(Path(str(CHECKOUT)), "--rollout-batch-size", "1"))
    assert IGNORED_BY_ROLLOUTS.keys() <= known.keys()
    assert not any(known[name] for name in IGNORED_BY_ROLLOUTS), "refused although it is a default"


def test_every_option_of_the_guide_is_an_option_of_slime_megatron_or_sglang() -> None:
    """slime's by its own parser, the others by its own scripts, which hand them on."""
    assert CHECKOUT is not None
    section = GUIDE.read_text().split("\n## slime", 1)[1].split("\n## ", 1)[0]
    shown = "".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL)).replace("--runtime-env-json", "")
    named = set(re.findall(r"--[a-z][a-z0-9-]+", shown)) | set(re.findall(r"`(--[a-z][a-z0-9-]+)", section))
    parser = argparse.ArgumentParser()
    with importable(CHECKOUT, *ABSENT):
        importlib.import_module("slime.utils.arguments").get_slime_extra_args_provider()(parser)
    own = {option for action in parser._actions for option in action.option_strings}
    files = [path for kind in ("*.sh", "*.md", "*.py") for path in Path(CHECKOUT).rglob(kind)]
    used = set(re.findall(r"--[a-z][a-z0-9-]+", "".join(path.read_text(errors="replace") for path in files)))
    ours = {"--engines-later", "--host"}
    assert {"--rollout-function-path", "--custom-reward-post-process-path", "--colocate"} <= named & own
    assert sorted(named - own - used - ours) == []
