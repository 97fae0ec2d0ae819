"""The class for `actor_rollout_ref.rollout.agent.agent_loop_manager_class` of verl's v1 trainer.

verl creates it in its task runner and only calls it to start prompts. Their rows go through verl's transfer queue.
Sessions run on the nodes of a Gangline service, whose model calls go back to verl's engines.

Invariants: `generate_sequences` returns before any session has ended. verl's engines are called only through verl's own
client, so its modes pause, abort and resume calls as they do with its own agent loops.

Source: verl 0.9.1, `trainer/main_ppo.py` (`TaskRunnerV1`), `trainer/ppo/v1/agent_loop_tq.py` (`AgentLoopManagerTQ`).
"""

from __future__ import annotations

import logging
from typing import Any, Self

import ray
from tensordict import TensorDict

from gangline.train.trainers.verl.settings import read_settings, require_supported
from gangline.train.trainers.verl.worker import SessionWorker

_log = logging.getLogger("gangline.train.trainers.verl")
_AT_ONCE = 100_000
"""Concurrent calls of the worker's actor; each only starts something or waits for the start."""


class GanglineAgentLoopManager:
    """Implements verl's agent loop manager over one `SessionWorker`."""

    def __init__(self, worker: Any) -> None:
        """worker: handle of the actor."""
        self._worker = worker

    @classmethod
    def create(
        cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> Self:
        """Returns once a node samples from verl's engines.

        teacher_client: verl's teachers, of its distillation. reward_loop_worker_handles: unused, because sessions are
        graded by their task's evaluator. Raises:
        InvalidRequest if verl's configuration is not supported, before anything is started; errors of the start.
        """
        require_supported(config)
        settings = read_settings(config)
        actor: Any = ray.remote(SessionWorker)
        worker = actor.options(max_concurrency=_AT_ONCE, num_cpus=0).remote(config, llm_client, teacher_client)
        url = ray.get(worker.start.remote())
        _log.info("verl.engines_served url=%s server=%s", url, settings.url)
        return cls(worker)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Start the prompts. Raises: InvalidRequest, InvalidGroup; Ray's errors if the worker has died."""
        ray.get(self._worker.generate.remote(prompts))
