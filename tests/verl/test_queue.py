"""Sessions in verl's transfer queue: judged by verl's replay buffers, its advantages and its padding."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

import verl
from gangline.domain.completion import Certificate
from gangline.domain.conversation import SamplingParams
from gangline.domain.session import SessionResult
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.train.collecting.groups import Group, ValiditySettings
from gangline.train.trainers.own_engine import Sampling
from gangline.train.trainers.verl.prompts import Prompt, TaskMaker, prompts_in
from gangline.train.trainers.verl.rows import training_rows
from gangline.train.trainers.verl.sessions import PromptRunner, Teach
from gangline.train.trainers.verl.settings import GanglineSettings
from gangline.train.trainers.verl.worker import teaching
from support.training.samples import session, trace

TASK = '{"instruction": "do it", "agent": {"harness": "shell"}}'
WARM = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=64)
STEPS = count(1)


class Ended:
    """A service whose tasks have ended: each run of a task gives the next results."""

    def __init__(self, *runs: Sequence[SessionResult]) -> None:
        self._runs = list(runs)
        self.tasks: list[dict[str, Any]] = []

    async def submit(self, task: Any) -> Any:
        self.tasks.append(dict(task))

    async def wait(self, task_id: str) -> Any: ...

    async def cancel(self, task_id: str) -> Any: ...

    async def result(self, task_id: str) -> list[SessionResult]:
        return list(self._runs[min(len(self.tasks), len(self._runs)) - 1])


def batch_of(num_prompts: int, *, global_steps: int, validate: bool = False) -> TensorDict:
    """As verl's trainer makes it."""
    columns: dict[str, Any] = {
        "uid": NonTensorStack(*(str(uuid.uuid4()) for _ in range(num_prompts))),
        "raw_prompt": NonTensorStack(*([{"role": "user", "content": "do it"}] for _ in range(num_prompts))),
        "gangline_task": NonTensorStack(*([TASK] * num_prompts)),
        "data_source": NonTensorStack(*(["words"] * num_prompts)),
        "extra_info": NonTensorStack(*({"index": number} for number in range(num_prompts))),
        "dummy_tensor": torch.zeros(num_prompts, 1, dtype=torch.uint8),
        "global_steps": NonTensorData(global_steps),
    }
    if validate:
        columns["validate"] = NonTensorData(True)
    return TensorDict(columns, batch_size=num_prompts)


async def run_prompts(
    queue: Any,
    service: Ended,
    *,
    num_prompts: int = 1,
    num_samples: int = 2,
    validate: bool = False,
    validity: ValiditySettings | None = None,
    compares_sessions: bool = True,
    teach: Teach | None = None,
) -> list[Prompt]:
    """All prompts of a batch, as the worker runs them."""
    prompts = prompts_in(batch_of(num_prompts, global_steps=next(STEPS), validate=validate))
    runner = PromptRunner(
        service,
        queue,
        TaskMaker(GanglineSettings(url="http://127.0.0.1:1")),
        sampling={"train": WARM, "val": WARM.model_copy(update={"temperature": 0.0})},
        num_samples={"train": num_samples, "val": num_samples},
        validity=validity or ValiditySettings(),
        compares_sessions=compares_sessions,
        teach=teach,
        retry_s=0.0,
    )
    for prompt in prompts:
        tag = {"is_prompt": True, "status": "pending", "global_steps": prompt.global_steps}
        await queue.async_kv_batch_put(keys=[prompt.uid], partition_id=prompt.partition, tags=[tag])
        await runner.run(prompt)
    return prompts


def buffer(kind: type[Any] = ReplayBuffer, **settings: Any) -> Any:
    return kind(
        trainer_mode="sync" if kind is ReplayBuffer else "colocate_async",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.01,
        **settings,
    )


def sampled(queue: Any, prompts: Sequence[Prompt], kind: type[Any] = ReplayBuffer) -> tuple[Any, Any]:
    """What verl's buffer hands to its trainer: (keys and tags, all columns)."""
    batch, _ = buffer(kind).sample(prompts[0].global_steps, prompts[0].partition, len(prompts))
    return batch, queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)


