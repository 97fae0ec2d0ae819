"""The process that runs verl's prompts: an asynchronous Ray actor next to the trainer."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import ray
from tensordict import TensorDict

from gangline.train.trainers.own_engine import answering
from gangline.train.trainers.verl.prompts import TaskMaker, prompts_in
from gangline.train.trainers.verl.sampler import make_sampler
from gangline.train.trainers.verl.sessions import PromptRunner, Teach
from gangline.train.trainers.verl.settings import GanglineSettings, read_settings, require_supported, sampling_of
from gangline.wire.client.server import ServerClient


class SessionWorker:
    """Call `start` once, then `generate` any number of times. It lives as long as its actor."""

    def __init__(self, config: Any, llm_client: Any, teacher_client: Any = None) -> None:
        """config: verl's. llm_client, teacher_client: verl's clients of its engines. Raises: InvalidRequest."""
        require_supported(config)
        self._config = config
        self._llm_client = llm_client
        self._teacher_client = teacher_client
        self._settings = read_settings(config)
        self._stack = AsyncExitStack()
        self._work = set[asyncio.Task[None]]()
        self._runner: PromptRunner | None = None

    async def start(self) -> str:
        """Serve verl's engines and wait for a node that accepts them. Returns their URL.

        Raises: InvalidRequest, NotFound, EngineUnavailable, PortUnavailable.
        """
        queue: Any = importlib.import_module("transfer_queue")
        await asyncio.to_thread(queue.init)
        token = self._settings.token()
        tasks = TaskMaker(self._settings)
        sampler = await asyncio.to_thread(make_sampler, self._config, self._llm_client, self._settings)
        service = await self._stack.enter_async_context(ServerClient(self._settings.url, token))
        settings = with_own_address(self._settings)
        url = await self._stack.enter_async_context(answering(sampler, service, settings))
        rollout = self._config.actor_rollout_ref.rollout
        self._runner = PromptRunner(
            service,
            queue,
            tasks,
            sampling={"train": sampling_of(self._config, "train"), "val": sampling_of(self._config, "val")},
            num_samples={"train": rollout.n, "val": rollout.val_kwargs.n},
            validity=self._settings.validity,
            group_judge=self._settings.group_judge,
            compares_sessions=self._config.algorithm.adv_estimator == "grpo",
            teach=None if self._teacher_client is None else teaching(self._config, self._teacher_client),
        )
        return url

    async def generate(self, batch: TensorDict) -> int:
        """Start the batch's prompts. Returns their number at once.

        Raises, before any is started: InvalidRequest, and InvalidGroup once sessions can no longer run.
        """
        assert self._runner is not None, "start comes first"
        self._runner.check()
        prompts = prompts_in(batch)
        for prompt in prompts:
            self._own(self._runner.run(prompt))
        return len(prompts)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def teaching(config: Any, client: Any) -> Teach:
    """verl's teachers of a row's tokens, as its own agent loops ask them. client: verl's clients of its teachers."""
    module: Any = importlib.import_module("verl.experimental.teacher_loop.teacher_manager")
    teachers = module.AsyncTeacherLLMServerManager(config, client)

    async def teach(fields: dict[str, Any]) -> dict[str, Any]:
        teacher_ids, teacher_logprobs = await teachers.compute_teacher_logprobs_single(
            sequence_ids=fields["input_ids"].tolist(), routing_key=fields.get(config.distillation.teacher_key)
        )
        return fields | {"teacher_ids": teacher_ids, "teacher_logprobs": teacher_logprobs}

    return teach


def with_own_address(settings: GanglineSettings) -> GanglineSettings:
    """If `host` is a wildcard address, nodes use this machine's address in Ray, because Ray chose the machine."""
    if settings.public_url is not None or settings.host not in ("0.0.0.0", "::"):
        return settings
    util: Any = ray.util
    address: str = util.get_node_ip_address()
    return settings.model_copy(update={"public_url": f"http://{f'[{address}]' if ':' in address else address}"})
