"""Installs our collector in NeMo RL's loop, which imports its collector by name: that name is replaced.

`async_grpo_train` has no argument for a collector. It imports `AsyncTrajectoryCollector` from
`nemo_rl.algorithms.async_utils` in its body, calls `.options(runtime_env=...).remote(...)` on it, and then the actor's
methods. `collecting_with` replaces it by an object that creates our actor from the same arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.settings.machine import read_secret
from gangline.train.collecting.collector import Admit
from gangline.train.collecting.group_judge import GroupJudgeSettings
from gangline.train.collecting.groups import ValiditySettings
from gangline.train.trainers.nemo_rl.actor import NemoActor
from gangline.train.trainers.nemo_rl.collector import NemoCollector, NemoSettings
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient

_MODULE = "nemo_rl.algorithms.async_utils"
_NAME = "AsyncTrajectoryCollector"


@dataclass(frozen=True, kw_only=True)
class NemoService:
    """Our side of NeMo RL's loop, pickled to the actor."""

    server_url: str
    node_urls: Sequence[str]
    """All nodes, whose gates are closed during refits."""
    tasks_of: Callable[[Any], Iterable[Mapping[str, Any]]]
    """An item of NeMo RL's data loader -> tasks."""
    token_env: str | None = None
    """Name of the environment variable, on the actor's machine, with the control token of server and nodes."""
    num_in_flight: int = 32
    lease_s: float = 1800.0
    validity: ValiditySettings = field(default_factory=ValiditySettings)
    admit: Admit | None = None
    group_judge: GroupJudgeSettings | None = None

    def settings(self, master_config: Any, start_step: int) -> NemoSettings:
        """Settings derived from NeMo RL's configuration. Raises: InvalidRequest for options that would be ignored."""
        _require_fitting(master_config)
        return NemoSettings(
            num_samples=master_config.grpo.num_generations_per_prompt,
            groups_per_step=master_config.grpo.num_prompts_per_step,
            max_age=master_config.grpo.async_grpo.max_trajectory_age_steps,
            temperature=master_config.policy["generation"]["temperature"],
            start_version=start_step,
            num_in_flight=self.num_in_flight,
            lease_s=self.lease_s,
            validity=self.validity,
            group_judge=self.group_judge,
        )

    def collector(self, master_config: Any, replay_buffer: Any, start_step: int) -> NemoCollector:
        """Raises: as `settings`."""
        token = None if self.token_env is None else read_secret(self.token_env)
        return NemoCollector(
            ServerClient(self.server_url, token),
            [NodeClient(url, token) for url in self.node_urls],
            RayBuffer(replay_buffer),
            self.settings(master_config, start_step),
            self.tasks_of,
            admit=self.admit,
            batch_type=importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict,
        )


class RayBuffer:
    """NeMo RL's buffer, which is a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def add(self, trajectory: dict[str, Any], weight_version: int, target_weight_version: int) -> Awaitable[str]:
        return self._actor.add.remote(trajectory, weight_version, target_weight_version)

    def get_trajectories_needed(
        self, target_step: int, num_prompts_per_step: int, max_age_steps: int
    ) -> Awaitable[int]:
        return self._actor.get_trajectories_needed.remote(target_step, num_prompts_per_step, max_age_steps)


@contextmanager
def collecting_with(service: NemoService, *, actor_type: Callable[[type[Any]], Any] | None = None) -> Generator[None]:
    """Makes `async_grpo_train`, called inside the block, collect from our service.

    actor_type: makes a Ray actor of a class; `ray.remote` if None. The actor runs in the caller's environment, because
    the environment that NeMo RL makes for its own collector does not contain Gangline. Raises: ImportError without NeMo
    RL.
    """
    module = importlib.import_module(_MODULE)
    theirs = getattr(module, _NAME)
    setattr(module, _NAME, _Collectors(service, actor_type or importlib.import_module("ray").remote))
    try:
        yield
    finally:
        setattr(module, _NAME, theirs)


class _Collectors:
    """Created and called like the class that it replaces."""

    def __init__(self, service: NemoService, actor_type: Callable[[type[Any]], Any]) -> None:
        self._service = service
        self._actor_type = actor_type

    def options(self, **_of_their_environment: Any) -> _Collectors:
        return self

    def remote(self, *, master_config: Any, replay_buffer: Any, start_step: int, **others: Any) -> Any:
        """Raises: InvalidRequest for a configuration that would be ignored."""
        self._service.settings(master_config, start_step)  # here, where the user sees the error
        if others.get("teacher_worker_groups"):
            raise InvalidRequest("on-policy distillation wants the teachers' log-probs with each group: turn it off.")
        index = others.get("next_nemo_gym_task_index", 0)
        return self._actor_type(_CollectorOfService).remote(
            self._service, master_config, replay_buffer, start_step, index
        )


class _CollectorOfService(NemoActor):
    def __init__(
        self, service: NemoService, master_config: Any, replay_buffer: Any, start_step: int, next_task_index: int
    ) -> None:
        super().__init__(
            lambda: service.collector(master_config, replay_buffer, start_step), next_task_index=next_task_index
        )


def _require_fitting(master_config: Any) -> None:
    """Reject options that NeMo RL's collector supports and this one does not. Raises: InvalidRequest."""
    generation = master_config.policy["generation"]
    for name, neutral in (("top_p", (1, None)), ("top_k", (-1, None))):
        if (value := generation.get(name)) not in neutral:
            raise InvalidRequest(
                f"policy.generation.{name} is {value}: NeMo RL would train on the filtered distribution, and nodes "
                "sample from the whole one. Leave it out."
            )
    if getattr(master_config.grpo, "use_dynamic_sampling", False):
        raise InvalidRequest(
            "grpo.use_dynamic_sampling is not for asynchronous training: give NemoService(admit=informative)."
        )
