"""TRL's trainer, a server, a node, an unmodified agent and the embedded engine: a whole loop, on a tiny model."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gangline.models.engine_server.app import create_app
from gangline.models.engine_server.app import serving as engine_serving
from gangline.server.run import serving
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.collecting.collector import PlainCollector
from gangline.train.collecting.groups import Group
from gangline.train.trainers.trl import Connection, ServiceRollouts
from gangline.train.weights.update import ServiceWeights
from gangline.wire.client.server import ServerClient
from support.node.node import running_node
from support.sdk.talking_agent import TEMPERATURE, tasks
from support.training.tiny_policy import tiny_policy, until_served
from support.training.trl_training import make_trainer, word_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of what TRL and its dependencies deprecate

NUM_STEPS = 3


class Recording:
    """A collector that keeps what it hands out."""

    def __init__(self, collector: PlainCollector, groups: list[Group]) -> None:
        self._collector, self._groups = collector, groups

    async def collect(self, num_groups: int) -> list[Group]:
        found = await self._collector.collect(num_groups)
        self._groups += found
        return found


def test_an_unmodified_agent_is_trained_by_trl(tmp_path: Path) -> None:
    num_words = tiny_policy(tmp_path / "model")
    groups = list[Group]()
    differences = list[float]()

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
                PlainCollector(client, tasks()) as collector,
            ):
                weights = ServiceWeights(client, tmp_path / "weights")
                yield Connection(Recording(collector, groups), weights, await until_served(weights) + 1)
        finally:
            await sampler.close()

    def compare(trainer: Any, model: Any, inputs: dict[str, Any], _loss: Any) -> None:
        """The engine samples by the weights in training: its log-probs are the trainer's."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        there = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        num_places = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            logprobs = trainer._get_per_token_logps_and_entropies(model, ids, there, num_places)[0]
        difference = (logprobs - inputs["sampling_per_token_logps"]).abs()
        differences.append(float(difference[(inputs["completion_mask"] * inputs["tool_mask"]) == 1].max()))

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    settings = {"num_generations": 4, "max_steps": NUM_STEPS, "temperature": TEMPERATURE, "learning_rate": 3e-3}
    with ServiceRollouts(connect) as rollouts:
        trainer = make_trainer(
            trained, rollouts, tmp_path, watch=compare, tokenizer=word_tokenizer(num_words), **settings
        )
        trainer.train()

    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert rewards == pytest.approx([sum(group.rewards) / 4 for group in groups], abs=1e-6)
    assert any(group.is_informative for group in groups)
    moved = max(float((value - before[name]).abs().max()) for name, value in trained.state_dict().items())
    assert moved > 1e-3
    versions = [
        {
            int(version)
            for one in group.sessions
            for trace in one.trajectory.traces
            for version in trace.response_versions
        }
        for group in groups
    ]
    assert versions == [{-1, number + 1} for number in range(NUM_STEPS)]  # -1: what was not sampled
    assert len(differences) == NUM_STEPS
    assert max(differences) < 1e-3
