"""Settings of verl under which sessions would be trained on wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.train.trainers.verl.settings import require_supported


class _Config(dict[str, Any]):
    """As far as it is read, what verl's configuration is: fields as attributes, and `get`."""

    __getattr__ = dict.__getitem__


def _config(**rollout: Any) -> _Config:
    usual = {"calculate_log_probs": True, "top_p": 1.0, "top_k": -1, "temperature": 1.0, "response_length": 8}
    return _Config(
        actor_rollout_ref=_Config(rollout=_Config(usual | rollout), model=_Config()),
        trainer=_Config(use_v1=True),
        algorithm=_Config(adv_estimator="grpo"),
    )


def test_routing_replay_is_refused_where_nodes_reach_verls_own_engines() -> None:
    require_supported(_config())
    with pytest.raises(InvalidRequest, match=r"enable_rollout_routing_replay must be false: .* reports no experts"):
        require_supported(_config(enable_rollout_routing_replay=True))
