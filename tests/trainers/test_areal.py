"""Our workflow in AReaL itself, from a checkout named by GANGLINE_AREAL.

    git clone https://github.com/inclusionAI/AReaL && GANGLINE_AREAL=AReaL make test-trainers

Its grouping, checks and stacking of trajectories, its client of SGLang, and its advantages run; engines, and what wants
a GPU, are absent. Last run with AReaL at 4aef98d on 2026-12-01.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.session import SessionResult
from gangline.models.engine_server.sampler import SampleRequest
from gangline.serving.embedded.server import create_sampler
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.train.collecting.groups import Group, trainable_traces
from gangline.train.trainers import areal as adapter
from support.training.absent_modules import importable
from support.training.episodes import BROKEN, HandedOut, block_of_guide, in_letters, one_task, service_with_node
from support.training.samples import group, session, trace
from support.training.verl_experiment import write_model

CHECKOUT = os.environ.get("GANGLINE_AREAL")
pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="GANGLINE_AREAL names no checkout of AReaL"),
    pytest.mark.filterwarnings("ignore"),
]
ENGINES = ("sglang", "vllm", "megatron", "mbridge", "awex", "nvidia", "pynvml", "blosc", "numba", "uvloop", "redis")
TRACKERS = ("wandb", "swanlab", "trackio", "tensorboardX", "tabulate", "setproctitle", "pebble", "hydra", "einops")
AGENTS = ("litellm", "qwen_agent", "agents", "claude_agent_sdk", "anthropic", "openai", "math_verify", "mathruler")
REST = ("torchdata", "aiofiles", "pybase64", "word2number")


@pytest.fixture(scope="module", autouse=True)
def areal() -> Iterator[None]:
    with importable(str(CHECKOUT), *ENGINES, *TRACKERS, *AGENTS, *REST):
        yield


def gconfig(**changes: Any) -> Any:
    make = importlib.import_module("areal.api.cli_args").GenerationHyperparameters
    return make(**{"max_new_tokens": 64, "max_tokens": 512, **changes})


def workflow(url: str = "http://127.0.0.1:9", model: str = "", **changes: Any) -> Any:
    """As a user's."""
    base = importlib.import_module("areal.api.workflow_api").RolloutWorkflow

    class Workflow(adapter.SessionWorkflow, base):
        def task_of(self, data: dict[str, Any]) -> dict[str, Any]:
            return {**one_task(), "instruction": data["question"]}

    return Workflow(gconfig(**changes), model, url, ready_within_s=60)


def grouped(flow: Any, num_samples: int, engine: Any = None) -> dict[str, Any]:
    """By AReaL's own wrapper, and judged by its own check."""
    remote = importlib.import_module("areal.infra.remote_inf_engine")
    wrapped = remote.GroupedRolloutWorkflow(flow, num_samples, logging.getLogger("areal"))
    found = asyncio.run(wrapped.arun_episode(engine, {"question": "say something"}))
    importlib.import_module("areal.infra.workflow_executor").check_trajectory_format(found, batch_size=num_samples)
    return found


def of_group(one: Group, num_samples: int, **changes: Any) -> dict[str, Any]:
    flow = workflow(**changes)
    flow.episodes = HandedOut(one)
    return grouped(flow, num_samples)


def convert(groups: Sequence[Group], num_samples: int) -> list[tuple[Group, dict[str, Any]]]:
    return [(one, of_group(one, num_samples)) for one in groups]


def read(batch: list[tuple[Group, dict[str, Any]]]) -> list[ReadRow]:
    """From AReaL's stacked tensors, by its attention mask. Where the prompt ends is the session's."""
    return [_row(one, result, place, found) for one, found in batch for place, result in enumerate(one.sessions)]


