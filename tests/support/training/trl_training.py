"""TRL's own trainer on a tiny model, so that tests see what it trains on."""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.domain.views import Submitted
from gangline.train.collecting.collector import PlainCollector
from gangline.train.collecting.groups import Group
from gangline.train.trainers.trl import Connection, session_reward
from support.engines.models import VOCAB_SIZE
from support.training.service import FakeService

Watch = Callable[[Any, Any, dict[str, Any], Any], None]
"""(trainer, model, what TRL is to train on, its loss)"""


def word_tokenizer(num_words: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """For the tiny random models of `fixtures_models`: a word for each id, 0 pads and 2 ends."""
    words = {f"w{number}": number for number in range(num_words)}
    core = Tokenizer(models.WordLevel(words, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", eos_token="w2", unk_token="w1")


def make_trainer(
    model: Any,
    rollouts: Any,
    folder: Path,
    *,
    watch: Watch | None = None,
    tokenizer: Any = None,
    peft: Any = None,
    **settings: Any,
) -> Any:
    """A `GRPOTrainer` that shows `watch` each batch and loss. One batch is all groups; its dataset only counts."""
    grpo = importlib.import_module("trl.trainer.grpo_trainer")
    config = importlib.import_module("trl.trainer.grpo_config")
    datasets = importlib.import_module("datasets")

    class Watched(grpo.GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(model, inputs, *arguments, **named)
            if watch is not None:
                watch(self, model, inputs, loss)
            return loss

    chosen = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    } | settings
    return Watched(
        model=model,
        args=config.GRPOConfig(**chosen),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["any"] * 4}),
        processing_class=tokenizer or word_tokenizer(),
        reward_funcs=session_reward,
        rollout_func=rollouts,
        peft_config=peft,
    )


class Answers(FakeService):
    """Every task ends at once with the sessions of the next group; the last group comes again and again."""

    def __init__(self, *groups: Group) -> None:
        super().__init__()
        self._groups = groups
        self._given: dict[str, Group] = {}

    async def submit(self, task: TaskRequest | Mapping[str, Any]) -> Submitted:
        submitted = await super().submit(task)
        group = self._groups[min(len(self._given), len(self._groups) - 1)]
        self._given[submitted.task_id] = group
        self.end(submitted.task_id)
        session_ids = tuple(one.session_id for one in group.sessions)
        return Submitted(task_id=submitted.task_id, session_ids=session_ids, created=True)

    async def result(self, task_id: str) -> list[SessionResult]:
        return list(self._given[task_id].sessions)


class NoEngines:
    """Takes weights and keeps the versions."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def push(self, save: Callable[[Path], None], version: int) -> None:
        self.versions.append(version)


def connecting(service: FakeService, weights: Any, *, first_version: int = 1, **collector: Any) -> Callable[[], Any]:
    """What `ServiceRollouts` opens."""

    @asynccontextmanager
    async def connect() -> AsyncGenerator[Connection]:
        async with PlainCollector(service, _tasks(), **collector) as collecting:
            yield Connection(collecting, weights, first_version)

    return connect


def _tasks() -> Iterator[dict[str, Any]]:
    return ({"task_id": f"t{number}", "instruction": "do it"} for number in count())
