"""Our rows in SkyRL itself: its checks, its post-processing, its batches and its advantages.

`make test-trainers` takes its wheel from PyPI, and a checkout where GANGLINE_SKYRL names one.

    git clone https://github.com/NovaSky-AI/SkyRL && GANGLINE_SKYRL=SkyRL make test-trainers

Last run with SkyRL at a956457 and its wheel 0.4.0 on 2026-11-23.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.session import SessionResult
from gangline.domain.views import Submitted
from gangline.testing.trainer_conformance import Check, Subject, checks, run_check
from gangline.train.collecting.groups import Group, ValiditySettings
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.samples import make_samples
from gangline.train.trainers import skyrl as adapter
from gangline.train.trainers.skyrl import Connection, SkyRLGenerator, SkyRLPrompt, to_generator_output
from support.training.fakes import gate_state
from support.training.samples import group, session, trace
from support.training.service import FakeService
from support.training.skyrl_checkout import of_skyrl, skyrl_checkout, skyrl_config, skyrl_trainer
from support.training.skyrl_rows import read_rows

WHEEL = Path(__file__).parents[2] / ".venv/skyrl"
GUIDE = Path(__file__).parents[2] / "docs/guides/trainers.md"
SOURCES = {"checkout": os.environ.get("GANGLINE_SKYRL"), "wheel": str(WHEEL) if WHEEL.exists() else None}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True, params=SOURCES)
def skyrl(request: pytest.FixtureRequest) -> Iterator[None]:
    source = SOURCES[request.param]
    if source is None:
        pytest.skip("GANGLINE_SKYRL names no checkout of SkyRL" if request.param == "checkout" else f"no {WHEEL}")
    with skyrl_checkout(source):
        yield


def several() -> list[Group]:
    """Four sessions, one of them with three traces, rows of unequal length."""
    long = session("s0", 1.0, trace(turns=[(10, 11, 2), (12, 2)]), trace(turns=[(12, 2)]), trace(turns=[(13, 2)]))
    other = Group("task-2", (session("s2", 0.25), session("s3", 0.5, trace(turns=[(20, 21, 22, 23, 2)]))))
    return [Group("task-1", (long, session("s1", 0.0, trace(turns=[(14, 15, 2)])))), other]


def trajectory_ids(num_groups: int, num_samples: int) -> list[Any]:
    """As SkyRL's `prepare_generator_input` makes them."""
    make = of_skyrl("train.generators.base").TrajectoryID
    return [make(f"p{number}", repetition) for number in range(num_groups) for repetition in range(num_samples)]


# The contract.


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
@pytest.mark.parametrize("step_wise", [True, False], ids=["step-wise", "one row each"])
def test_the_adapter_keeps_the_contract(check: Check, step_wise: bool) -> None:
    def convert(groups: Sequence[Group], num_samples: int) -> dict[str, Any]:
        ids = trajectory_ids(len(groups), num_samples)
        output = to_generator_output(groups, ids, step_wise=step_wise)
        validate = of_skyrl("train.utils.trainer_utils").validate_generator_output
        validate(len(ids), output, step_wise=step_wise)
        return output

    subject = Subject(
        convert=convert,
        read=read_rows,
        contract=adapter.CONTRACT,
        one_trace_per_session=not step_wise,
        one_reward_per_session=step_wise,
    )
    run_check(check, subject)


def test_every_column_is_one_of_skyrls() -> None:
    columns = of_skyrl("train.generators.base").GeneratorOutput.__annotations__
    output = to_generator_output(several(), trajectory_ids(2, 2), step_wise=True)
    assert output.keys() <= columns.keys()
    assert {name for name, value in output.items() if value is None} == {
        "trajectory_generation_times",
        "trajectory_time_splits",
        "rollout_expert_indices",
        "pixel_values",
        "image_grid_thw",
    }


# Through SkyRL's trainer.


class Gate:
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def pause(self, mode: str = "drain", lease_s: float = 600.0) -> Any:
        self.seen.append(mode)
        return gate_state(is_drained=True)

    async def resume(self) -> Any:
        self.seen.append("resume")
        return gate_state()

    async def set_version(self, version: int) -> Any:
        self.seen.append(f"version {version}")
        return gate_state()