def _row(one: Group, result: SessionResult, place: int, found: dict[str, Any]) -> ReadRow:
    start = len(trainable_traces(result)[0].prompt_ids)
    row = {name: values[place, found["attention_mask"][place]] for name, values in found.items() if values.ndim == 2}
    assert not row["loss_mask"][:start].any()
    assert not row["logprobs"][:start].any()
    assert (row["versions"][:start] == -1).all()
    return ReadRow(
        task_id=one.task_id,
        session_id=result.session_id,
        prompt_ids=row["input_ids"][:start].tolist(),
        response_ids=row["input_ids"][start:].tolist(),
        loss_mask=row["loss_mask"][start:].tolist(),
        logprobs=row["logprobs"][start:].tolist(),
        versions=row["versions"][start:].tolist(),
        reward=found["rewards"][place].item(),
    )


ELSEWHERE = {
    "refuses_a_group_that_is_not_whole": "test_a_group_with_a_sample_that_broke_is_an_error_after_three_runs",
    "keeps_a_turn_of_which_a_part_is_not_trained_on": "test_every_trained_token_has_an_advantage_in_areals_own_code",
    "masks_turns_that_were_not_sampled_from_what_their_log_probs_are_of": "the same, of rows that end with a mask",
}
"""AReaL makes the groups, and rows end with their last trained token."""


@pytest.mark.parametrize(
    "check", [one for one in checks() if one.__name__ not in ELSEWHERE], ids=lambda one: one.__name__
)
def test_the_adapter_keeps_the_contract(check: Check) -> None:
    run_check(check, Subject(convert=convert, read=read, contract=adapter.CONTRACT, one_trace_per_session=True))


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_group_with_a_sample_that_broke_is_an_error_after_three_runs(broken: SessionResult) -> None:
    """None would leave AReaL with a group of one."""
    flow = workflow()
    flow.episodes = HandedOut(Group("task-1", (session("s0", 1.0), broken)))
    with pytest.raises(InvalidGroup, match="could not be trained on, 3 times"):
        grouped(flow, 2)
    assert len(flow.episodes.submitted) == 4


@pytest.mark.parametrize("mask", [(1, 1, 1, 1), (0, 1, 1, 0), (1, 0, 0, 0)], ids=str)
def test_every_trained_token_has_an_advantage_in_areals_own_code(mask: tuple[int, ...]) -> None:
    """`PPOActor.compute_advantages` puts the reward on a row's last token, and loses it where that is masked."""
    weights = np.array(mask, np.int8)
    partly = trace(
        turns=[(10, 11, 12, 2)],
        loss_mask=weights,
        response_logprobs=-0.5 * weights.astype(np.float32),
        response_versions=np.where(weights == 1, 0, -1).astype(np.int32),
    )
    found = of_group(Group("task-1", (session("s0", 1.0, partly), session("s1", 0.0))), 2)
    arguments = importlib.import_module("areal.api.cli_args")
    norm = arguments.NormConfig(mean_level="group", std_level=None, group_size=2)
    settings = arguments.PPOActorConfig(
        experiment_name="e", trial_name="t", reward_norm=norm, adv_norm=None, kl_ctl=0.0
    )
    actor = importlib.import_module("areal.trainer.ppo.actor").PPOActor(settings, None)
    [data] = actor.compute_advantages([found])
    scaled = settings.reward_scaling * 0.5
    for place, advantage in enumerate((scaled, -scaled)):
        trained = data["loss_mask"][place].bool()
        assert data["advantages"][place][trained].tolist() == pytest.approx([advantage] * int(trained.sum()))
    assert data["loss_mask"][0].sum() == sum(mask)
    assert data["logprobs"][0].sum() == pytest.approx(-0.5 * sum(mask))


@pytest.mark.parametrize("wrong", [{"greedy": True}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}], ids=str)
def test_sampling_from_a_part_of_the_vocabulary_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="whole vocabulary"):
        workflow(**wrong)


