"""miles's rollout class at a real server and node: its call's input, its version, and what is refused.

The stand-ins of its types are described after github.com/radixark/miles at 31f1ca9 (2026-08-21);
`tests/trainers/test_miles.py` compares them with miles itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest, WeightsNotLoaded
from gangline.train.collecting.groups import Group
from gangline.train.trainers import miles as adapter
from support.engines.trained_sglang import TrainedSglang
from support.node.node import TOKEN
from support.slime.miles import RolloutFnEvalInput, RolloutFnTrainInput, RolloutFnTrainOutput
from support.slime.service import SUPPLY, EngineService, Prompts, slime_arguments, task_of
from support.slime.types import Sample
from support.training.samples import group, session, trace


@asynccontextmanager
async def rollout_of(running: EngineService, folder: Path, args: Any) -> AsyncGenerator[adapter.MilesRollout]:
    class Rollout(adapter.MilesRollout):
        sample_type = Sample
        output_type = RolloutFnTrainOutput

        def groups(self) -> adapter.GroupRollouts:
            options: dict[str, Any] = {"token_env": "TRAINER_KEY", "supply": SUPPLY}
            return adapter.GroupRollouts(running.client.url, task_of, folder / "inbox", **options)

    rollout = Rollout(SimpleNamespace(args=args, data_source=Prompts(Sample)))
    try:
        yield rollout
    finally:
        await asyncio.to_thread(rollout.stop)


async def test_miles_is_given_groups_of_the_version_that_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_KEY", TOKEN)
    engine = TrainedSglang(weight_version="1")
    async with EngineService.running(tmp_path, engine) as running:
        args = slime_arguments(use_miles_router=True, **running.address)
        async with rollout_of(running, tmp_path, args) as rollout:
            output = await asyncio.to_thread(rollout, RolloutFnTrainInput(rollout_id=0, weight_version=1))
            samples = [one for some in output.samples for traces in some for one in traces]
            assert [one.weight_versions for one in samples] == [["1", "1"]] * 4
            assert [one.rollout_id for one in samples] == [0, 1, 2, 3]
            with pytest.raises(WeightsNotLoaded, match=r"pushed policy version 2, and its engines say 1"):
                await asyncio.to_thread(rollout, RolloutFnTrainInput(rollout_id=1, weight_version=2))
            with pytest.raises(InvalidRequest, match="--eval-function-path"):
                rollout(RolloutFnEvalInput(rollout_id=1))
        assert running.disturbed == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"use_dynamic_global_batch_size": True}, "--use-dynamic-global-batch-size True would be ignored"),
        ({"use_rollout_indexer_replay": True}, "--use-rollout-indexer-replay True would be ignored"),
        ({"rollout_top_k": 5}, "--rollout-top-k 5"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p is 0.9"),
    ],
)
def test_options_that_would_be_ignored_are_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    class Rollout(adapter.MilesRollout):
        sample_type = Sample
        output_type = RolloutFnTrainOutput

        def groups(self) -> adapter.GroupRollouts:
            return adapter.GroupRollouts("http://127.0.0.1:9", task_of, tmp_path)

    rollout = Rollout(SimpleNamespace(args=slime_arguments(**changes), data_source=Prompts(Sample)))
    with pytest.raises(InvalidRequest, match=told):
        rollout(RolloutFnTrainInput(rollout_id=0))


def test_rewards_that_miles_would_not_compare_are_refused() -> None:
    told = session("s0", 1.0, trace(reward=0.25), trace(turns=[(12, 2)], reward=0.75))
    batch = adapter.to_samples([Group("task-1", (told, session("s1", 0.0)))], 2, sample_type=Sample)
    with pytest.raises(InvalidRequest, match="--custom-reward-post-process-path gangline"):
        adapter.require_comparable(slime_arguments(), batch)
    adapter.require_comparable(slime_arguments(custom_reward_post_process_path="mine"), batch)
    adapter.require_comparable(slime_arguments(), adapter.to_samples([group(1.0, 0.0)], 2, sample_type=Sample))
