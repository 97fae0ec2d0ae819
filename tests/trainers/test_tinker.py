"""tinker's own types, and functions of tinker-cookbook from a checkout named by GANGLINE_TINKER_COOKBOOK.

    git clone https://github.com/thinking-machines-lab/tinker-cookbook
    GANGLINE_TINKER_COOKBOOK=tinker-cookbook make test-trainers

tinker's service is not called: its clients are stand-ins with their signatures, over our embedded engine, that take and
return its real types. Last run with tinker 0.38.0 and the cookbook at 9dfcc3a on 2026-12-01.
"""

from __future__ import annotations

import importlib
import inspect
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gangline.domain.errors import EngineUnavailable, InvalidRequest
from gangline.models.engine_server.sampler import SampleRequest
from gangline.models.language.tokenizer import load_tokenizer  # noqa: F401 - the guide's
from gangline.serving.embedded.server import create_sampler
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.train.collecting.collector import PlainCollector  # noqa: F401 - the guide's
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import algorithm
from gangline.train.trainers import tinker as adapter
from gangline.train.trainers.own_engine import EngineSettings, Sampling, answering, num_rows  # noqa: F401 - the guide's
from gangline.train.trainers.tinker import TinkerEngine, TinkerRow, to_data
from gangline.wire.client.server import ServerClient  # noqa: F401 - the guide's
from support.sdk.talking_agent import tasks
from support.training.absent_modules import importable
from support.training.episodes import block_of_guide, in_letters, service_with_node
from support.training.samples import session, trace
from support.training.verl_experiment import write_model

tinker = pytest.importorskip("tinker")
pytestmark = pytest.mark.filterwarnings("ignore")
COOKBOOK = os.environ.get("GANGLINE_TINKER_COOKBOOK")
ABSENT = ("blobfile", "wandb", "chz", "termcolor", "tiktoken", "sympy", "pylatexenc", "scipy")
TWO_TURNS = trace(turns=[(10, 11, 2), (12, 2)])
PAIR = Group("task-1", (session("s0", 1.0, TWO_TURNS), session("s1", 0.0)))


def convert(groups: Sequence[Group], num_samples: int) -> list[TinkerRow]:
    return to_data(groups, num_samples, algorithm("grpo"), with_mask=True)


def read(rows: list[TinkerRow]) -> list[ReadRow]:
    """What tinker trains on, by its datum; the rest, for which it has no place, from beside it."""
    found = list[ReadRow]()
    for datum, row in rows:
        inputs = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
        ids = datum.model_input.to_ints()
        assert ids[1:] == inputs["target_tokens"][:-1].tolist()
        start = len(row.prompt_ids)
        assert not inputs["mask"][: start - 1].any()
        found.append(
            ReadRow(
                task_id=row.task_id,
                session_id=row.session_id,
                prompt_ids=[*ids, inputs["target_tokens"][-1]][:start],
                response_ids=inputs["target_tokens"][start - 1 :].tolist(),
                loss_mask=inputs["mask"][start - 1 :].astype(int).tolist(),
                logprobs=inputs["logprobs"][start - 1 :].tolist(),
                versions=row.versions.tolist(),
                reward=row.reward,
            )
        )
    return found


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_the_adapter_keeps_the_contract(check: Check) -> None:
    run_check(check, Subject(convert=convert, read=read, contract=adapter.CONTRACT))


@pytest.mark.skipif(COOKBOOK is None, reason="GANGLINE_TINKER_COOKBOOK names no checkout of tinker-cookbook")
def test_a_datum_is_that_of_the_cookbooks_own_trajectory() -> None:
    """Its `trajectory_to_data` of the same turns, and its own way of taking the mask away."""
    with importable(str(COOKBOOK), *ABSENT):
        types = importlib.import_module("tinker_cookbook.rl.types")
        action = importlib.import_module("tinker_cookbook.completers").TokensWithLogprobs
        data = importlib.import_module("tinker_cookbook.rl.data_processing")
        turns, ids = list[Any](), [*TWO_TURNS.prompt_ids.tolist(), *TWO_TURNS.response_ids.tolist()]
        for span in TWO_TURNS.spans:
            start, end = (len(TWO_TURNS.prompt_ids) + at for at in (span.start, span.end))
            logprobs = TWO_TURNS.response_logprobs[span.start : span.end].tolist()
            prompt = tinker.ModelInput.from_ints(ids[:start])
            turns.append(types.Transition(prompt, action(ids[start:end], logprobs), 0.0, episode_done=end == len(ids)))
        [theirs] = data.trajectory_to_data(types.Trajectory(turns, tinker.ModelInput.empty()), 0.5)
        ours, _ = convert([PAIR], 2)
        assert ours.datum.model_input.to_ints() == theirs.model_input.to_ints()
        assert ours.datum.loss_fn_inputs.keys() == theirs.loss_fn_inputs.keys()
        mask = theirs.loss_fn_inputs["mask"].to_numpy()
        for name in ("target_tokens", "logprobs", "mask"):
            found, wanted = (one.loss_fn_inputs[name] for one in (ours.datum, theirs))
            assert found.dtype == wanted.dtype
            assert found.tolist() == wanted.tolist(), name
        advantages = ours.datum.loss_fn_inputs["advantages"].to_numpy()
        assert (advantages != 0).tolist() == (mask != 0).tolist()
        assert len(set(advantages[mask != 0].tolist())) == 1
        bare = importlib.import_module("tinker_cookbook.rl.train")._remove_mask(ours.datum)
        assert bare.loss_fn_inputs.keys() == to_data([PAIR], 2, algorithm("grpo"))[0].datum.loss_fn_inputs.keys()