def test_log_probs_of_another_temperature_are_refused() -> None:
    with pytest.raises(InvalidGroup, match=r"of temperature 1, and the trainer's are of 0\.5"):
        of_group(group(1.0), 1, temperature=0.5)
    vllm = importlib.import_module("areal.engine.vllm_remote").VLLMBackend()
    with pytest.raises(InvalidRequest, match="log-probs of temperature 1, whatever it samples at"):
        grouped(workflow(temperature=0.5), 1, SimpleNamespace(backend=vllm))


def test_areal_resolves_the_guides_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `prepare_batch` does, anew for each step: the engine is served once."""
    (tmp_path / "my_workflow.py").write_text(block_of_guide("# my_workflow.py"))
    monkeypatch.syspath_prepend(tmp_path)
    kwargs: dict[str, Any] = {}
    given: dict[str, Any] = {"trainer": SimpleNamespace(train=kwargs.update)}
    exec(block_of_guide("workflow_kwargs="), given | {"config": SimpleNamespace(gconfig=gconfig(), tokenizer_path="")})
    remote = importlib.import_module("areal.infra.remote_inf_engine")
    engine = remote.RemoteInfEngine(importlib.import_module("areal.api.cli_args").InferenceEngineConfig(), None)
    engine.logger = logging.getLogger("areal")
    first, second = (engine._resolve_workflow(kwargs["workflow"], kwargs["workflow_kwargs"], 4) for _ in range(2))
    assert first.group_size == 4
    assert first.workflow.episodes is second.workflow.episodes
    assert first.workflow.task_of({"question": "say", "task": {"timeout_seconds": 9}})["instruction"] == "say"


async def test_sessions_are_answered_by_areals_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole service, whose node has no other engine; AReaL's client of SGLang, whose first answers are aborted."""
    model = str(write_model(tmp_path / "model"))
    sampler = create_sampler(model, threads=1, max_context=512)
    remote = importlib.import_module("areal.infra.remote_inf_engine")
    arguments = importlib.import_module("areal.api.cli_args")
    engine = remote.RemoteInfEngine(
        arguments.InferenceEngineConfig(),
        importlib.import_module("areal.engine.sglang_remote").SGLangBackend(),
    )
    engine.addresses = ["127.0.0.1:1"]
    engine._workflow_executor = SimpleNamespace(is_paused=lambda: False)
    sent = list[dict[str, Any]]()

    async def answer(payload: dict[str, Any], **_: Any) -> dict[str, Any]:
        """As SGLang would over HTTP; one in two calls ends after its first token, for new weights."""
        sent.append(payload)
        params = payload["sampling_params"]
        is_aborted = len(sent) % 2 and params["max_new_tokens"] > 1
        request = SampleRequest(
            prompt_ids=payload["input_ids"],
            max_tokens=1 if is_aborted else params["max_new_tokens"],
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=params["top_k"] if params["top_k"] < 1000 else 0,
            frequency_penalty=params["frequency_penalty"],
            stop_ids=frozenset(params["stop_token_ids"]),
        )
        tokens = await in_letters(sampler, request)
        if is_aborted:
            engine.set_version(engine.get_version() + 1)
        reason = "abort" if is_aborted else tokens[-1].finish_reason
        return {
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [(token.logprob, token.token_id, None) for token in tokens],
            }
        }

    monkeypatch.setattr(remote, "arequest_with_retry", answer)
    async with service_with_node(tmp_path) as (url, _):
        flow = workflow(url, model, temperature=0.7)
        try:
            found = await flow.arun_episode(engine, {"question": "say something"})
        finally:
            await flow.episodes.close()
            await sampler.close()
    assert found["loss_mask"].sum() > 0
    trained = found["loss_mask"].bool()
    assert (found["logprobs"][trained] < 0).all()
    assert not found["logprobs"][~trained].any()
    versions = found["versions"][trained].tolist()
    assert versions == sorted(versions)
    assert versions[0] >= 0
    assert len(set(versions)) > 1
    assert (found["versions"][~trained] == -1).all()
    assert {
        payload["sampling_params"]["temperature"] for payload in sent if payload["sampling_params"]["top_k"] > 1
    } == {0.7}
