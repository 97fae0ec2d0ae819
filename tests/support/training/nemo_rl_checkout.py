"""NeMo RL's own loop from a checkout, on a CPU: `async_grpo_train` with its own replay buffer and configuration.

Stand-ins: packages that it imports for GPUs, logging and servers (`ABSENT`); Ray's actors are one thread each; the
policy and its engines are mocks that train nothing, and weights are versions. NeMo RL wants Python 3.13 and
transformers before 5.12: the modules used here run with 3.11 and later ones, once their check of the version is passed.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import typing
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import transformers
import typing_extensions
from transformers import AutoProcessor, AutoTokenizer

from support.training.absent_modules import importable

__all__ = ["Loader", "Policy", "configured", "local_actor", "nemo_rl", "train"]

ABSENT = (
    "torchdata",
    "zmq",
    "pynvml",
    "fastapi",
    "mlflow",
    "swanlab",
    "wandb",
    "tensorboard",
    "hydra",
    "soundfile",
    "scipy",
    "absl",
    "torch.utils.tensorboard",
)
_LOADED = (AutoProcessor, AutoTokenizer)  # before their version is said to be another


@contextmanager
def nemo_rl(checkout: Path) -> Generator[None]:
    """Within it NeMo RL can be imported."""
    loader = transformers.AutoTokenizer.from_pretrained
    version = {"__version__": "5.11.0"}
    with importable(checkout, *ABSENT):
        later = patch.object(typing, "TypedDict", typing_extensions.TypedDict)  # pydantic wants those of Python 3.12
        with patch.dict(sys.modules["transformers"].__dict__, version), later:
            importlib.import_module("nemo_rl.algorithms.grpo")
            importlib.import_module("nemo_rl.algorithms.async_utils")
        yield
    transformers.AutoTokenizer.from_pretrained = loader  # which NeMo RL replaces


class _Answer(Future[Any]):
    """A reference to an actor's answer: `ray.get` takes it, and it can be awaited."""

    def __await__(self) -> Any:
        return asyncio.wrap_future(self).__await__()


def local_actor(made: Any) -> Any:
    """An object as a Ray actor: calls return at once and run one after the other."""
    thread = ThreadPoolExecutor(1)

    class Handle:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=lambda *given, **named: ask(getattr(made, name), given, named))

    def ask(method: Any, given: Any, named: Any) -> _Answer:
        answer = _Answer()

        def work() -> None:
            try:
                answer.set_result(method(*given, **named))
            except BaseException as error:
                answer.set_exception(error)

        thread.submit(work)
        return answer

    return Handle()


def configured(checkout: Path, **grpo: Any) -> Any:
    """Its configuration of an example, by its own loader and types, with small sizes."""
    module = importlib.import_module("nemo_rl.algorithms.grpo")
    loading = importlib.import_module("nemo_rl.utils.config")
    loading.register_omegaconf_resolvers()
    config = loading.load_config(checkout / "examples/configs/grpo_math_1B.yaml")
    plain = importlib.import_module("omegaconf").OmegaConf.to_container(config, resolve=True)
    sizes = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 3, "val_period": 0}
    plain["grpo"] |= {"val_at_start": False, "val_at_end": False, **sizes, **grpo}
    plain["grpo"]["async_grpo"] |= {"enabled": True, "max_trajectory_age_steps": 1}
    plain["loss_fn"] |= {"use_importance_sampling_correction": True}
    plain["policy"]["train_global_batch_size"] = 4
    plain["policy"]["generation"]["vllm_cfg"] |= {"async_engine": True, "enable_vllm_metrics_logger": False}
    plain["policy"]["generation"]["colocated"]["enabled"] = False
    plain["checkpointing"] |= {"enabled": False}
    return module.MasterConfig(**plain)


class Policy(MagicMock):
    """Trains nothing, and keeps what it was given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.given: list[dict[str, Any]] = []
        self.sharding_annotations.get_axis_size.return_value = 1
        self.get_logprobs.side_effect = lambda data, **_: {"logprobs": torch.clone(data["generation_logprobs"])}
        self.get_reference_policy_logprobs.side_effect = lambda data, **_: {
            "reference_logprobs": torch.clone(data["generation_logprobs"])
        }
        self.train.side_effect = self._train

    def _get_child_mock(self, **options: Any) -> MagicMock:
        return MagicMock(**options)

    def _train(self, data: Any, *_: Any, **__: Any) -> dict[str, Any]:
        self.given.append(dict(data))
        tokens = int(data["token_mask"].sum())
        numbers = {"global_valid_toks": [tokens], "global_valid_seqs": [4], "lr": [0.0], "wd": [0.0]}
        zeros = {name: [0.0] for name in ("gen_kl_error", "probs_ratio")}
        return {"loss": torch.tensor(0.0), "grad_norm": torch.tensor(0.0), "all_mb_metrics": numbers | zeros}


class Loader:
    """A data loader of task names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def state_dict(self) -> dict[str, Any]:
        return {}


def train(config: Any, loader: Loader, policy: Policy, refit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `async_grpo_train`. refit: called in the place of the transfer of weights."""
    module = importlib.import_module("nemo_rl.algorithms.grpo")
    utils = importlib.import_module("nemo_rl.algorithms.async_utils")
    impl = importlib.import_module("nemo_rl.algorithms.async_utils.replay_buffer").ReplayBufferImpl
    monkeypatch.setattr(module, "ray", SimpleNamespace(get=lambda answer: answer.result(), kill=lambda _: None))
    buffers = SimpleNamespace(remote=lambda **sizes: local_actor(impl(**sizes)))
    monkeypatch.setattr(utils, "ReplayBuffer", SimpleNamespace(options=lambda **_: buffers))
    monkeypatch.setattr(module, "get_actor_python_env", lambda _: sys.executable)
    monkeypatch.setattr(module, "refit_policy_generation", lambda *_, **__: refit() or {})
    monkeypatch.setattr(module, "print_performance_metrics", lambda *_, **__: {})  # floating point operations of GPUs
    generation = MagicMock()
    generation.blocks_training.return_value = False
    generation.get_step_metrics.return_value = {}
    checkpointer = MagicMock()
    checkpointer.get_latest_checkpoint_path.return_value = None
    module.async_grpo_train(
        policy=policy,
        policy_generation=generation,
        dataloader=loader,
        val_dataloader=None,
        tokenizer=SimpleNamespace(pad_token_id=0),
        loss_fn=MagicMock(),
        task_to_env={},
        val_task_to_env=None,
        logger=MagicMock(),
        checkpointer=checkpointer,
        grpo_save_state=module.GRPOSaveState(0, 0, 0, 0, 0, 0.0),
        master_config=config,
        max_trajectory_age_steps=1,
    )
