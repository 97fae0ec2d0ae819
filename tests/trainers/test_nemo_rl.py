"""NeMo RL's own `async_grpo_train`, replay buffer and configuration, collecting from our service.

    git clone https://github.com/NVIDIA-NeMo/RL nemo-rl && GANGLINE_NEMO_RL=nemo-rl make test-trainers

`tests/support/training/nemo_rl_checkout.py` says what stands in for GPUs. Last run with NeMo RL at 7ea279a on
2026-11-23, with Python 3.11.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gangline.domain.errors import InvalidRequest
from gangline.train.collecting.groups import Group
from gangline.train.trainers.nemo_rl import NemoActor, NemoCollector, NemoService, collecting_with, to_batch
from gangline.train.trainers.nemo_rl.seam import RayBuffer
from support.training import nemo_rl_loop
from support.training.nemo_rl_checkout import Loader, Policy, configured, local_actor, nemo_rl, train
from support.training.nemo_rl_service import Gate, Rollouts
from support.training.samples import session, trace
from support.training.service import GOOD

CHECKOUT = Path(os.environ.get("GANGLINE_NEMO_RL", ""))
pytestmark = [
    pytest.mark.skipif("GANGLINE_NEMO_RL" not in os.environ, reason="GANGLINE_NEMO_RL names no checkout of NeMo RL"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", autouse=True)
def checkout() -> Iterator[None]:
    with nemo_rl(CHECKOUT):
        yield


class Service(NemoService):
    """With a service and a node in memory."""

    gate = Gate()

    def collector(self, master_config: Any, replay_buffer: Any, start_step: int) -> NemoCollector:
        groups = Rollouts(self.gate, **{f"t{number}": GOOD for number in range(100)})
        batches = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
        settings = self.settings(master_config, start_step)
        buffer = RayBuffer(replay_buffer)
        return NemoCollector(groups, [self.gate], buffer, settings, self.tasks_of, batch_type=batches)


def one_task(name: str) -> list[dict[str, Any]]:
    return [{"task_id": name, "instruction": "add"}]


def test_its_loop_trains_on_our_groups_and_closes_our_gates_around_its_refits(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = list[NemoActor]()

    def actor_type(made: type[Any]) -> Any:
        def remote(*given: Any) -> Any:
            actors.append(made(*given))
            return local_actor(actors[-1])

        return SimpleNamespace(remote=remote)

    policy, refits = Policy(), list[list[str]]()
    service = Service(server_url="http://127.0.0.1:9", node_urls=[], tasks_of=one_task)
    loader = Loader(f"t{number}" for number in itertools.count())
    try:
        with collecting_with(service, actor_type=actor_type):
            train(configured(CHECKOUT), loader, policy, lambda: refits.append(service.gate.said[-1:]), monkeypatch)
    finally:
        actors[0].stop()
    assert refits == [[], *[["pause drain 1800"]] * 3]
    assert service.gate.version == 3
    assert len(policy.given) == 3
    for data in policy.given:
        assert data["input_ids"].shape[0] == 4
        assert [sorted(set(row.tolist())) for row in data["token_mask"]] == [[0, 1]] * 4
        trained = data["token_mask"].bool()
        assert torch.all(data["generation_logprobs"][trained] == -0.5)
        signs = [torch.sign(row[mask]).unique().tolist() for row, mask in zip(data["advantages"], trained, strict=True)]
        assert signs == [[1.0], [-1.0], [1.0], [-1.0]]


def test_what_it_calls_on_its_collector_is_what_ours_has() -> None:
    module = importlib.import_module("nemo_rl.algorithms.grpo")
    source = inspect.getsource(module.async_grpo_train)
    called = {part.partition(".remote")[0] for part in source.split("trajectory_collector.")[1:]}
    assert "check_health" in called
    assert not {name for name in called if name.isidentifier() and not hasattr(NemoActor, name)}


def test_its_collectors_arguments_are_those_that_are_replaced() -> None:
    theirs = importlib.import_module("nemo_rl.algorithms.async_utils").AsyncTrajectoryCollector
    known = inspect.signature(theirs.__ray_metadata__.modified_class.__init__).parameters
    assert {"master_config", "replay_buffer", "start_step", "next_nemo_gym_task_index"} <= known.keys()
    assert "teacher_worker_groups" in known


def test_options_that_would_be_ignored_are_refused() -> None:
    service = NemoService(server_url="http://127.0.0.1:9", node_urls=[], tasks_of=one_task)
    config = configured(CHECKOUT)
    assert service.settings(config, 0).num_samples == 2
    config.policy["generation"]["top_p"] = 0.9
    with pytest.raises(InvalidRequest, match=r"policy\.generation\.top_p is 0\.9"):
        service.settings(config, 0)


# The stand-ins of `make test` are compared with NeMo RL itself.


def test_the_stand_in_of_its_buffer_does_the_same() -> None:
    theirs = importlib.import_module("nemo_rl.algorithms.async_utils.replay_buffer").ReplayBufferImpl(4, False)
    ours = nemo_rl_loop.ReplayBuffer(4)
    for version, target in ((0, 0), (0, 1), (0, 0), (1, 1), (1, 2)):
        group = {"number": version, "rollout_metrics": {}}
        assert asyncio.run(ours.add(group, version, target)) == theirs.add(group, version, target)
    for step in range(4):
        needed = asyncio.run(ours.get_trajectories_needed(step, 2, 1))
        assert needed == theirs.get_trajectories_needed(step, 2, 1), step
        found = theirs.sample(num_prompt_groups=2, current_weight_version=step, max_age_steps=1)
        assert ours.sample(2, step, 1) == (None if found is None else found["trajectories"]), step
        assert len(ours.held) == theirs.size()


def test_the_stand_in_of_its_masks_and_prompts_does_the_same() -> None:
    module = importlib.import_module("nemo_rl.algorithms.grpo")
    utils = importlib.import_module("nemo_rl.algorithms.utils")
    first = session("s0", 1.0, trace(turns=[(10, 2), (11, 2)]))
    batch = to_batch(Group("task-1", (first, session("s1", 0.0, trace(turns=[(12, 2)])))), 2)
    ours = [torch.cat(nemo_rl_loop.masks(log)).tolist() for log in batch["message_log"]]
    prompts = module.extract_initial_prompt_messages(batch["message_log"], batch["length"])
    for log, found, length in zip(batch["message_log"], prompts, batch["length"].tolist(), strict=True):
        assert torch.cat([one["token_ids"] for one in found]).tolist() == nemo_rl_loop.prompt(log, length)
    module.add_grpo_token_loss_masks_and_generation_logprobs(batch["message_log"])
    theirs = [torch.cat([one["token_loss_mask"] for one in log]).tolist() for log in batch["message_log"]]
    assert ours == theirs
    ids = torch.stack([found[0]["token_ids"] for found in prompts])
    mean = utils.calculate_baseline_and_std_per_prompt(ids, batch["total_reward"], torch.ones(2), False)[0]
    assert nemo_rl_loop.compared(batch) == (batch["total_reward"] - mean).tolist()