class Service(FakeService):
    """Answers each task with the group that its prompt names."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        super().__init__()
        self._groups = groups
        self._prompts: dict[str, str] = {}
        self.on_result = lambda: None

    async def submit(self, task: Any) -> Submitted:
        self._prompts[task["task_id"]] = task["instruction"]
        self.rewards[task["task_id"]] = ()
        assert task["num_samples"] == 2
        return await super().submit(task)

    async def result(self, task_id: str) -> list[SessionResult]:
        self.on_result()
        return list(self._groups[self._prompts[task_id]].sessions)


@dataclass
class Made:
    generator: SkyRLGenerator
    service: Service
    gate: Gate
    client: Any


def task_of(prompt: SkyRLPrompt) -> dict[str, Any]:
    assert prompt.env_class == "any"
    return {"instruction": prompt.prompt[0]["content"], "metadata": dict(prompt.env_extras)}


def made(groups: Sequence[Group], cfg: Any, **options: Any) -> Made:
    service, gate = Service({one.task_id: one for one in groups}), Gate()
    client = SimpleNamespace(weight_version=3)

    @asynccontextmanager
    async def connect() -> AsyncGenerator[Connection]:
        yield Connection(service, [gate])

    return Made(SkyRLGenerator(connect, task_of, cfg, client, **options), service, gate, client)


def asked(groups: Sequence[Group], num_samples: int = 2, phase: str = "train") -> tuple[dict[str, Any], list[str]]:
    """A `GeneratorInput`, and SkyRL's uids."""
    prompts = [
        {
            "prompt": [{"role": "user", "content": one.task_id}],
            "env_class": None,
            "env_extras": {"place": place},
            "uid": f"p{place}",
        }
        for place, one in enumerate(groups)
    ]
    prepare = of_skyrl("train.generators.utils").prepare_generator_input
    return prepare(prompts, num_samples, {"temperature": 1.0}, "any", phase, 7)


