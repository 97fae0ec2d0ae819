"""Train SmolLM2 with TRL's GRPOTrainer, through the agent program of examples/read_file, on this machine.

    usage: train.py [--steps N] [--tasks N] [--groups N] [--samples N] [--rate R] [--lora] [--seed N] [--data FOLDER]

Starts a whole service (`gangline up`) and stops it at the end. Prints the mean reward of each step, and leaves all of
them in FOLDER/rewards.json. Needs the extras `demo` and `trl`: `pip install -e '.[demo,trl]'`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import warnings
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "read_file"))

import torch
from datasets import Dataset
from peft import LoraConfig
from tasks import build_tasks
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from gangline import ServerClient
from gangline.domain.errors import EngineUnavailable
from gangline.models.language.models import resolve_model
from gangline.train.collecting.collector import PlainCollector
from gangline.train.collecting.groups import ValiditySettings
from gangline.train.collecting.task_stream import TaskStream
from gangline.train.trainers.trl import Connection, ServiceRollouts, session_reward
from gangline.train.weights.update import ServiceWeights

TEMPERATURE = 0.7  # the agent's own: TRL's log-probs must be of the distribution that was sampled from


@contextmanager
def running_service(data: Path) -> Generator[dict[str, Any]]:
    """Engine, server and node; what `gangline up --json` says of them."""
    command = [sys.executable, "-m", "gangline", "up", "--json", "--port", "0", "--data", str(data)]
    command += ["--parent", str(os.getpid())]  # it ends with us, even when we are killed
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line:
            sys.exit("The service did not start: see above.")
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait()


class Curve(TrainerCallback):
    """Prints and keeps the mean reward of each step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None or "reward" not in logs:
            return  # the summary at the end
        kept = {
            name: float(logs[name]) for name in ("reward", "reward_std", "loss", "grad_norm", "entropy", "step_time")
        }
        self._steps.append({"step": state.global_step, **kept})
        self._path.write_text(json.dumps(self._steps, indent=1))
        print(f"step {state.global_step:3}  mean reward {kept['reward']:.3f}  {kept['step_time']:5.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train SmolLM2 on examples/read_file with TRL as the trainer.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=1000, help="how many different ones")
    parser.add_argument("--groups", type=int, default=4, help="tasks a step")
    parser.add_argument("--samples", type=int, default=8, help="sessions of each task")
    parser.add_argument("--rate", type=float, default=None, help="learning rate; 5e-6, or 1e-4 with --lora")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 instead of the whole model")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--runtime", default="sandbox", help="name of the runtime")
    parser.add_argument("--data", type=Path, default=Path(".gangline/train_with_trl"))
    options = parser.parse_args()
    data = options.data.absolute()
    data.mkdir(parents=True, exist_ok=True)
    with running_service(data) as service:
        train(options, data, service)


def train(options: argparse.Namespace, data: Path, service: dict[str, Any]) -> None:
    tasks = list(build_tasks(options.tasks, seed=options.seed, runtime=options.runtime))
    run = f"trl-{secrets.token_hex(3)}"  # a task of an earlier run would be answered with its old sessions
    stream = TaskStream(run, tasks, num_samples=options.samples, seed=options.seed)

    @asynccontextmanager
    async def connect() -> AsyncGenerator[Connection]:
        async with (
            ServerClient(service["server_url"], service["control_token"]) as client,
            PlainCollector(client, stream.tasks(), validity=ValiditySettings(on_invalid="resubmit")) as collector,
        ):
            weights = ServiceWeights(client, data / "weights", token=service["control_token"])
            yield Connection(collector, weights, first_version=await latest_version(weights) + 1)

    folder = resolve_model("smollm2")
    config = GRPOConfig(
        output_dir=str(data / "trl"),
        temperature=TEMPERATURE,
        num_generations=options.samples,
        per_device_train_batch_size=options.samples,
        gradient_accumulation_steps=options.groups,  # so one step has so many groups
        max_steps=options.steps,
        learning_rate=options.rate or (1e-4 if options.lora else 5e-6),
        lr_scheduler_type="constant",
        loss_type="dapo",
        epsilon_high=0.28,
        seed=options.seed,
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    with ServiceRollouts(connect) as rollouts:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["any"] * options.groups}),
            rollout_func=rollouts,
            reward_funcs=session_reward,
            callbacks=[Curve(data / "rewards.json")],
            peft_config=adapters() if options.lora else None,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        rollouts.push(trainer)  # the last weights, for whoever asks the service now


async def latest_version(weights: ServiceWeights) -> int:
    async with asyncio.timeout(60):
        while True:
            try:
                return await weights.latest_version() or 0
            except EngineUnavailable:  # the server has not heard of the node yet
                await asyncio.sleep(0.5)


def adapters() -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # of `rollout_func`
    warnings.simplefilter("ignore", FutureWarning)  # of TRL's, to itself
    disable_progress_bar()  # of each push's files
    main()
