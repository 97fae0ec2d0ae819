"""Whether training on tokens of older policies costs reward, and whether importance sampling gives it back.

A Llama of 100,000 parameters plays the game of `shift_game.py`. For each seed one is taught on words of their own, and
then to be careless: it begins with two fifths of the reward. Every arm trains it by the real trainer, through real
processes of server, node and embedded engine, with the same tasks in the same order, as many updates and sessions, and
the same seeds of sampling. Only the age of tokens differs, and what the loss makes of it:

- `sync`: every token is of the newest policy.
- `lag_N`: an update trains on sessions of the policy of N updates before, corrected as a run does by default
  (truncated importance sampling by token).
- `lag_N_uncorrected`: the same as if they were fresh (`loss.correction.level: none`).
- `async`: the trainer's own asynchronous schedule as it is by default (`max_lag: 1`, corrected), for which sessions go
  on during updates, and what is older is dropped. Its ages are those that this machine brings about.
- `slow_...`: at a quarter of the learning rate, fewer seeds.

Ages of all but `async` do not depend on the machine: a run asks for the sessions of N updates ahead, and waits for all
of them before each update (`Ahead`). So the first N updates train on younger ones, as those of an asynchronous run do,
and no session sees two policies. What was seen is counted from the rows: `learn.async.token_lag.ARM`.

128 held-out words, one session each, are measured before, halfway and after. `learn.async.reward.ARM` is the mean after
all updates, `.difference.ARM` that less the synchronous arm's of the same seed and rate, with an interval of 95 % over
seeds (Student's t) and one over seeds and tasks (`two_way` of public_bench), and `.correction.LAG` what the correction
gives at the same lag.

Fixed before any of its seeds was run. Game, teaching, learning rate and number of updates were chosen on seed 100 by
the synchronous arm alone: of the rates 0.5, 1, 2, 3 and 4 in a thousand, the smallest that came above 0.9 in 24
updates. On seeds 100 and 101 other arms had run too, to see that ages are right; as `lag_1` then lost much, the slow
arms were added before the rest, and arms of lag 2 left out: on seed 100 they ended at 0.85, and 0.57 uncorrected, where
`sync` ended at 0.91.

What is in the folder is not done again: remove it to begin anew.

    usage: async_learning_bench.py [--folder FOLDER] [--seed N ...] [--arm ARM ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from public_bench import student, two_way
from service_bench import served
from shift_game import AGAIN, HELD_OUT, LETTERS, NUM_TURNS, TRAINED, right_replies, task_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from weight_update_bench import program

from gangline.domain.session import SessionResult
from gangline.domain.views import Submitted, TaskView
from gangline.train.collecting.admission import StalenessSettings
from gangline.train.collecting.schedule import ScheduleSettings
from gangline.train.collecting.task_stream import TaskStream
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.learner import Learner
from gangline.train.learning.learner_settings import LearnerSettings
from gangline.train.run.evaluation import Evaluation
from gangline.train.run.trainer import Trainer
from gangline.train.runs.log import read_evaluations, read_records
from gangline.train.weights.update import ServiceWeights
from gangline.wire.client.rollouts import Task, id_of
from gangline.wire.client.server import ServerClient

__all__ = ["run"]

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".gangline" / "async_learning"
NODE = Path(__file__).with_name("shift_game.py")
NUM_SEEDS, NUM_SLOW_SEEDS = 8, 5
STEPS, GROUPS, GROUP_SIZE = 20, 8, 8
LEARNING_RATE, SLOW_RATE = 2e-3, 5e-4

KNOWING_STEPS, KNOWING_SHARE, CARELESS_STEPS, CARELESS_SHARE = 400, 0.8, 100, 0.3
BATCH, TEACHING_RATE = 64, 2e-3
"""First a policy is taught right replies, then replies of which this share of letters is right on purpose."""
END, USER, MODEL = "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)

Figures = dict[str, dict[str, Any]]


class Arm(NamedTuple):
    lag: int
    """Versions, exactly; of the asynchronous schedule, at most."""
    is_corrected: bool = True
    mode: Literal["sync", "async"] = "sync"
    is_slow: bool = False

    @property
    def base(self) -> str:
        """The arm that it is compared with."""
        return "slow_sync" if self.is_slow else "sync"

    @property
    def num_seeds(self) -> int:
        return NUM_SLOW_SEEDS if self.is_slow else NUM_SEEDS


ARMS = {
    "sync": Arm(0),
    "lag_1": Arm(1),
    "lag_1_uncorrected": Arm(1, is_corrected=False),
    "lag_8": Arm(8),
    "lag_8_uncorrected": Arm(8, is_corrected=False),
    "async": Arm(1, mode="async"),
    "slow_sync": Arm(0, is_slow=True),
    "slow_lag_1": Arm(1, is_slow=True),
    "slow_lag_1_uncorrected": Arm(1, is_corrected=False, is_slow=True),
    "slow_lag_8": Arm(8, is_slow=True),
    "slow_lag_8_uncorrected": Arm(8, is_corrected=False, is_slow=True),
}


class Run(NamedTuple):
    """What one arm of one seed came to."""

    rewards: np.ndarray
    """[evaluations, held-out tasks]: before, halfway, after."""
    lags: Counter[int]
    """Versions behind -> trained tokens."""
    divergence: float
    """Between the policy that sampled and the one that was trained, in nats a token; mean over updates."""


class Ahead:
    """The service, which is asked for the tasks of later steps too.

    No task is at work once a step's groups are there, so no token is of newer weights than those before the step.
    """

    def __init__(self, service: ServerClient, tasks: Iterator[Task], num_ahead: int) -> None:
        """tasks: all that the trainer will ask for, in its order. num_ahead: that are run before they are asked for."""
        self._service = service
        self._tasks = tasks
        self._num_next = num_ahead + 1
        self._ends: dict[str, asyncio.Task[TaskView]] = {}

    async def submit(self, task: Task) -> Submitted:
        new = list(islice(self._tasks, self._num_next))
        self._num_next = 1
        for one in new:
            await self._service.submit(one)
            self._ends[id_of(one)] = asyncio.create_task(self._service.wait(id_of(one)))
        return await self._service.submit(task)

    async def wait(self, task_id: str) -> TaskView:
        await asyncio.gather(*self._ends.values())
        return await self._service.wait(task_id)

    async def result(self, task_id: str) -> list[SessionResult]:
        return await self._service.result(task_id)

    async def cancel(self, task_id: str) -> TaskView:
        return await self._service.cancel(task_id)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in (END, USER, MODEL)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def lesson(word: str, share: float, draw: random.Random) -> str:
    """A session in which this share of letters is right on purpose."""
    replies = [
        "".join(letter if draw.random() < share else draw.choice(LETTERS) for letter in reply)
        for reply in right_replies(word)
    ]
    asked = [word, *[AGAIN] * (NUM_TURNS - 1)]
    return "".join(f"{USER}{said}{END}{MODEL}{reply}{END}" for said, reply in zip(asked, replies, strict=True))


def learnt_places(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> list[bool]:
    """Where the model speaks, and ends. All lessons have the same."""
    marks: Any = tokenizer.convert_tokens_to_ids
    places, speaks = list[bool](), False
    for one in ids:
        places.append(speaks)
        speaks = (speaks or one == marks(MODEL)) and one != marks(END)
    return places


def write_taught(folder: Path, seed: int) -> None:
    """A policy that knows the game, and plays it carelessly."""
    tokenizer, draw = make_tokenizer(), random.Random(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    model: Any = AutoModelForCausalLM.from_config(shape).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=TEACHING_RATE, weight_decay=0.0)
    learnt = None
    for step in range(KNOWING_STEPS + CARELESS_STEPS):
        share = KNOWING_SHARE if step < KNOWING_STEPS else CARELESS_SHARE
        texts = [lesson(draw.choice(TRAINED), share, draw) for _ in range(BATCH)]
        ids = torch.tensor([tokenizer.encode(text) for text in texts])
        learnt = learnt_places(ids[0].tolist(), tokenizer) if learnt is None else learnt
        labels = ids.masked_fill(~torch.tensor(learnt), -100)
        optimiser.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimiser.step()
        if step % 100 == 99:
            print(f"  taught {seed}: {step + 1} steps, loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@asynccontextmanager
async def service(folder: Path, model: Path) -> AsyncGenerator[ServerClient]:
    """Of all runs: engine, server and node, each a process."""
    async with AsyncExitStack() as stack:
        engine_url = await stack.enter_async_context(program("engine", folder, "--model", str(model), "--threads", "1"))
        server = await stack.enter_async_context(served("server", folder / "server"))
        await stack.enter_async_context(served("n1", folder / "node", server.url, engine_url, program=NODE))
        yield await stack.enter_async_context(ServerClient(server.url, None))


async def train(client: ServerClient, folder: Path, taught: Path, arm: Arm, seed: int) -> None:
    """All updates of an arm. Its records are then in the folder."""
    settings = algorithm("grpo", {} if arm.is_corrected else {"loss.correction.level": "none"})
    rate, name = SLOW_RATE if arm.is_slow else LEARNING_RATE, folder.name
    learner = LearnerSettings(learning_rate=rate, reference_metric=False)
    stream = TaskStream(name, [task_of(word) for word in TRAINED], num_samples=GROUP_SIZE, seed=seed, seeded=True)
    ahead = Ahead(client, islice(stream.tasks(), STEPS * GROUPS), arm.lag * GROUPS)
    trainer = Trainer(
        folder,
        schedule=ScheduleSettings(
            mode=arm.mode,
            steps=STEPS,
            groups_per_step=GROUPS,
            staleness=StalenessSettings(max_lag=arm.lag),
            checkpoint_every=10 * STEPS,
        ),
        algorithm=settings,
        learner=await asyncio.to_thread(Learner, taught, settings, learner, seed=seed),
        service=ahead if arm.mode == "sync" else client,
        stream=stream,
        weights=ServiceWeights(client, folder / "weights"),
        evaluation=Evaluation(name, [task_of(word) for word in HELD_OUT], client, every=STEPS // 2, seed=seed),
    )
    await trainer.run()
    for part in ("weights", "checkpoints"):
        shutil.rmtree(folder / part)


def read_run(folder: Path, arm: str, seed: int) -> Run | None:
    """None if the folder has not all of it."""
    home = folder / f"{arm}-{seed}"
    evaluations = read_evaluations(home / "evaluations.jsonl")
    if not evaluations or evaluations[-1].step < STEPS:
        return None
    records = read_records(home / "metrics.jsonl")
    assert not any(one.num_invalid or one.num_not_admitted for one in records), home
    if ARMS[arm].mode == "sync":
        assert [set(one.lag) for one in records] == [{min(number, ARMS[arm].lag)} for number in range(STEPS)], home
    lags = Counter[int]()
    for record in records:
        lags.update(record.lag)
    rewards = np.array([one.task_means for one in evaluations], dtype=float)
    assert np.isfinite(rewards).all(), home
    return Run(
        rewards=rewards,
        lags=lags,
        divergence=float(np.mean([one.learner["behaviour_kl"] for one in records])),
    )


async def measure(folder: Path, parts: Sequence[tuple[int, str]]) -> None:
    """What the folder lacks of the seeds' arms."""
    wanted = [(seed, arm) for seed, arm in parts if read_run(folder, arm, seed) is None]
    for seed in dict(wanted):
        if not (folder / f"taught-{seed}" / "model.safetensors").exists():
            write_taught(folder / f"taught-{seed}", seed)
    if not wanted:
        return
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as data:
        async with service(Path(data), folder / f"taught-{wanted[0][0]}") as client:
            for seed, arm in wanted:
                home = folder / f"{arm}-{seed}"
                shutil.rmtree(home, ignore_errors=True)
                await train(client, home, folder / f"taught-{seed}", ARMS[arm], seed)
                found = read_run(folder, arm, seed)
                assert found is not None, home
                _tell(home, found)