async def trained(groups: Sequence[Group], cfg: Any, **options: Any) -> tuple[Any, list[str]]:
    """SkyRL's batch with advantages, as far as its loop goes without workers, and the uid of each row."""
    batch, uids = asked(groups, cfg.generator.n_samples_per_prompt)
    trainer = skyrl_trainer(cfg, made(groups, cfg, **options).generator)
    output = await trainer.generate(batch)
    if cfg.generator.step_wise_trajectories:
        uids = [one.instance_id for one in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    data = trainer.convert_to_training_input(output, uids)
    data["values"] = None
    return trainer.compute_advantages_and_returns(data), uids


def rows_of(data: Any, name: str, num_rows: int) -> list[list[float]]:
    """Without padding: responses are on the right."""
    lengths = data["response_mask"].sum(dim=1).int().tolist()[:num_rows]
    return [data[name][number][-length:].tolist() for number, length in enumerate(lengths)]


async def test_skyrls_advantages_of_several_traces_are_ours() -> None:
    data, uids = await trained(several(), skyrl_config())
    settings = algorithm("grpo", {"advantage.deviation": "sample", "advantage.epsilon": 1e-6})
    ours = [sample for one in several() for sample in make_samples(one, settings)]
    assert uids == ["p0"] * 4 + ["p1"] * 2
    assert len(data["advantages"]) == 8  # filled up for four ranks
    found = rows_of(data, "advantages", 6)
    assert [row[0] for row in found] == pytest.approx([float(one.advantages[0]) for one in ours], abs=1e-5)
    assert rows_of(data, "loss_mask", 6) == [one.weights.tolist() for one in ours]
    assert rows_of(data, "rollout_logprobs", 6) == [one.behaviour_logprobs.tolist() for one in ours]
    for number, one in enumerate(ours):
        ids = data["sequences"][number][data["attention_mask"][number].bool()].tolist()
        assert ids == [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
    assert not data["loss_mask"][6:].any()


async def test_rows_that_continue_each_other_are_joined_as_skyrl_does_and_stay_whole() -> None:
    first = trace(turns=[(10, 11, 2)])
    second = trace(prompt_ids=np.array([1, 4, 5, 10, 11, 2, 7, 1], np.int32), turns=[(12, 2)])
    groups = [Group("task-1", (session("s0", 1.0, first, second), session("s1", 0.0))), group_named("task-2")]
    cfg = skyrl_config()
    cfg.generator.merge_stepwise_output = True
    data, uids = await trained(groups, cfg)
    assert uids == ["p0", "p0", "p1", "p1"]
    assert rows_of(data, "loss_mask", 1) == [[1, 1, 1, 0, 0, 1, 1]]
    assert rows_of(data, "rollout_logprobs", 1) == [[-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5]]


def group_named(task_id: str) -> Group:
    return Group(task_id, group(1.0, 0.0).sessions)


async def test_one_row_each_needs_no_steps_and_comes_in_the_prompts_order() -> None:
    groups = [
        Group(
            name,
            tuple(session(f"{name}{n}", float(n == place), trace(turns=[(20 + 2 * place + n, 2)])) for n in (0, 1)),
        )
        for place, name in enumerate(("b", "a"))
    ]
    data, uids = await trained(groups, skyrl_config(step_wise=False))
    assert uids == ["p0", "p0", "p1", "p1"]
    assert [int(data["sequences"][row][-2]) for row in range(4)] == [20, 21, 22, 23]
    assert data["rewards"][:4].sum(dim=1).tolist() == [1.0, 0.0, 0.0, 1.0]
    assert torch.sign(data["advantages"][:4, -1]).tolist() == [1.0, -1.0, -1.0, 1.0]


async def test_a_prompt_becomes_one_task_with_its_columns() -> None:
    cfg = skyrl_config()
    here = made(several(), cfg)
    batch, _ = asked(several())
    await here.generator.generate(batch)
    assert len(here.service.submitted) == 2
    assert len(set(here.service.submitted)) == 2
    await here.generator.generate(batch)
    assert len(set(here.service.submitted)) == 4  # a prompt that comes again is asked again


async def test_nodes_are_told_the_version_of_skyrls_weights_before_sessions_begin() -> None:
    here = made(several(), skyrl_config(), first_version=10)
    await here.generator.generate(asked(several())[0])
    assert here.gate.seen == ["drain", "version 12", "resume"]


async def test_weights_that_change_while_sessions_run_are_refused() -> None:
    here = made(several(), skyrl_config())

    def sync() -> None:
        here.client.weight_version = 4

    here.service.on_result = sync
    with pytest.raises(InvalidRequest, match="version 4 while sessions of version 3 ran"):
        await here.generator.generate(asked(several())[0])


async def test_batches_to_evaluate_on_are_refused() -> None:
    here = made(several(), skyrl_config())
    with pytest.raises(InvalidRequest, match=r"trainer\.eval_interval=-1"):
        await here.generator.generate(asked(several(), phase="eval")[0])
    batch, _ = asked(several())
    with pytest.raises(InvalidRequest, match="no trajectory_ids"):
        await here.generator.generate({**batch, "trajectory_ids": None})


def test_settings_that_cannot_be_kept_right_are_refused() -> None:
    cfg = skyrl_config()
    with pytest.raises(InvalidRequest, match="on_invalid to refuse or resubmit"):
        made([], cfg, validity=ValiditySettings(on_invalid="shrink", min_valid=2))
    cfg.trainer.fully_async.enabled = True
    with pytest.raises(InvalidRequest, match=r"trainer\.fully_async\.enabled=false"):
        made([], cfg)


def test_the_reason_of_a_refusal_says_what_to_do() -> None:
    with pytest.raises(InvalidGroup, match=r"step_wise_trajectories=true"):
        to_generator_output(several(), trajectory_ids(2, 2))
    own = session("s0", 1.0, trace(reward=0.25), trace(turns=[(12, 2)], reward=0.75))
    groups = [Group("task-1", (own, session("s1", 0.0)))]
    with pytest.raises(InvalidGroup, match="set trace_rewards to session"):
        to_generator_output(groups, trajectory_ids(1, 2), step_wise=True)
    output = to_generator_output(groups, trajectory_ids(1, 2), step_wise=True, trace_rewards="session")
    assert output["rewards"] == [1.0, 1.0, 0.0]


def test_the_guides_configuration_is_read_by_skyrls_own_loader() -> None:
    [block] = re.findall(r"python my_skyrl\.py (.*?)```", GUIDE.read_text(), re.DOTALL)
    cfg = of_skyrl("train.config").SkyRLTrainConfig.from_cli_overrides(shlex.split(block.replace("\\\n", " ")))
    assert cfg.generator.step_wise_trajectories
    assert (cfg.trainer.train_batch_size, cfg.generator.n_samples_per_prompt) == (32, 8)
    assert cfg.trainer.algorithm.temperature == 1.0
    made([], cfg)
