"""slime's own programs from a checkout: its `train.py`, its rollout manager and its engine client, without a GPU.

Stand-ins: Ray's actors are one thread each here; the models that `train.py` asks to train are `Trained`, which asks the
engines for what slime's weight updates ask (`update_weight_from_tensor.py`), in that order; no engine process starts.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

__all__ = ["ABSENT", "Trained", "parsed_arguments", "slime_manager", "slime_program"]

ABSENT = ("sglang", "sglang_router", "wandb", "megatron", "ring_flash_attn")
"""Packages that slime imports, which want a GPU, or whose processes do not start here."""
PARALLEL = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


class _Actor:
    """An object as a Ray actor: calls return at once and run one after the other."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self._thread = ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.made, name)
        return SimpleNamespace(remote=lambda *given, **named: self._thread.submit(method, *given, **named))


def _get(answers: Any) -> Any:
    if isinstance(answers, Future):
        return answers.result()
    return [_get(one) for one in answers] if isinstance(answers, list) else answers


RAY = SimpleNamespace(get=_get, put=lambda value, **_: value)


def parsed_arguments(checkout: Path, *options: str) -> SimpleNamespace:
    """slime's options, by its own parser. Options of Megatron and SGLang are not among them."""
    module = importlib.import_module("slime.utils.arguments")
    parser = argparse.ArgumentParser()
    module.get_slime_extra_args_provider()(parser)
    with patch.object(sys, "argv", [str(checkout / "train.py"), *options]):
        early = module._pre_parse_mode()
    return SimpleNamespace(**vars(parser.parse_args(["--num-rollout", "3", *options])) | vars(early))


def slime_manager(args: Any, rollout: Any, source: Any, engine_urls: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its `RolloutManager` over these engines, with its own `SGLangEngine`, `ServerGroup` and `RolloutServer`."""
    module = importlib.import_module("slime.ray.rollout")
    monkeypatch.setattr(module, "ray", RAY)
    for name in ("WEIGHTS", "KV_CACHE", "CUDA_GRAPH"):  # constants of SGLang
        monkeypatch.setattr(module, f"GPU_MEMORY_TYPE_{name}", name.lower())
    made = object.__new__(module.RolloutManager.__ray_metadata__.modified_class)
    group = module.ServerGroup(
        args=args,
        pg=None,
        all_engines=[_Actor(_engine(args, url)) for url in engine_urls],
        num_gpus_per_engine=1,
        num_new_engines=0,
        needs_offload=args.offload_rollout,
    )
    made.args = args
    made.generate_rollout, made.data_source = rollout, source
    made.custom_reward_post_process_func = made.custom_convert_samples_to_train_data_func = None
    made.servers = {"default": module.RolloutServer(server_groups=[group])}
    made.rollout_engine_lock = None
    made._health_monitors = []
    made.set_train_parallel_config(PARALLEL)
    return made


def _engine(args: Any, url: str) -> Any:
    """Its client of an engine that runs already, registered with the router by its own code."""
    engine = importlib.import_module("slime.backends.sglang_utils.sglang_engine").SGLangEngine(args, rank=0)
    engine.router_ip, engine.router_port = args.sglang_router_ip, args.sglang_router_port
    engine.node_rank = 0
    engine.server_host, _, port = url.removeprefix("http://").partition(":")
    engine.server_port = int(port)
    return engine


class Trained:
    """The actor model: what it was given, and weights as versions."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.version = 0
        self.given: list[list[dict[str, Any]]] = []

    def update_weights(self) -> None:
        self.version += 1
        for engine in self.manager.get_updatable_engines_and_lock()[0]:
            for step in (engine.pause_generation, engine.flush_cache):
                step.remote().result()
            engine.update_weights_from_tensor.remote(["..."], weight_version=str(self.version)).result()
            engine.continue_generation.remote().result()

    def async_train(self, _rollout_id: int, refs: Any, **_: Any) -> list[Any]:
        self.given.append([box.inner for box in refs])
        return []

    def clear_memory(self) -> None: ...

    def save_model(self, *_: Any, **__: Any) -> None: ...


@contextmanager
def slime_program(
    checkout: Path, name: str, manager: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Trained]]:
    """(`train` of its program `train.py` or `train_async.py`, the model that it trains)."""
    spec = importlib.util.spec_from_file_location(f"slime_{name}", checkout / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    trained = Trained(manager)
    monkeypatch.setattr(program, "ray", RAY)
    for nothing in ("configure_logger", "init_tracking", "finish_tracking"):
        monkeypatch.setattr(program, nothing, lambda *_: None)
    monkeypatch.setattr(program, "create_placement_groups", lambda _: {"rollout": None})
    monkeypatch.setattr(program, "create_rollout_manager", lambda *_: (_Actor(manager), None))
    monkeypatch.setattr(program, "create_training_models", lambda *_: (trained, None))
    yield program.train, trained