def sums(rows: torch.Tensor) -> list[float]:
    return [row.sum().item() for row in rows.unbind()]


def status(queue: Any, prompt: Prompt) -> tuple[str, list[str]]:
    """The prompt's status, and the keys of its rows."""
    items = queue.kv_list(prompt.partition)[prompt.partition]
    return items[prompt.uid]["status"], sorted(key for key in items if key.startswith(f"{prompt.uid}_"))


def cleared(queue: Any, prompt: Prompt) -> None:
    """A failed prompt stays until its trainer evicts it: it must not meet the next test."""
    _, rows = status(queue, prompt)
    queue.kv_clear(keys=[prompt.uid, *rows], partition_id=prompt.partition)


GOOD = session("s0", 1.0, trace(versions=[3]))
BAD = session("s1", 0.0, trace(turns=[(10, 2), (11, 12, 2)], versions=[3, 4]))
BROKEN = session("s1", None, outcome="infra_error")


class Teacher:
    """Answers as verl's client of its teachers: the log-prob of an id is a thousandth of it."""

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        assert (sampling_params["prompt_logprobs"], sampling_params["temperature"]) == (0, 1.0)
        ids = [[one] for one in prompt_ids]
        return SimpleNamespace(
            extra_fields={"prompt_ids": ids, "prompt_logprobs": [[-0.001 * one] for one in prompt_ids]}
        )


async def test_verls_distillation_moves_every_row_of_a_session_towards_its_teacher(queue: Any) -> None:
    """verl's own manager of teachers asks, and verl's buffer hands the rows over."""
    with initialize_config_dir(str(Path(str(verl.__file__)).parent / "trainer" / "config"), version_base=None):
        overrides = [
            "distillation.enabled=true",
            "distillation.n_gpus_per_node=1",
            "distillation.nnodes=1",
            "distillation.teacher_models.teacher_model.model_path=/models/teacher",
            "distillation.teacher_models.teacher_model.num_replicas=1",
            "distillation.teacher_models.teacher_model.inference.name=vllm",
            "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1",
            "distillation.teacher_models.teacher_model.inference.max_model_len=4096",
            "distillation.distillation_loss.loss_mode=k1",
            "distillation.distillation_loss.use_policy_gradient=true",
            "distillation.distillation_loss.use_task_rewards=false",
        ]
        config = compose("ppo_trainer", overrides)
    twice = session("s2", 0.0, trace(versions=[3]), trace(turns=[(20, 21, 22, 2)], versions=[3]))
    teach = teaching(config, {"default": Teacher()})  # verl's name for a single teacher
    prompts = await run_prompts(queue, Ended([GOOD, twice]), teach=teach)
    _, columns = sampled(queue, prompts)
    assert len(columns["input_ids"]) == 3
    for ids, of_teacher, logprobs in zip(
        columns["input_ids"], columns["teacher_ids"], columns["teacher_logprobs"], strict=True
    ):
        assert of_teacher[:, 0].tolist() == ids.tolist()
        assert logprobs[:, 0].tolist() == pytest.approx([-0.001 * one for one in ids.tolist()])


@pytest.mark.parametrize("kind", [ReplayBuffer, ReplayBufferAsync])
async def test_verls_buffers_sample_the_rows_of_a_whole_group(queue: Any, kind: type[Any]) -> None:
    prompts = await run_prompts(queue, Ended([GOOD, BAD]))
    batch, data = sampled(queue, prompts, kind)
    uid = prompts[0].uid
    assert batch.keys == [f"{uid}_0_0", f"{uid}_1_0"]
    assert [tag["status"] for tag in batch.tags] == ["success", "success"]
    assert [(tag["min_global_steps"], tag["max_global_steps"]) for tag in batch.tags] == [(3, 3), (3, 4)]
    assert [tag["seq_len"] for tag in batch.tags] == [6, 10]
    assert data["responses"].offsets().diff().tolist() == [3, 7]
    assert data["response_mask"][1].tolist() == [1, 1, 0, 0, 1, 1, 1]
    assert sums(data["rm_scores"]) == [1.0, 0.0]
    assert data["input_ids"][0].tolist() == [1, 4, 5, 10, 11, 2]
    assert data["position_ids"][1].tolist() == list(range(10))
    assert data.get("uid").tolist() == [uid, uid]
    assert data.get("num_turns").tolist() == [1, 2]
    assert data.get("data_source").tolist() == ["words", "words"]


