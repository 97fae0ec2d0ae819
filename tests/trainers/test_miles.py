"""Our samples and rollout class in miles itself, from a checkout named by GANGLINE_MILES.

    git clone https://github.com/radixark/miles && GANGLINE_MILES=miles make test-trainers

SGLang, Megatron, wandb and polars are absent: nothing of what is used here calls them. Last run with miles at 31f1ca9
on 2026-11-23.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gangline.train.collecting.groups import Group
from gangline.train.trainers import miles as adapter
from gangline.train.trainers.slime import post_process_rewards
from gangline.train.trainers.slime.arguments import IGNORED_BY_ROLLOUTS
from support.engines.expert_talks import twenty_thousand_tokens
from support.slime import miles as stand_ins
from support.slime import types as slime_types
from support.slime.checkout import ABSENT
from support.slime.service import slime_arguments
from support.training.absent_modules import importable
from support.training.samples import group, session, trace

CHECKOUT = os.environ.get("GANGLINE_MILES")
pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="GANGLINE_MILES names no checkout of miles"),
    pytest.mark.filterwarnings("ignore"),
]
PARALLEL = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


@pytest.fixture(scope="module", autouse=True)
def miles() -> Iterator[None]:
    with importable(str(CHECKOUT), *ABSENT, "polars"):
        yield


def arguments(**changes: Any) -> Any:
    fields: dict[str, Any] = {"use_dynamic_global_batch_size": False, "disable_rollout_trim_samples": False}
    sizes: dict[str, Any] = {"use_dynamic_batch_size": False, "micro_batch_size": 1, "multi_lora": False}
    balance = {"balance_data": False, "balance_by_flops": False, "grpo_std_normalization": True}
    return slime_arguments(**{**fields, **sizes, **balance, **changes})


def several(*rewards: float) -> list[Group]:
    """Four sessions, one of them with three traces of these rewards."""
    traces = [trace(turns=[(12 + number, 2)], reward=reward) for number, reward in enumerate(rewards)]
    return [Group("task-1", (session("s0", 1.0, *traces), session("s1", 0.0))), group(0.0, 1.0)]


def converted(groups: list[Group], **changes: Any) -> dict[str, Any]:
    """As its rollout manager does: `postprocess_rollout_data`, then `convert_samples_to_train_data`."""
    args = arguments(**changes)
    make = importlib.import_module("miles.utils.types").Sample
    batch = adapter.to_samples(groups, 2, sample_type=make)
    conversion = importlib.import_module("miles.ray.rollout.rollout_data_conversion")
    data, metadata = conversion.postprocess_rollout_data(args, batch, train_parallel_config=PARALLEL)
    path = getattr(args, "custom_reward_post_process_path", None)
    return importlib.import_module("miles.ray.rollout.train_data_conversion").convert_samples_to_train_data(
        args,
        data,
        metadata=metadata,
        custom_convert_samples_to_train_data_func=None,
        custom_reward_post_process_func=None if path is None else post_process_rewards,
    )


def test_routing_of_20_000_tokens_reaches_miless_samples_bit_by_bit(tmp_path: Path) -> None:
    """Its own check of a sample asks for one row fewer than tokens."""
    routing, result = asyncio.run(twenty_thousand_tokens(tmp_path))
    make = importlib.import_module("miles.utils.types").Sample
    [[[sample]]] = adapter.to_samples([Group("t1", (result,))], 1, sample_type=make, replays_experts=True)
    sample.validate()
    assert sample.rollout_routed_experts.dtype == np.int32
    assert np.array_equal(sample.rollout_routed_experts, routing.of(sample.tokens))
    sample.rollout_routed_experts = sample.rollout_routed_experts[1:]
    with pytest.raises(AssertionError, match="rollout_routed_experts length"):
        sample.validate()


def test_every_sample_of_every_session_is_trained_and_each_session_counts_once() -> None:
    data = converted(several(1.0, 1.0, 1.0))
    assert data["rollout_ids"] == [0, 0, 0, 1, 2, 3]
    assert data["weight_versions"][0] == ["0"]
    module = importlib.import_module("miles.ray.rollout.train_data_conversion")
    shards = module.split_train_data_by_dp_scheduled_raw(arguments(), data, train_parallel_config=PARALLEL)
    assert sorted(place for shard in shards for place in shard["partition"]) == list(range(6))


def test_its_own_comparing_and_ours_agree_for_each_of_its_estimators() -> None:
    for estimator in choices():
        theirs = converted(several(1.0, 1.0, 1.0), advantage_estimator=estimator)
        ours = converted(several(1.0, 1.0, 1.0), advantage_estimator=estimator, custom_reward_post_process_path="ours")
        assert ours["rewards"] == pytest.approx(theirs["rewards"], abs=1e-5), estimator


def test_rewards_of_traces_need_our_comparing_as_the_refusal_says() -> None:
    with pytest.raises(ValueError, match="must share one reward"):
        converted(several(0.25, 0.5, 0.75))
    data = converted(several(0.25, 0.5, 0.75), custom_reward_post_process_path="ours")
    assert data["raw_reward"][:3] == [0.25, 0.5, 0.75]
    assert data["rewards"][0] < data["rewards"][1] < data["rewards"][2]


def test_it_makes_our_class_and_calls_it() -> None:
    class Groups:
        def __init__(self) -> None:
            self.versions = list[int | None]()

        def collect(self, _args: Any, _source: Any, version: int | None) -> list[Group]:
            self.versions.append(version)
            return several(1.0, 1.0)

    class Rollout(adapter.MilesRollout):
        def groups(self) -> Any:
            return Groups()

    types = importlib.import_module("miles.rollout.base_types")
    compatibility = importlib.import_module("miles.rollout.inference_rollout.compatibility")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compatibility, "load_function", lambda _: Rollout)
        given = types.RolloutFnConstructorInput(args=arguments(), data_source=None)
        made = compatibility.load_rollout_function(given, "my_rollout.Rollout")
    output = compatibility.call_rollout_function(made, types.RolloutFnTrainInput(rollout_id=7, weight_version=3))
    assert isinstance(output, types.RolloutFnTrainOutput)
    assert isinstance(output.samples[0][0][0], importlib.import_module("miles.utils.types").Sample)
    assert made._rollouts.versions == [3]


def choices() -> list[str]:
    action = next(one for one in parser()._actions if one.dest == "advantage_estimator")
    return list(action.choices or ())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(conflict_handler="resolve")
    importlib.import_module("miles.utils.arguments").get_miles_extra_args_provider()(made)
    return made


def test_the_options_that_are_refused_are_options_of_it() -> None:
    known = {one.dest: one.default for one in parser()._actions}
    ours = {*IGNORED_BY_ROLLOUTS, *adapter.REFUSED}
    assert ours - known.keys() <= {"rollout_sample_hook_path", "multi_lora"}  # slime's alone; set by its own checks
    assert not any(known.get(name) for name in ours), "refused although it is a default"


def test_the_stand_ins_of_its_types_have_their_fields() -> None:
    types = importlib.import_module("miles.rollout.base_types")
    for name in ("RolloutFnTrainInput", "RolloutFnEvalInput", "RolloutFnTrainOutput"):
        ours, theirs = getattr(stand_ins, name), getattr(types, name)
        assert {one.name for one in dataclasses.fields(ours)} == {one.name for one in dataclasses.fields(theirs)}, name
    assert types.RolloutFnTrainInput(rollout_id=0).weight_version is None
    assert types.RolloutFnEvalInput(rollout_id=0).evaluation
    real = importlib.import_module("miles.utils.types").Sample
    known = {one.name for one in dataclasses.fields(real)}
    assert {one.name for one in dataclasses.fields(slime_types.Sample)} - known <= {"session_id"}  # slime's alone
    assert SimpleNamespace(**{one.name: one.value for one in real.Status}).TRUNCATED == "truncated"
