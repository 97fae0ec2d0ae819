"""The optimiser of the policy and of the critic's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gangline.train.learning.credit.critic.head import ValueHead
from gangline.train.learning.credit.critic.settings import CriticSettings
from gangline.train.learning.learner_settings import LearnerSettings


def optimiser_of(
    trained: Sequence[torch.nn.Parameter],
    head: ValueHead | None,
    critic: CriticSettings | None,
    settings: LearnerSettings,
) -> torch.optim.Optimizer:
    """The optimiser, in a variant whose step does not copy all weights at once."""
    groups: list[dict[str, Any]] = [{"params": list(trained)}]
    if head is not None and critic is not None:
        groups.append({"params": list(head.parameters()), "lr": critic.learning_rate, "weight_decay": 0.0})
    match settings.optimiser:
        case "adamw":
            return torch.optim.AdamW(
                groups,
                lr=settings.learning_rate,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                fused=all(one.is_cuda for one in trained) or None,
            )
        case "adafactor":
            return torch.optim.Adafactor(
                groups, lr=settings.learning_rate, weight_decay=settings.weight_decay, foreach=False
            )