async def test_rows_of_one_length_are_read_as_verl_reads_them(queue: Any) -> None:
    prompts = await run_prompts(queue, Ended([GOOD, session("s1", 0.0, trace(versions=[3]))]), num_prompts=2)
    _, data = sampled(queue, prompts)
    assert data["prompts"].offsets().diff().tolist() == [3, 3, 3, 3]


async def test_grpo_gives_all_traces_of_a_session_the_sessions_advantage(queue: Any) -> None:
    several = session("s0", 1.0, trace(versions=[1]), trace(turns=[(12, 2)], versions=[1]), trace(versions=[1]))
    others = [session(f"s{number}", 0.0, trace(versions=[1])) for number in (1, 2)]
    prompts = await run_prompts(queue, Ended([several, *others]), num_samples=3)
    batch, data = sampled(queue, prompts)
    assert sorted(key.split("_", 1)[1] for key in batch.keys) == ["0_0", "0_1", "0_2", "1_0", "2_0"]
    padded = DataProto(batch=data.select("response_mask", "rm_scores").to_padded_tensor())
    padded.batch["token_level_rewards"] = padded.batch["rm_scores"]
    padded.non_tensor_batch["uid"] = np.array(data.get("uid").tolist(), dtype=object)
    found = compute_advantage_for_multi_trajectories(padded, batch.keys, "grpo", num_repeat=3)
    by_key = dict(zip(batch.keys, found.batch["advantages"].max(dim=1).values.tolist(), strict=True))
    of_session = {key.split("_", 1)[1]: value for key, value in by_key.items()}
    assert [of_session[f"0_{index}"] for index in range(3)] == pytest.approx([1.1547] * 3, abs=1e-3)
    low = found.batch["advantages"].min(dim=1).values.tolist()
    assert sum(value == pytest.approx(-0.5774, abs=1e-3) for value in low) == 2


async def test_verl_pads_a_batch_after_our_rows(queue: Any) -> None:
    prompts = await run_prompts(queue, Ended([GOOD, BAD]))
    batch, _ = sampled(queue, prompts)
    padded = upsample_batch_to_divisible_size(batch, 4, eos_token_id=2)
    data = queue.kv_batch_get(keys=padded.keys, partition_id="train")
    assert len(padded) == 4
    assert sums(data["response_mask"]) == [3, 5, 0, 0]
    queue.kv_clear(keys=padded.keys, partition_id="train")


async def test_a_broken_session_makes_a_failure_without_rows(queue: Any) -> None:
    service = Ended([GOOD, BROKEN])
    (prompt,) = await run_prompts(queue, service, validity=ValiditySettings(on_invalid="resubmit"))
    assert status(queue, prompt) == ("failure", [])
    assert [task["task_id"] for task in service.tasks] == [prompt.uid, f"{prompt.uid}-run2", f"{prompt.uid}-run3"]
    cleared(queue, prompt)


async def test_a_second_run_mends_a_group(queue: Any) -> None:
    (prompt,) = await run_prompts(
        queue, Ended([GOOD, BROKEN], [GOOD, BAD]), validity=ValiditySettings(on_invalid="resubmit")
    )
    assert status(queue, prompt) == ("finished", [f"{prompt.uid}_0_0", f"{prompt.uid}_1_0"])
    cleared(queue, prompt)


async def test_a_shrunken_group_is_a_failure_whose_rows_keep_their_numbers(queue: Any) -> None:
    others = [session("s2", 0.0, trace(versions=[3])), GOOD]
    runs = Ended([BROKEN, others[0], session("s3", 1.0, trace(versions=[3]))])
    (prompt,) = await run_prompts(queue, runs, num_samples=3, validity=ValiditySettings(on_invalid="shrink"))
    assert status(queue, prompt) == ("failure", [f"{prompt.uid}_1_0", f"{prompt.uid}_2_0"])
    cleared(queue, prompt)


