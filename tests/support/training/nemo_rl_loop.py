"""NeMo RL's replay buffer and the ends of its rollouts, as far as a collector meets them.

nemo-rl on PyPI (0.0.0) is an empty name. Described after github.com/NVIDIA-NeMo/RL at 0a27b1f: `ReplayBuffer` in
`nemo_rl/algorithms/async_utils.py` (who may be sampled, and when it raises), and in `grpo.py` how masks are made of
roles, how prompts are told from the rest, and how rows are compared.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class ReplayBuffer:
    """Groups with the version that sampled them, and the step that they are for."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.held: list[tuple[dict[str, Any], int, int]] = []
        self.num_full = 0
        self._pushed = asyncio.Event()

    async def push_with_wait_signal(self, group: dict[str, Any], version: int, target: int) -> str:
        if len(self.held) >= self.max_size:
            self.num_full += 1
            return "full"
        self.held.append((group, version, target))
        self._pushed.set()
        return "success"

    def sample(self, num_groups: int, current: int, max_age: int) -> list[dict[str, Any]] | None:
        """The groups for this step, when they are all there. Raises: ValueError when one is too old for it."""
        old = [version for _, version, _ in self.held if version < max(0, current - max_age)]
        if old:
            raise ValueError(f"{len(old)} groups are older than {current - max_age}")
        ready = [held for held in self.held if held[2] == current and held[1] <= current]
        if len(ready) < num_groups:
            return None
        taken = ready[:num_groups]
        self.held = [held for held in self.held if not any(held is one for one in taken)]
        return [group for group, _, _ in taken]

    async def step(self, num_groups: int, current: int, max_age: int) -> list[dict[str, Any]]:
        """As `sample`, as soon as they are there."""
        while (found := self.sample(num_groups, current, max_age)) is None:
            await self._next_push()
        return found

    async def until_held(self, number: int) -> None:
        while len(self.held) < number:
            await self._next_push()

    async def _next_push(self) -> None:
        self._pushed.clear()
        await self._pushed.wait()


def masks_by_roles(log: list[dict[str, Any]]) -> list[Tensor]:
    """What older versions train on: assistant messages, whatever mask they come with."""
    return [torch.full_like(message["token_ids"], int(message["role"] == "assistant")) for message in log]


def masks_by_logprobs(log: list[dict[str, Any]]) -> list[Tensor]:
    """What newer versions train on: assistant messages that have log-probs."""
    return [
        torch.full_like(message["token_ids"], int(message["role"] == "assistant" and "generation_logprobs" in message))
        for message in log
    ]


def prompt_by_roles(log: list[dict[str, Any]]) -> list[int]:
    """What older versions take for the prompt."""
    return [one for message in log if message["role"] in ("user", "system") for one in message["token_ids"].tolist()]


def prompt_by_length(log: list[dict[str, Any]], length: int) -> list[int]:
    """What newer versions take for the prompt: whole messages, until that many ids."""
    found = list[int]()
    for message in log:
        if len(found) >= length:
            break
        found += message["token_ids"].tolist()
    return found


def compared(batch: dict[str, Any]) -> list[float]:
    """Rewards less the mean of the rows with the same prompt."""
    prompts = [tuple(prompt_by_roles(log)) for log in batch["message_log"]]
    rewards = defaultdict[tuple[int, ...], list[float]](list)
    for prompt, reward in zip(prompts, batch["total_reward"].tolist(), strict=True):
        rewards[prompt].append(reward)
    means = {prompt: sum(mine) / len(mine) for prompt, mine in rewards.items()}
    return [reward - means[prompt] for prompt, reward in zip(prompts, batch["total_reward"].tolist(), strict=True)]
