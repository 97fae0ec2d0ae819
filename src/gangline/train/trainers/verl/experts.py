"""Routed experts as verl's tensors hold them. Source: verl 0.9.1, `experimental/agent_loop/agent_loop.py`."""

from __future__ import annotations

import numpy as np
import torch

from gangline.domain.errors import InvalidRequest
from gangline.domain.experts import ExpertArray

__all__ = ["expert_tensor"]


def expert_tensor(experts: ExpertArray) -> torch.Tensor:
    """int16, as verl has them. Raises: InvalidRequest for a number that int16 does not hold."""
    if experts.size and int(experts.max()) > np.iinfo(np.int16).max:
        raise InvalidRequest(f"verl holds experts as int16, and there is expert {int(experts.max())}.")
    return torch.from_numpy(experts.astype(np.int16))