async def test_the_asynchronous_buffer_replaces_a_failed_prompt(queue: Any) -> None:
    (prompt,) = await run_prompts(queue, Ended([BROKEN, BROKEN]))
    wanted: list[int] = []
    asked = buffer(ReplayBufferAsync, refill_fn=wanted.append)
    whole = await run_prompts(queue, Ended([GOOD, BAD]))
    batch, _ = asked.sample(whole[0].global_steps, "train", 1)
    assert wanted == [1]
    assert {key.split("_")[0] for key in batch.keys} == {whole[0].uid}
    assert prompt.uid not in queue.kv_list("train")["train"]


async def test_validation_has_rows_that_must_not_be_trained_on(queue: Any) -> None:
    greedy = Certificate(
        prompt_source="engine",
        context="first",
        finish_reason="stop",
        logprobs="processed",
        sampling=SamplingParams(temperature=0.0),
    )
    detailed = session("s0", 0.5, trace(certificates=(greedy,)), reward_details={"acc": 1, "why": "so"})
    prompts = await run_prompts(queue, Ended([detailed, BROKEN]), validate=True)
    assert status(queue, prompts[0])[0] == "failure"
    batch, data = sampled(queue, prompts)
    assert batch.keys == [f"{prompts[0].uid}_0_0"]
    assert sums(data["rm_scores"]) == [0.5]
    assert data.get("extra_fields").tolist()[0]["reward_extra_info"] == {"acc": 1.0}


async def test_sessions_of_several_traces_are_refused_where_verl_compares_rows(queue: Any) -> None:
    several = session("s0", 1.0, trace(versions=[1]), trace(versions=[1]))
    (prompt,) = await run_prompts(queue, Ended([several, BAD]), compares_sessions=False)
    assert status(queue, prompt) == ("failure", [])
    cleared(queue, prompt)


async def test_tokens_of_unknown_version_are_refused(queue: Any) -> None:
    (prompt,) = await run_prompts(queue, Ended([session("s0", 1.0, trace(versions=[-1])), BAD]))
    assert status(queue, prompt) == ("failure", [])
    cleared(queue, prompt)


async def test_a_task_is_sampled_as_verls_configuration_says(queue: Any) -> None:
    service = Ended([GOOD, BAD])
    prompts = await run_prompts(queue, service)
    sampled(queue, prompts)
    (task,) = service.tasks
    assert (task["task_id"], task["num_samples"], task["instruction"]) == (prompts[0].uid, 2, "do it")
    rules = task["capture"]["sampling"]
    assert rules["temperature"] == {"override": 1.0}
    assert rules["max_tokens"] == {"max": 64}


def converted(groups: Sequence[Group], num_samples: int) -> list[Any]:
    """The rows of groups as they go into the queue."""
    found = []
    for group in groups:
        if len(group.sessions) != num_samples or len({one.session_id for one in group.sessions}) != num_samples:
            from gangline.train.trainers.contract import require_whole

            require_whole(group, num_samples)
        prompt = Prompt(uid=group.task_id, partition="train", global_steps=1, num_samples=None, columns={})
        order = [one.session_id for one in group.sessions]
        rows = training_rows(prompt, group, order, temperature=1.0, compares_sessions=True)
        found += [(group.task_id, fields) for fields in rows.fields]
    return found


def read(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[ReadRow]:
    found = []
    for task_id, row in rows:
        versions = [-1] * len(row["responses"])
        for version, start, end in row["extra_fields"]["version_spans"]:
            versions[start:end] = [version] * (end - start)
        found.append(
            ReadRow(
                task_id=task_id,
                session_id=row["extra_fields"]["gangline_session"],
                prompt_ids=row["prompts"].tolist(),
                response_ids=row["responses"].tolist(),
                loss_mask=row["response_mask"].tolist(),
                logprobs=row["rollout_log_probs"].tolist(),
                versions=versions,
                reward=row["extra_fields"]["trace_reward"],
            )
        )
    return found


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_the_rows_keep_the_contract(check: Check) -> None:
    run_check(check, Subject(convert=converted, read=read))