def _tell(home: Path, found: Run) -> None:
    means = ", ".join(f"{mean:.3f}" for mean in found.rewards.mean(axis=1))
    seconds = read_records(home / "metrics.jsonl")[-1].wall_s
    print(
        f"  {home.name}: {means}; lag {_mean_lag(found.lags):.2f}, at most {max(found.lags)}; "
        f"{found.divergence:.4f} nats; {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _mean_lag(lags: Mapping[int, int]) -> float:
    return sum(lag * num for lag, num in lags.items()) / sum(lags.values())


def figures(found: Mapping[str, Sequence[Run]]) -> Figures:
    """found: arm -> of each seed."""
    rewards = {arm: np.stack([one.rewards for one in runs]) for arm, runs in found.items()}
    made: Figures = {}

    def add(name: str, value: float, unit: str, note: str) -> None:
        made[f"learn.async.{name}"] = {"value": float(f"{value:.3g}"), "unit": unit, "note": note}

    def compare(name: str, arm: str, base: str) -> None:
        of_both = rewards[arm] - rewards[base][: len(rewards[arm])]
        halfway, after, both = of_both[:, 1], of_both[:, -1], two_way(of_both[:, -1])
        told = f"95 % over seeds: {_interval(after.mean(axis=1))}; by seeds and tasks {both.low:.3f} to {both.high:.3f}"
        told += f"; {_by_seed(after)}; by seed halfway {halfway.mean():.3f}, {_interval(halfway.mean(axis=1))}"
        add(name, float(after.mean()), "", told)

    for arm, runs in found.items():
        after, lags = rewards[arm][:, -1], sum((one.lags for one in runs), Counter[int]())
        shown = f"{len(HELD_OUT)} held-out tasks, {len(runs)} seeds"
        if ARMS[arm].base == arm:
            before = rewards[arm][:, 0]
            add(f"reward.{arm}.taught", float(before.mean()), "", f"before; {shown}; {_by_seed(before)}")
        add(f"reward.{arm}", float(after.mean()), "", f"after {STEPS} updates; {shown}; {_by_seed(after)}")
        add(f"token_lag.{arm}", _mean_lag(lags), "versions", f"mean over trained tokens; at most {max(lags)}")
        apart = abs(float(np.mean([one.divergence for one in runs])))
        add(
            f"divergence.{arm}",
            round(apart, 4),
            "nats",
            "a token, from the policy that sampled to the one that is trained",
        )
        if ARMS[arm].base != arm:
            compare(f"difference.{arm}", arm, ARMS[arm].base)
        if (plain := f"{arm}_uncorrected") in found:
            compare(f"correction.{arm}", arm, plain)
    return made


def _by_seed(rewards: np.ndarray) -> str:
    """rewards: [seeds, tasks]"""
    return f"by seed {', '.join(f'{mean:.3f}' for mean in rewards.mean(axis=1))}"


def _interval(means: np.ndarray) -> str:
    """By Student's t. means: of seeds."""
    half = student(len(means) - 1) * float(means.std(ddof=1)) / math.sqrt(len(means))
    return f"{means.mean() - half:.3f} to {means.mean() + half:.3f}"


def run(folder: Path = FOLDER, seeds: Sequence[int] | None = None, arms: Sequence[str] = tuple(ARMS)) -> Figures:
    """Returns figure name -> {value, unit, note}. Half an hour. seeds: None takes each arm's own."""
    logging.getLogger("gangline").setLevel(logging.ERROR)
    disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    of_arms = {arm: range(ARMS[arm].num_seeds) if seeds is None else seeds for arm in arms}
    parts = [(seed, arm) for seed in sorted({one for some in of_arms.values() for one in some}) for arm in arms]
    asyncio.run(measure(folder, [(seed, arm) for seed, arm in parts if seed in of_arms[arm]]))
    found = {arm: [read_run(folder, arm, seed) for seed in of_arms[arm]] for arm in arms}
    whole = {arm: [one for one in runs if one is not None] for arm, runs in found.items()}
    return figures(whole) if all(len(runs) > 1 for runs in whole.values()) else {}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what old tokens cost learning, with and without correction.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of policies and runs")
    parser.add_argument("--seed", type=int, nargs="+")
    parser.add_argument("--arm", choices=ARMS, nargs="+", default=list(ARMS))
    given = parser.parse_args()
    print(json.dumps(run(given.folder, given.seed, given.arm), indent=2))


if __name__ == "__main__":
    main()
