"""NeMo RL's replay buffer and the ends of its rollouts, as far as a collector meets them.

nemo-rl on PyPI (0.0.0) is an empty name. Described after github.com/NVIDIA-NeMo/RL at 7ea279a (2026-08-22):
`ReplayBufferImpl` in `nemo_rl/algorithms/async_utils/replay_buffer.py` (who may be sampled), and in `grpo.py` how masks
are made of log-probs, how prompts are told from the rest, and how rows are compared. `tests/trainers/test_nemo_rl.py`
compares it with NeMo RL itself.
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

    async def add(self, trajectory: dict[str, Any], weight_version: int, target_weight_version: int) -> str:
        if len(self.held) >= self.max_size:
            self.num_full += 1
            return "full"
        self.held.append((trajectory, weight_version, target_weight_version))
        self._pushed.set()
        return "success"

    async def get_trajectories_needed(
        self, target_step: int, num_prompts_per_step: int, max_age_steps: int | None = None
    ) -> int:
        """How many groups a step lacks; those that will be too old for it do not count."""
        oldest = None if max_age_steps is None else max(0, target_step - max_age_steps)
        there = [
            version
            for _, version, target in self.held
            if target == target_step and (oldest is None or oldest <= version <= target_step)
        ]
        return max(0, num_prompts_per_step - len(there))

    def sample(self, num_groups: int, current: int, max_age: int) -> list[dict[str, Any]] | None:
        """The groups for this step, when they are all there. Older ones than it may train on are removed."""
        self.held = [held for held in self.held if held[1] >= max(0, current - max_age)]
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


def masks(log: list[dict[str, Any]]) -> list[Tensor]:
    """What it trains on: assistant messages that have log-probs."""
    return [
        torch.full_like(message["token_ids"], int(message["role"] == "assistant" and "generation_logprobs" in message))
        for message in log
    ]


def prompt(log: list[dict[str, Any]], length: int) -> list[int]:
    """What it takes for the prompt: whole messages, until that many ids."""
    found = list[int]()
    for message in log:
        if len(found) >= length:
            break
        found += message["token_ids"].tolist()
    return found


def compared(batch: dict[str, Any]) -> list[float]:
    """Rewards less the mean of the rows with the same prompt."""
    lengths = batch["length"].tolist()
    prompts = [tuple(prompt(log, size)) for log, size in zip(batch["message_log"], lengths, strict=True)]
    rewards = defaultdict[tuple[int, ...], list[float]](list)
    for asked, reward in zip(prompts, batch["total_reward"].tolist(), strict=True):
        rewards[asked].append(reward)
    means = {asked: sum(mine) / len(mine) for asked, mine in rewards.items()}
    return [reward - means[asked] for asked, reward in zip(prompts, batch["total_reward"].tolist(), strict=True)]
