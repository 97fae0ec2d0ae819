"""verl on a machine without a GPU: a platform, and a rollout server over the embedded engine.

verl has a seam for each, and imports this module in every process (VERL_USE_EXTERNAL_MODULES). All else is verl's own:
its FSDP engine runs on gloo. It runs in verl's interpreter.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import verl.utils.distributed
import verl.workers.rollout.base
from safetensors.torch import save_file
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "support.training.verl_on_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine under this name alone
}
SLOT = "GPU"
"""Ray's resource of one training worker, as a GPU would be."""


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


_DEVICE: Any = SimpleNamespace(
    is_available=lambda: False,
    empty_cache=_nothing,
    synchronize=_nothing,
    set_device=_nothing,
    manual_seed=torch.manual_seed,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    current_device=_zero,
    get_device_name=lambda: "cpu",
    memory_allocated=_zero,
    memory_reserved=_zero,
    max_memory_allocated=_zero,
    max_memory_reserved=_zero,
    mem_get_info=lambda: (0, 0),
)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_SLOTS"

    def ray_resource_name(self) -> str:
        return SLOT

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing


_join_group = verl.utils.distributed.initialize_global_process_group_ray


def _join_gloo(timeout_second: float | None = None, backend: str | None = None) -> None:
    """verl asks for `cpu:gloo,cpu:gloo`, which torch refuses."""
    _join_group(timeout_second, backend or "cpu:gloo")


verl.utils.distributed.initialize_global_process_group_ray = _join_gloo


class Server:
    """verl's rollout server, an asynchronous actor: the methods of `vLLMHttpServer` that verl calls."""

    def __init__(self, model: str, max_context: int) -> None:
        from gangline.serving.embedded.server import create_sampler

        self._sampler = create_sampler(model, threads=1, max_context=max_context)
        self._global_steps: int | None = None
        self._is_paused = False

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        from gangline.models.engine_server.sampler import SampleRequest

        asked = SampleRequest(
            prompt_ids=prompt_ids,
            max_tokens=sampling_params["max_tokens"],
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
            top_k=max(sampling_params["top_k"], 0),
            seed=sampling_params.get("seed"),
            stop_ids=frozenset(sampling_params.get("stop_token_ids", ())),
        )
        async with aclosing(self._sampler.sample(asked)) as sampled:
            tokens = [token async for token in sampled]
        is_whole = bool(tokens) and tokens[-1].finish_reason in ("stop", "length")
        return TokenOutput(
            token_ids=[token.token_id for token in tokens],
            log_probs=[token.logprob for token in tokens],
            stop_reason="completed" if is_whole else "aborted",
            extra_fields={"global_steps": self._global_steps},
        )

    async def load(self, folder: str, global_steps: int) -> None:
        await self._sampler.pause("abort")
        await self._sampler.load_weights(Path(folder))
        self._global_steps = global_steps
        if not self._is_paused:
            await self._sampler.resume()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._is_paused = True
        await self._sampler.pause("abort")

    async def resume_generation(self) -> None:
        self._is_paused = False
        await self._sampler.resume()

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...


def load_replica() -> type[Any]:
    from verl.workers.rollout.replica import RolloutReplica

    class Replica(RolloutReplica):
        async def launch_servers(self) -> None:
            context = self.config.max_model_len or self.config.prompt_length + self.config.response_length
            actor: Any = ray.remote(Server)
            server = actor.options(num_cpus=0, name=_name(self.replica_rank)).remote(self.model_config.path, context)
            self.servers = [server]
            self._server_handle = server
            self._server_address = f"127.0.0.1:{self.replica_rank}"

    return Replica


def _name(replica_rank: int) -> str:
    return f"embedded_server_{replica_rank}"


class Adapter(verl.workers.rollout.base.BaseRollout):
    """In each training worker: hands weights, which each has whole, to the server of its replica."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **settings: Any) -> None:
        gathered = {name: tensor.detach().clone().contiguous() async for name, tensor in _each(weights)}
        with tempfile.TemporaryDirectory() as folder:
            save_file(gathered, Path(folder) / "model.safetensors")
            await ray.get_actor(_name(torch.distributed.get_rank())).load.remote(folder, settings["global_steps"])


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, Generator):
        for one in weights:
            yield one
        return
    async for one in weights:
        yield one


verl.workers.rollout.base._ROLLOUT_REGISTRY["embedded", "async"] = f"{__name__}.Adapter"


def _register() -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("embedded", load_replica)


_register()
