"""Our executor in OpenRLHF itself, from a checkout named by GANGLINE_OPENRLHF.

    git clone https://github.com/OpenRLHF/OpenRLHF && GANGLINE_OPENRLHF=OpenRLHF make test-trainers

Its rollout actor, samples generator, experience maker and batches run; vLLM, DeepSpeed and the models are absent.
Sampling parameters and answers of vLLM are stand-ins with its names; tokens come from our embedded engine. Last run
with OpenRLHF at 3c3be62 on 2026-12-01; by hand on the same day its actor's `generate` with vLLM 0.32 for CPUs.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.session import SessionResult
from gangline.models.engine_server.sampler import SampleRequest
from gangline.serving.embedded.server import create_sampler
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.train.collecting.groups import Group, trainable_traces
from gangline.train.trainers import openrlhf as adapter
from support.training.absent_modules import importable
from support.training.episodes import BROKEN, HandedOut, block_of_guide, in_letters, one_task, service_with_node
from support.training.samples import group, session, trace
from support.training.verl_experiment import write_model

CHECKOUT = os.environ.get("GANGLINE_OPENRLHF")
pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="GANGLINE_OPENRLHF names no checkout of OpenRLHF"),
    pytest.mark.filterwarnings("ignore"),
]
ABSENT = ("vllm", "deepspeed", "pylatexenc", "flash_attn", "loralib", "optree", "bitsandbytes", "wandb", "torchmetrics")
MODELS = ("openrlhf.utils.deepspeed", "openrlhf.trainer.ray.launcher")
MAX_LEN = 512


@pytest.fixture(scope="module", autouse=True)
def openrlhf() -> Iterator[None]:
    with importable(str(CHECKOUT), *ABSENT, *MODELS, bare=["openrlhf.models"]):
        yield


@dataclass
class SamplingParams:
    """vLLM's, with the fields that OpenRLHF and the executor name."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    min_tokens: int = 1
    skip_special_tokens: bool = False
    logprobs: int | None = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)


def executor_class() -> type[Any]:
    """As the file of a user."""
    base = importlib.import_module("openrlhf.utils.agent").AgentExecutorBase

    class AgentExecutor(adapter.SessionExecutor, base):
        def __init__(self, url: str = "http://127.0.0.1:9") -> None:
            super().__init__(url, ready_within_s=60)

        def task_of(self, prompt: str, label: Any) -> dict[str, Any]:
            return {**one_task(), "instruction": prompt, "metadata": {"label": label}}

    return AgentExecutor


def actor(executor: Any, **fields: Any) -> Any:
    """OpenRLHF's rollout actor in this process, without a vLLM."""
    made = object.__new__(
        importlib.import_module("openrlhf.trainer.ray.vllm_engine").RolloutRayActor.__ray_metadata__.modified_class
    )
    made.executor = executor
    for name, value in fields.items():
        setattr(made, name, value)
    return made


async def responses(rollouts: Any, num_samples: int, params: Any = None, tokenizer: Any = None) -> list[dict[str, Any]]:
    return await rollouts.generate_responses(
        prompt="say something",
        label="any",
        sampling_params=params or SamplingParams(),
        max_length=MAX_LEN,
        hf_tokenizer=tokenizer,
        num_samples=num_samples,
    )


def experience(response: dict[str, Any]) -> Any:
    """By OpenRLHF's own function."""
    generator = importlib.import_module("openrlhf.trainer.ppo_utils.samples_generator").SamplesGenerator
    return generator._process_response_into_experience(None, response, max_len=MAX_LEN)


def of_group(one: Group, num_samples: int) -> list[Any]:
    executor = executor_class()()
    executor.episodes = HandedOut(one)
    return [experience(response) for response in asyncio.run(responses(actor(executor), num_samples))]


def convert(groups: Sequence[Group], num_samples: int) -> list[tuple[str, SessionResult, Any]]:
    return [
        (one.task_id, result, made)
        for one in groups
        for result, made in zip(one.sessions, of_group(one, num_samples), strict=True)
    ]


def read(batch: list[tuple[str, SessionResult, Any]]) -> list[ReadRow]:
    """By OpenRLHF's masks. Where the prompt ends, and versions, which have no place in it, are the session's."""
    rows = list[ReadRow]()
    for task_id, result, made in batch:
        [one] = trainable_traces(result)
        start = len(one.prompt_ids)
        assert not made.action_mask[0, : start - 1].any()
        rows.append(
            ReadRow(
                task_id=task_id,
                session_id=result.session_id,
                prompt_ids=made.sequences[0, :start].tolist(),
                response_ids=made.sequences[0, start:].tolist(),
                loss_mask=made.action_mask[0, start - 1 :].tolist(),
                logprobs=made.rollout_log_probs[0, start - 1 :].tolist(),
                versions=one.response_versions.tolist(),
                reward=made.rewards.item(),
            )
        )
    return rows


OF_GROUPS = "refuses_a_group_that_is_not_whole"
"""OpenRLHF makes the groups: `test_a_group_with_a_sample_that_broke_is_an_error`."""


@pytest.mark.parametrize("check", [one for one in checks() if one.__name__ != OF_GROUPS], ids=lambda one: one.__name__)
def test_the_adapter_keeps_the_contract(check: Check) -> None:
    run_check(check, Subject(convert=convert, read=read, contract=adapter.CONTRACT, one_trace_per_session=True))


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_group_with_a_sample_that_broke_is_an_error_after_three_runs(broken: SessionResult) -> None:
    executor = executor_class()()
    executor.episodes = HandedOut(Group("task-1", (session("s0", 1.0), broken)))
    with pytest.raises(InvalidGroup, match="could not be trained on, 3 times"):
        asyncio.run(responses(actor(executor), 2))
    assert len(executor.episodes.submitted) == 4


