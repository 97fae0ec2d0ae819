"""prime-rl's trainer on a CPU, a server, a node, an unmodified agent and an engine: a whole loop, on a tiny model.

Needs GANGLINE_PRIME_RL, as `test_prime_rl.py`. Last run with prime-rl at 559b447 on 2026-11-23.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from gangline.models.engine_server.app import create_app
from gangline.models.engine_server.app import serving as engine_serving
from gangline.server.run import serving
from gangline.serving.embedded.model import LanguageModel, load_model
from gangline.serving.embedded.sampler import EmbeddedSampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.train.collecting.collector import ReplenishingCollector
from gangline.train.learning.algorithms import algorithm
from gangline.train.trainers.prime_rl.feed import feed
from gangline.train.trainers.prime_rl.samples import PrimeSettings
from gangline.train.weights.update import ServiceWeights
from gangline.wire.client.server import ServerClient
from support.node.node import running_node
from support.sdk.talking_agent import TEMPERATURE, tasks
from support.training.prime_rl_trainer import PrimeTrainer, prime_rl_checkout, train_in_background
from support.training.tiny_policy import tiny_policy, until_served

CHECKOUT = os.environ.get("GANGLINE_PRIME_RL")
pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="GANGLINE_PRIME_RL names no checkout of prime-rl"),
    pytest.mark.filterwarnings("ignore"),
]
NUM_STEPS = 3
SEQ_LEN = 512


@pytest.fixture(scope="module", autouse=True)
def prime_rl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("dist") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        with prime_rl_checkout(str(CHECKOUT)):
            yield
    finally:
        dist.destroy_process_group()


async def test_an_unmodified_agent_is_trained_by_prime_rl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gangline")
    tiny_policy(tmp_path / "model", tie_word_embeddings=False)  # its broadcasts are of FSDP's tensors, never shared
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    output_dir = tmp_path / "run"
    trainer = PrimeTrainer(
        trained,
        output_dir=output_dir,
        max_steps=NUM_STEPS,
        model={"name": str(tmp_path / "model"), "seq_len": SEQ_LEN},
        optim={"lr": 3e-3},
        rollout_transport={"type": "filesystem"},
    )
    differences = list[float]()

    def compare(batch: dict[str, Any], logprobs: torch.Tensor) -> None:
        """The engine samples by the weights in training: its log-probs are the trainer's."""
        gap = (logprobs - batch["inference_logprobs"]).abs()[batch["loss_mask"]]
        differences.append(float(gap.max()))

    settings = PrimeSettings(
        num_samples=4, groups_per_step=1, seq_len=SEQ_LEN, max_steps=NUM_STEPS, temperature=TEMPERATURE
    )
    model = LanguageModel(load_model(tmp_path / "model"))
    sampler = EmbeddedSampler(model, TinyTokenizer(), model_name="tiny", max_batch=8, seed=0, threads=1)
    try:
        async with (
            engine_serving(create_app(sampler)) as engine_url,
            serving(data_dir=tmp_path / "server", control_token=None) as server,
            running_node(tmp_path, engine_url, server_url=server.url, control_token=None),
            ServerClient(server.url) as client,
            ReplenishingCollector(client, tasks(), num_in_flight=1) as collector,
        ):
            weights = ServiceWeights(client, tmp_path / "weights")
            assert await until_served(weights) == 0
            async with asyncio.timeout(120), asyncio.TaskGroup() as running:
                running.create_task(feed(output_dir, collector, weights, settings, algorithm("grpo")))
                while "prime_rl.ready" not in caplog.text:  # a trainer that starts before has left a step
                    await asyncio.sleep(0.01)
                await train_in_background(trainer, compare)
            assert await weights.latest_version() == NUM_STEPS + 1
    finally:
        await sampler.close()
    assert len(differences) >= NUM_STEPS
    assert max(differences) < 1e-3
    moved = max(float((value - before[name]).abs().max()) for name, value in trained.state_dict().items())
    assert moved > 1e-3
    assert [path.name for path in sorted((output_dir / "broadcasts").iterdir())] == ["step_2", "step_3"]