def test_advantages_of_a_group_are_those_of_the_algorithm() -> None:
    first, second = to_data([PAIR], 2, algorithm("grpo"))
    for one, sign in ((first, 1), (second, -1)):
        values = one.datum.loss_fn_inputs["advantages"].to_numpy()
        assert set(np.sign(values[values != 0]).tolist()) == {sign}


class SamplingClient:
    """A snapshot: `tinker.SamplingClient`, as far as it is called."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.asked = list[Any]()

    async def sample(self, *given: Any, **named: Any) -> Any:
        bound = inspect.signature(tinker.SamplingClient.sample).bind(self, *given, **named).arguments
        params = bound["sampling_params"]
        assert isinstance(params, tinker.types.SamplingParams)
        self.asked.append(params)
        request = SampleRequest(
            prompt_ids=bound["prompt"].to_ints(),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            seed=params.seed,
            stop_ids=frozenset(params.stop),
        )
        tokens = await in_letters(self._sampler, request, temperature=1.0)
        sequence = tinker.types.SampledSequence(
            stop_reason="stop" if tokens[-1].finish_reason == "stop" else "length",
            sequence_id="one",
            tokens_np=np.array([token.token_id for token in tokens], np.int32),
            logprobs_np=np.array([token.logprob for token in tokens], np.float32),
        )
        return tinker.types.SampleResponse(sequences=[sequence])


class TrainingClient:
    """`tinker.TrainingClient`, as far as it is called."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.clients = list[SamplingClient]()
        self.trained = list[list[Any]]()

    async def save_weights_and_get_sampling_client(self) -> SamplingClient:
        self.clients.append(SamplingClient(self._sampler))
        return self.clients[-1]

    async def forward_backward(self, *given: Any, **named: Any) -> None:
        bound = inspect.signature(tinker.TrainingClient.forward_backward).bind(self, *given, **named).arguments
        assert bound["loss_fn"] == "importance_sampling"
        self.trained.append(bound["data"])

    async def optim_step(self, *given: Any, **named: Any) -> None:
        inspect.signature(tinker.TrainingClient.optim_step).bind(self, *given, **named)


async def test_the_guides_loop_trains_on_sessions_whose_tokens_have_their_clients_version(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "model"))
    sampler = create_sampler(folder, threads=1, max_context=512)
    training = TrainingClient(sampler)
    batches = list[list[TinkerRow]]()

    def noted(*given: Any) -> list[TinkerRow]:
        batches.append(to_data(*given))
        return batches[-1]

    block = block_of_guide("TinkerEngine(load_tokenizer")
    small = {"32768": "512", "collect(32), 8": "collect(1), 2", "version + 101": "version + 3"}
    for written, here in {**small, 'token_env="TRAINER_KEY"': "ready_within_s=60"}.items():
        assert written in block
        block = block.replace(written, here)
    names = {**globals(), "to_data": noted, "training_client": training, "folder": folder, "token": None}
    names["tasks"] = ({**task, "num_samples": 2} for task in tasks())
    exec("async def loop():\n" + textwrap.indent(block, "    "), names)
    try:
        async with service_with_node(tmp_path) as (names["url"], _):
            await names["loop"]()
    finally:
        await sampler.close()
    assert len(training.clients) == 3
    assert training.trained == [[one.datum for one in batch] for batch in batches]
    for version, batch in enumerate(batches, 1):
        assert len({one.row.session_id for one in batch}) == 2
        for datum, row in batch:
            assert set(row.versions[row.loss_mask != 0].tolist()) == {version}
            logprobs = datum.loss_fn_inputs["logprobs"].to_numpy()[len(row.prompt_ids) - 1 :]
            assert ((logprobs != 0) == (row.loss_mask != 0)).all()


@pytest.mark.parametrize("wrong", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"min_tokens": 1}], ids=str)
async def test_what_tinker_does_not_take_is_refused(wrong: dict[str, Any]) -> None:
    engine = TinkerEngine(TinyTokenizer(), model_name="policy", context_length=64, num_ids=300)
    with pytest.raises(EngineUnavailable, match="call `sync` before sessions start"):
        await engine.reply(SampleRequest(prompt_ids=(1,), max_tokens=1))
    engine.use(object(), 1)
    with pytest.raises(InvalidRequest, match="neither penalties nor min_tokens"):
        await engine.reply(SampleRequest(prompt_ids=(1,), max_tokens=1, **wrong))
