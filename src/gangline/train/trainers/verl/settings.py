"""The settings under `actor_rollout_ref.rollout.custom.gangline`, and their requirements on verl's own
configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.train.collecting.group_judge import GroupJudgeSettings
from gangline.train.collecting.groups import ValiditySettings
from gangline.train.trainers.own_engine import EngineSettings, Sampling

KEY = "actor_rollout_ref.rollout.custom.gangline"
MANAGER = "gangline.train.trainers.verl.agent_loop.GanglineAgentLoopManager"


class GanglineSettings(EngineSettings):
    task_column: str = "gangline_task"
    """Column of the data set that contains a whole task as JSON text."""
    task_template: Path | None = None
    """File with one task, for rows without `task_column`. The row's last user message becomes its instruction."""
    validity: ValiditySettings = ValiditySettings(on_invalid="resubmit")
    """Treatment of a prompt with a session that cannot be trained on, after all its runs: with `refuse` and `resubmit`
    verl receives none of its rows; with `shrink` it receives the rows of the valid sessions.
    """
    group_judge: GroupJudgeSettings | None = None
    """A model that compares the sessions of a prompt."""


def read_settings(config: Any) -> GanglineSettings:
    """config: verl's whole configuration. Raises: InvalidRequest."""
    custom: Any = config.actor_rollout_ref.rollout.get("custom") or {}
    given: Any = custom.get("gangline")
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"verl's configuration has no {KEY}: set at least +{KEY}.url=http://HOST:PORT.")
    try:
        return GanglineSettings.model_validate(_plain(cast("Mapping[str, Any]", given)))
    except ValidationError as error:
        wrong = "; ".join(f"{KEY}.{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise InvalidRequest(f"verl's configuration does not fit: {wrong}.") from error


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _plain(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
        for key, value in given.items()
    }


def sampling_of(config: Any, kind: Literal["train", "val"]) -> Sampling:
    rollout = config.actor_rollout_ref.rollout
    chosen = rollout if kind == "train" else rollout.val_kwargs
    return Sampling(
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=max(int(chosen.top_k), 0),
        max_tokens=rollout.response_length,
    )


def require_supported(config: Any) -> None:
    """Refuse verl settings with which training on sessions would be wrong.

    Raises: InvalidRequest, with all of them.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    sampling = sampling_of(config, "train")
    wrong = {
        "trainer.use_v1 must be true: the older trainer takes no rows from sessions": not config.trainer.use_v1,
        "rollout.calculate_log_probs must be true: rows carry the engine's log-probs": not rollout.calculate_log_probs,
        "rollout.top_p must be 1 and rollout.top_k -1: verl's log-probs are those of the whole distribution": (
            sampling.top_p != 1 or sampling.top_k != 0
        ),
        "rollout.temperature must be above 0": sampling.temperature <= 0,
        "algorithm.adv_estimator remax needs greedy sessions to compare with, which are not collected": (
            config.algorithm.adv_estimator == "remax"
        ),
        "model.custom_chat_template is not known to the nodes: put the template into the tokenizer's folder": (
            model.get("custom_chat_template") is not None
        ),
        "rollout.enable_rollout_routing_replay must be false: nodes reach verl's engines by a route that reports no "
        "experts (`to_data_proto` takes them from sessions of other engines)": bool(
            rollout.get("enable_rollout_routing_replay", False)
        ),
    }
    if found := [why for why, is_wrong in wrong.items() if is_wrong]:
        raise InvalidRequest(f"verl's configuration does not fit sessions of Gangline: {'; '.join(found)}.")
