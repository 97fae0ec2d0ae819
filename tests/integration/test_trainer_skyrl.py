"""The generator for SkyRL: judged by the kit, and with a real server, node, agent and engine.

`tests/trainers/test_skyrl.py` asks SkyRL itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangline.domain.errors import InvalidGroup
from gangline.models.engine_server.app import create_app
from gangline.models.engine_server.app import serving as engine_serving
from gangline.server.run import serving
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.testing.trainer_conformance import Check, Subject, checks, run_check
from gangline.train.collecting.groups import Group
from gangline.train.trainers import skyrl as adapter
from gangline.train.trainers.skyrl import Connection, SkyRLGenerator, SkyRLPrompt, to_generator_output
from gangline.wire.client.server import ServerClient
from support.node.node import running_node
from support.sdk.talking_agent import TEMPERATURE, tasks
from support.training.samples import group
from support.training.skyrl_rows import TrajectoryID, read_rows
from support.training.tiny_policy import tiny_policy


def ids(num_groups: int, num_samples: int) -> list[TrajectoryID]:
    return [TrajectoryID(f"p{number}", sample) for number in range(num_groups) for sample in range(num_samples)]


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
@pytest.mark.parametrize("step_wise", [True, False], ids=["step-wise", "one row each"])
def test_the_adapter_keeps_the_contract(check: Check, step_wise: bool) -> None:
    def convert(groups: Sequence[Group], num_samples: int) -> dict[str, Any]:
        return to_generator_output(groups, ids(len(groups), num_samples), step_wise=step_wise)

    subject = Subject(
        convert=convert,
        read=read_rows,
        contract=adapter.CONTRACT,
        one_trace_per_session=not step_wise,
        one_reward_per_session=step_wise,
    )
    run_check(check, subject)


def test_rows_come_in_the_order_of_the_prompts_samples() -> None:
    mixed = [TrajectoryID("b", 0), TrajectoryID("a", 0), TrajectoryID("b", 1), TrajectoryID("a", 1)]
    output = to_generator_output([group(1.0, 0.5), group(0.25, 0.0)], mixed)
    assert output["trajectory_ids"] == mixed
    assert output["rewards"] == [1.0, 0.25, 0.5, 0.0]
    with pytest.raises(InvalidGroup, match="1 groups for 2 prompts"):
        to_generator_output([group(1.0, 0.5)], mixed)


async def test_sessions_of_a_service_are_skyrls_trajectories(tmp_path: Path) -> None:
    tiny_policy(tmp_path / "model")
    model = LanguageModel(load_model(tmp_path / "model"))
    sampler = EmbeddedSampler(model, TinyTokenizer(), model_name="tiny", max_batch=8, seed=0, threads=1)
    cfg = SimpleNamespace(
        generator=SimpleNamespace(step_wise_trajectories=True),
        trainer=SimpleNamespace(
            fully_async=SimpleNamespace(enabled=False), algorithm=SimpleNamespace(temperature=TEMPERATURE)
        ),
    )
    of_agent = next(tasks())

    def task_of(prompt: SkyRLPrompt) -> dict[str, Any]:
        return {**of_agent, "task_id": None, "instruction": prompt.prompt[0]["content"]}

    client = SimpleNamespace(weight_version=1)
    batch = {
        "prompts": [[{"role": "user", "content": "say something"}]] * 4,
        "env_classes": ["any"] * 4,
        "env_extras": None,
        "sampling_params": None,
        "trajectory_ids": ids(2, 2),
        "batch_metadata": SimpleNamespace(global_step=1, training_phase="train"),
    }
    try:
        async with (
            engine_serving(create_app(sampler)) as engine_url,
            serving(data_dir=tmp_path / "server", control_token=None) as server,
            running_node(tmp_path, engine_url, server_url=server.url, control_token=None) as node,
        ):

            @asynccontextmanager
            async def connect() -> AsyncGenerator[Connection]:
                async with ServerClient(server.url) as service:
                    yield Connection(service, [node.client])

            generator = SkyRLGenerator(connect, task_of, cfg, client, first_version=5)
            outputs, versions = list[dict[str, Any]](), list[int | None]()
            for client.weight_version in (1, 2):
                outputs.append(await generator.generate(batch))
                versions.append((await node.client.gate()).version)
    finally:
        await sampler.close()
    assert versions == [5, 6]
    for output in outputs:
        assert [one.to_string() for one in output["trajectory_ids"]] == ["p0_0", "p0_1", "p1_0", "p1_1"]
        assert output["is_last_step"] == [True] * 4
        assert len(read_rows(output)) == 4
    sessions = [one["session_id"] for output in outputs for one in output["env_metrics"]]
    assert len(set(sessions)) == 8
