"""A whole service for slime or miles: server, node, router and engines, and tasks whose agent makes model calls."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gangline.server.run import serving
from gangline.train.trainers.slime import SupplySettings
from gangline.wire.client.server import ServerClient
from support.engines.sglang_engine import sglang_server
from support.engines.trained_sglang import SglangRouter, TrainedSglang
from support.node.node import TOKEN, RunningNode, running_node

__all__ = ["SUPPLY", "EngineService", "Prompts", "slime_arguments", "task_of"]

AGENT = """
import json, os, sys, urllib.request

messages = []
for turn in range(int(sys.argv[1])):
    messages.append({"role": "user", "content": f"Say it {turn} times."})
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        messages.append({"role": "assistant", "content": json.load(reply)["choices"][0]["message"]["content"]})
"""

SUPPLY = SupplySettings(poll_s=0.05, lease_s=30.0)


def slime_arguments(**changes: Any) -> SimpleNamespace:
    """slime's options, as its parser leaves them; the defaults of 624b824 alongside small sizes."""
    return SimpleNamespace(
        **{
            "reward_key": None,
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": True,
            "rollout_batch_size": 2,
            "over_sampling_batch_size": 2,
            "n_samples_per_prompt": 2,
            "global_batch_size": 4,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "partial_rollout": False,
            "mask_offpolicy_in_partial_rollout": False,
            "use_tis": False,
            "use_rollout_logprobs": False,
            "loss_type": "policy_loss",
            "colocate": False,
            **changes,
        }
    )


@dataclass
class Prompts:
    """slime's data source, of samples of this type."""

    sample_type: Any
    num_taken: int = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        first = self.num_taken
        self.num_taken += num_samples
        return [[self.sample_type(index=number)] * 2 for number in range(first, first + num_samples)]


def task_of(sample: Any, *, turns: int = 2) -> dict[str, Any]:
    """turns: model calls of each session."""
    return {
        "task_id": f"prompt{sample.index}",
        "instruction": "talk",
        "timeout_seconds": 60,
        "runtime": {
            "backend": "process",
            "prepare": [{"type": "write", "path": "agent.py", "content": AGENT}],
        },
        "agent": {"harness": "shell", "settings": {"command": [sys.executable, "agent.py", str(turns)]}},
        "evaluator": {"strategy": "session_completed"},
    }


@dataclass
class EngineService:
    """engines: by URL; the router lists them."""

    client: ServerClient
    node: RunningNode
    router: SglangRouter
    address: dict[str, Any]
    engines: dict[str, TrainedSglang]

    @classmethod
    @asynccontextmanager
    async def running(
        cls, folder: Path, *engines: TrainedSglang, router: dict[str, Any] | None = None, **node: Any
    ) -> AsyncGenerator[EngineService]:
        """router: address of another one, which runs already and lists the engines."""
        async with AsyncExitStack() as stack:
            urls = {await stack.enter_async_context(sglang_server(engine)): engine for engine in engines}
            listing = SglangRouter(list(urls))
            address = router or await stack.enter_async_context(listing.serving())
            server = await stack.enter_async_context(serving(data_dir=folder / "server", control_token=TOKEN))
            one = await stack.enter_async_context(running_node(folder / "node", server_url=server.url, **node))
            client = await stack.enter_async_context(ServerClient(server.url, TOKEN))
            while not (await client.status()).nodes:  # its first lease call tells the server of it
                pass
            yield cls(client, one, listing, address, urls)

    @property
    def disturbed(self) -> list[str]:
        return [what for engine in self.engines.values() for what in engine.disturbed]