def test_a_sample_that_broke_once_runs_again() -> None:
    executor = executor_class()()
    broken = Group("task-1", (BROKEN["a fault of ours"],))
    executor.episodes = HandedOut(broken, again=session("s1", 0.25))
    [response] = asyncio.run(responses(actor(executor), 1))
    assert response["reward"] == 0.25
    assert len({task["task_id"] for task in executor.episodes.submitted}) == 2


def test_a_row_that_openrlhf_would_cut_is_refused() -> None:
    long = Group("task-1", (session("s0", 1.0, trace(turns=[(10,) * MAX_LEN])),))
    with pytest.raises(InvalidGroup, match="OpenRLHF would cut it at 512"):
        of_group(long, 1)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (SamplingParams(logprobs=None), "is_correction_enable"),
        (SamplingParams(temperature=0.5), "of temperature 1, and the trainer's are of 0.5"),
    ],
)
def test_settings_under_which_log_probs_are_others_are_refused(params: SamplingParams, why: str) -> None:
    executor = executor_class()()
    executor.episodes = HandedOut(group(1.0))
    with pytest.raises((InvalidGroup, InvalidRequest), match=why):
        asyncio.run(responses(actor(executor), 1, params))


def test_its_experience_maker_compares_our_samples_by_their_prompts() -> None:
    """`group_norm`, with the trained tokens alone, and micro-batches that its own code pads."""
    torch = importlib.import_module("torch")
    makers = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
    two = Group("a", (session("s0", 1.0, trace(turns=[(10, 2), (11, 12, 2)])), session("s1", 0.0)))
    samples = [*of_group(two, 2), *of_group(group(0.5, 0.5), 2)]
    args = SimpleNamespace(
        train=SimpleNamespace(dynamic_batch_enable=False),
        rollout=SimpleNamespace(micro_batch_size=2, n_samples_per_prompt=2),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm", gamma=1.0)),
    )
    maker = makers.RemoteExperienceMaker(
        None, None, None, None, SimpleNamespace(value=0.0), SimpleNamespace(args=args), SimpleNamespace(pad_token_id=0)
    )
    batches = maker.split_rollout_samples(samples)
    for batch in batches:
        batch.kl = torch.zeros_like(batch.rollout_log_probs)
    first, second = maker.compute_advantages_and_returns(batches)
    assert first.info["reward"].tolist() == [1.0, 0.0]
    trained = first.advantages * first.action_mask
    assert trained[0][first.action_mask[0].bool()].tolist() == pytest.approx([2**-0.5] * 5)
    assert trained[1][first.action_mask[1].bool()].tolist() == pytest.approx([-(2**-0.5)] * 3)
    assert not (second.advantages * second.action_mask).any()


def test_openrlhf_loads_the_guides_executor(tmp_path: Path) -> None:
    path = tmp_path / "my_agent.py"
    path.write_text(block_of_guide("# my_agent.py"))
    engine = importlib.import_module("openrlhf.trainer.ray.vllm_engine")
    executor = engine._load_agent_executor(str(path))
    assert executor.task_of("say", '{"agent": {"harness": "pi"}}') == {"instruction": "say", "agent": {"harness": "pi"}}
    options = (Path(str(CHECKOUT)) / "openrlhf/cli/train_ppo_ray.py").read_text()
    for option in re.findall(r"--[a-z_.]+", block_of_guide("--train.agent_func_path")):
        assert f'"{option}"' in options, option


async def test_sessions_are_answered_by_the_engine_of_the_actor(tmp_path: Path) -> None:
    """A whole service, whose node has no other engine."""
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(write_model(tmp_path / "model"))
    sampler = create_sampler(str(tmp_path / "model"), threads=1, max_context=MAX_LEN)
    asked = list[tuple[list[int], SamplingParams]]()

    async def generate(prompt_ids: list[int], params: SamplingParams) -> Any:
        asked.append((prompt_ids, params))
        request = SampleRequest(
            prompt_ids=prompt_ids,
            max_tokens=params.max_tokens or 1,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed,
            stop_ids=frozenset(params.stop_token_ids),
        )
        tokens = await in_letters(sampler, request)
        logprobs = [{token.token_id: SimpleNamespace(logprob=token.logprob)} for token in tokens]
        ids = [token.token_id for token in tokens]
        output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=tokens[-1].finish_reason)
        return SimpleNamespace(outputs=[output])

    async with service_with_node(tmp_path) as (url, node):
        executor = executor_class()(url)
        rollouts = actor(executor, generate=generate)
        try:
            found = await responses(rollouts, 3, SamplingParams(temperature=0.7), tokenizer)
            [backend] = await node.client.backends()
        finally:
            await executor.episodes.close()
            await sampler.close()
    assert backend.model == "policy"
    calls = [prompt for prompt, params in asked if params.temperature == 0.7]  # others are the node's probes
    assert len(calls) == 6
    for response in found:
        made = experience(response)
        ids = response["observation_tokens"]
        assert len(response["action_ranges"]) == 2
        for start, end in response["action_ranges"]:
            assert ids[:start] in calls
            assert all(value < 0 for value in response["rollout_log_probs"][start:end])
        assert made.action_mask.sum() == sum(end - start for start, end in response["action_ranges"])
        assert 0 <= response["reward"] <= 1
