"""TRL's asynchronous trainer, a server, a node, an unmodified agent and the embedded engine, on a tiny model."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gangline.domain.errors import InvalidRequest
from gangline.models.engine_server.app import create_app
from gangline.models.engine_server.app import serving as engine_serving
from gangline.server.run import serving
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.collecting.collector import ReplenishingCollector
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import algorithm
from gangline.train.trainers.trl import Connection
from gangline.train.trainers.trl_async.worker import AsyncServiceRollouts
from gangline.train.weights.update import ServiceWeights
from gangline.wire.client.server import ServerClient
from support.node.node import running_node
from support.sdk.talking_agent import TEMPERATURE, tasks
from support.training.samples import session, trace
from support.training.tiny_policy import tiny_policy, until_served
from support.training.trl_async import async_config, make_async_trainer, on_a_cpu
from support.training.trl_training import word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of what TRL and its dependencies deprecate

NUM_STEPS = 2
GRPO = algorithm("grpo")


def test_an_unmodified_agent_is_trained_by_trl_while_the_service_collects(tmp_path: Path) -> None:
    num_words = tiny_policy(tmp_path / "model")
    versions = list[int | None]()

    @asynccontextmanager
    async def connect() -> AsyncGenerator[Connection]:
        model = LanguageModel(load_model(tmp_path / "model"))
        sampler = EmbeddedSampler(model, TinyTokenizer(), model_name="tiny", max_batch=8, seed=0, threads=1)
        try:
            async with (
                engine_serving(create_app(sampler)) as engine_url,
                serving(data_dir=tmp_path / "server", control_token=None) as server,
                running_node(tmp_path, engine_url, server_url=server.url, control_token=None),
                ServerClient(server.url) as client,
            ):
                weights = ServiceWeights(client, tmp_path / "weights")
                first = await until_served(weights) + 1
                async with ReplenishingCollector(client, tasks(), num_in_flight=2) as collector:
                    yield Connection(collector, weights, first)
                versions.append(await weights.latest_version())
        finally:
            await sampler.close()

    args = async_config(tmp_path, num_generations=4, max_steps=NUM_STEPS, temperature=TEMPERATURE, learning_rate=3e-3)
    rollouts = AsyncServiceRollouts(connect, args, GRPO)
    with on_a_cpu():
        trainer = make_async_trainer(tmp_path / "model", args, rollouts, word_tokenizer(num_words))
        ratios = list[tuple[int, float]]()
        compute = trainer.compute_loss

        def watched(model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
            loss = compute(model, inputs, *arguments, **named)
            ratios.append((trainer.model_version, trainer._metrics["train"]["ratio"][-1]))
            return loss

        trainer.compute_loss = watched
        trainer.train()

    assert versions == [NUM_STEPS + 1]  # the first weights, and those of each step
    assert trainer.state.global_step == NUM_STEPS
    assert ratios[0] == (1, pytest.approx(1.0, abs=1e-3))  # the engine samples by the weights in training
    served = load_file(next((tmp_path / "weights").glob(f"v{NUM_STEPS + 1}/*.safetensors")))
    trained = dict(trainer.model.named_parameters())
    assert all(torch.equal(value, trained[name].detach()) for name, value in served.items())
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert max(float((value - before[name]).abs().max()) for name, value in served.items()) > 1e-3


class Given:
    def __init__(self, *groups: Group) -> None:
        self._groups = list(groups)

    async def collect(self, num_groups: int) -> list[Group]:
        assert num_groups == 1
        return [self._groups.pop(0)]


class NoEngines:
    """Keeps the names that it was pushed."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, set[str]]] = []
        self.root = Path()

    async def push(self, save: Any, version: int) -> Any:
        folder = self.root / f"v{version}"
        folder.mkdir()
        save(folder)
        files = [load_file(path) for path in folder.glob("*.safetensors")]
        self.pushed.append((version, {name for one in files for name in one}))


def worker(tmp_path: Path, *groups: Group, **settings: Any) -> tuple[AsyncServiceRollouts, NoEngines]:
    engines = NoEngines()
    engines.root = tmp_path

    @asynccontextmanager
    async def connect() -> AsyncGenerator[Connection]:
        yield Connection(Given(*groups), engines, 5)

    return AsyncServiceRollouts(connect, async_config(tmp_path, **settings), GRPO, staging_dir=tmp_path), engines


def test_weights_are_pushed_under_versions_that_follow_trls(tmp_path: Path) -> None:
    rollouts, engines = worker(tmp_path)
    rollouts.init_weight_transfer()
    for number in (1, 2):
        rollouts.pause()
        rollouts.send_weights(iter([("a", torch.ones(2)), ("b", torch.ones(3))]))
        rollouts.resume()
        rollouts.update_model_version(number)
    rollouts.stop()
    rollouts.destroy()
    rollouts.destroy()
    assert engines.pushed == [(5, {"a", "b"}), (6, {"a", "b"})]


def asked_until_it_fails(rollouts: AsyncServiceRollouts) -> None:
    while True:
        rollouts.check_health(1.0)
        time.sleep(0.01)


def test_stale_rows_are_left_to_trl_and_unknown_versions_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straggler, later = (session(name, float(at), trace(versions=[4 + at])) for at, name in enumerate(("s0", "s1")))
    unknown = session("s1", 0.0, trace(versions=[-1]))
    groups = [Group("known", (straggler, later)), Group("unknown", (straggler, unknown))]
    rollouts, _ = worker(tmp_path, *groups, max_staleness=0)  # then nothing
    rollouts.init_weight_transfer()
    rollouts.start()
    with pytest.raises(IndexError):
        asked_until_it_fails(rollouts)
    assert [rollouts.rollout_buffer.get_nowait().model_version for _ in range(2)] == [0, 1]
    assert rollouts.rollout_buffer.empty()
    assert "trl.group_left_out task_id=unknown reason=unknown_version" in caplog.text
    rollouts.destroy()


def test_what_ends_collecting_is_raised_to_the_trainer(tmp_path: Path) -> None:
    rollouts, _ = worker(tmp_path)  # nothing comes
    rollouts.init_weight_transfer()
    rollouts.start()
    with pytest.raises(IndexError, match="pop from empty list"):
        asked_until_it_fails(rollouts)
    assert rollouts.rollout_buffer.empty()
    rollouts.stop()
    rollouts.destroy()


def test_a_budget_that_trl_would_ask_a_vllm_server_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="token_budget is not set"):
        worker(tmp_path, token_budget=None)
