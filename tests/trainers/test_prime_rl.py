"""Our rows in prime-rl itself, from a checkout named by GANGLINE_PRIME_RL: types, packer, files, loss and broadcasts.

    git clone https://github.com/PrimeIntellect-ai/prime-rl && GANGLINE_PRIME_RL=prime-rl make test-trainers

Last run with prime-rl at 559b447 on 2026-11-23.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gangline.domain.errors import InvalidRequest, NodeError
from gangline.domain.session import SessionResult
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.train.collecting.collector import PlainCollector
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import Algorithm, algorithm
from gangline.train.learning.forward import loss_inputs, token_logprobs
from gangline.train.learning.loss import policy_loss
from gangline.train.learning.masks import last_turns, outcome_weighted
from gangline.train.learning.packing import pack as pack_ours
from gangline.train.learning.samples import Mask, make_samples
from gangline.train.trainers.prime_rl import samples as adapter
from gangline.train.trainers.prime_rl.feed import feed
from gangline.train.trainers.prime_rl.samples import PrimeSample, PrimeSettings, pack, to_samples
from support.engines.expert_talks import twenty_thousand_tokens
from support.engines.mask_talks import TEMPERATURE, drawn_session
from support.engines.models import CONFIGS
from support.training.fakes import Engines, Service
from support.training.prime_rl_trainer import of_prime_rl, prime_loss, prime_rl_checkout, trainer_logprobs
from support.training.samples import group, session, trace

CHECKOUT = os.environ.get("GANGLINE_PRIME_RL")
pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="GANGLINE_PRIME_RL names no checkout of prime-rl"),
    pytest.mark.filterwarnings("ignore"),
]
GUIDE = Path(__file__).parents[2] / "docs/guides/trainers.md"
GRPO = algorithm("grpo")


@pytest.fixture(scope="module", autouse=True)
def prime_rl() -> Iterator[None]:
    with prime_rl_checkout(str(CHECKOUT)):
        yield


def settings(**changes: Any) -> PrimeSettings:
    return PrimeSettings.model_validate(
        {"num_samples": 2, "groups_per_step": 1, "seq_len": 200, "max_steps": 1, **changes}
    )


def packed(groups: list[Group], mask: Mask | None = None, *, by: Algorithm = GRPO, **changes: Any) -> list[list[Any]]:
    chosen = settings(**changes)
    return pack(to_samples(groups, chosen, by, *([] if mask is None else [mask])), chosen)


def several() -> list[Group]:
    """Four sessions, one of them with three traces, rows of unequal length."""
    long = session("s0", 1.0, trace(turns=[(10, 11, 2), (12, 2)]), trace(turns=[(12, 2)]), trace(turns=[(13, 2)]))
    other = Group("task-2", (session("s2", 0.25), session("s3", 0.5, trace(turns=[range(20, 34)]))))
    return [Group("task-1", (long, session("s1", 0.0, trace(turns=[(14, 15, 2)])))), other]


def read(found: list[PrimeSample]) -> list[ReadRow]:
    """By the mask of the micro-batch that prime-rl's packer makes of each sample."""
    rows = list[ReadRow]()
    for one in found:
        [[batch]] = pack([one], settings())
        [loss_mask, logprobs] = batch.loss_mask, batch.inference_logprobs
        prompt = len(one.row.prompt_ids)
        assert not any(loss_mask[:prompt])
        rows.append(
            ReadRow(
                task_id=one.row.task_id,
                session_id=one.row.session_id,
                prompt_ids=batch.input_ids[:prompt],
                response_ids=batch.input_ids[prompt:],
                loss_mask=[int(one) for one in loss_mask[prompt:]],
                logprobs=logprobs[prompt:],
                versions=one.row.versions.tolist(),
                reward=one.row.reward,
            )
        )
    return rows


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_the_adapter_keeps_the_contract(check: Check) -> None:
    def convert(groups: Any, num_samples: int) -> list[PrimeSample]:
        return to_samples(groups, settings(num_samples=num_samples), GRPO)

    run_check(check, Subject(convert=convert, read=read, contract=adapter.CONTRACT))


def test_a_sample_has_the_algorithms_advantage_on_every_trained_token() -> None:
    found = to_samples(several(), settings(), algorithm("dr_grpo", {"loss.aggregation": "token_mean"}))
    first = found[0].training_sample
    assert first.token_ids == [1, 4, 5, 10, 11, 2, 7, 1, 12, 2]
    assert first.mask == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 2
    assert first.logprobs == [0.0] * 3 + [-0.5] * 3 + [0.0] * 2 + [-0.5] * 2
    assert first.advantages == [0.0] * 3 + [0.5] * 3 + [0.0] * 2 + [0.5] * 2
    assert first.rl_weights is None
    assert [one.training_sample.advantages[3] for one in found] == [0.5, 0.5, 0.5, -0.5, -0.125, 0.125]


def test_routing_of_20_000_tokens_reaches_prime_rls_tensors_bit_by_bit(tmp_path: Path) -> None:
    """Through its own packer, its own bytes on the disk and its own loader."""
    routing, result = asyncio.run(twenty_thousand_tokens(tmp_path))
    chosen = settings(seq_len=40_000, router_replay=True, pad_to_multiple_of=8, num_samples=1 + 1)
    two = Group("t1", (result, renamed(result)))
    [[batch]] = pack(to_samples([two], chosen, GRPO)[:1], chosen)
    types = of_prime_rl("transports.rollouts.types")
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=types.MicroBatch)
    loader = object.__new__(of_prime_rl("trainer.rl.data").DataLoader)
    found = loader._micro_batch_to_tensor(batch)["routed_experts"][0].numpy()
    (trace,) = result.trajectory.traces if result.trajectory is not None else ()
    ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    assert len(ids) >= 20_000
    assert np.array_equal(found[: len(ids) - 1], routing.of(ids))
    assert not found[len(ids) - 1 :].any()
    assert len(found) == len(batch.input_ids)


def test_sampling_masks_are_in_prime_rls_form_where_it_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The type came after 559b447; it is written here as of prime-rl's main in September 2026, read on 2026-11-27."""
    result = asyncio.run(drawn_session(tmp_path))
    two = Group("t1", (result, renamed(result)))
    chosen = settings(sampling_replay=True, temperature=TEMPERATURE, num_samples=2, seq_len=4096)
    types = of_prime_rl("transports.rollouts.types")
    if not hasattr(types, "SamplingMask"):
        with pytest.raises(InvalidRequest, match="has no SamplingMask"):
            to_samples([two], chosen, GRPO)
        kinds = [("ids", bytes), ("counts", bytes)]
        monkeypatch.setattr(types, "SamplingMask", msgspec.defstruct("SamplingMask", kinds), raising=False)
        fields = [("sampling_mask", types.SamplingMask | None, None)]
        longer = msgspec.defstruct("TrainingSample", fields, bases=(types.TrainingSample,))
        monkeypatch.setattr(types, "TrainingSample", longer)
    for one in to_samples([two], chosen, GRPO):
        sample, mask = one.training_sample, one.row.sampling_mask
        counts = np.frombuffer(sample.sampling_mask.counts, np.int32)
        ids = np.frombuffer(sample.sampling_mask.ids, np.int32)
        assert len(counts) == len(sample.token_ids)
        assert mask is not None
        kept = np.split(ids, np.cumsum(counts)[:-1])
        for at, token in enumerate(sample.token_ids):
            assert sample.mask[at] == (len(kept[at]) > 0)
            assert not len(kept[at]) or token in kept[at]
        assert np.array_equal(ids, mask.ids)


def renamed(result: SessionResult) -> SessionResult:
    """The same session under another name, with another reward."""
    assert result.trajectory is not None
    traces = tuple(msgspec.structs.replace(one, session_id="s2", trace_id="s2.t0") for one in result.trajectory.traces)
    trajectory = msgspec.structs.replace(result.trajectory, session_id="s2", traces=traces)
    return msgspec.structs.replace(result, session_id="s2", trajectory=trajectory, reward=0.0)


def test_every_rank_gets_as_many_micro_batches_and_every_row_is_in_one() -> None:
    grid = packed(several(), seq_len=17, data_ranks=3, pad_to_multiple_of=4)
    assert len({len(rank) for rank in grid}) == 1
    rows = list[tuple[int, ...]]()
    for batch in (one for rank in grid for one in rank):
        assert len(batch.input_ids) % 4 == 0
        for start, end in itertools.pairwise([0, *np.cumsum(batch.sequence_lengths).tolist()]):
            if any(batch.loss_mask[start:end]):  # others fill up
                ids = zip(batch.input_ids[start:end], batch.loss_mask[start:end], strict=True)
                rows.append(tuple(token for token, trained in ids if trained))
    assert sorted(rows) == sorted(
        [(10, 11, 2, 12, 2), (12, 2), (13, 2), (14, 15, 2), (10, 11, 2), tuple(range(20, 34))]
    )


def test_a_row_that_prime_rl_would_cut_is_refused_or_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    longest = to_samples(several(), settings(), GRPO)[-1]
    [[cut]] = pack([longest], settings(seq_len=8))
    assert len(cut.input_ids) == 8  # it would
    with pytest.raises(InvalidRequest, match=r"s3/0 has 17 tokens, and seq_len is 16"):
        to_samples(several(), settings(seq_len=16), GRPO)
    with caplog.at_level(logging.WARNING):
        found = to_samples(several(), settings(seq_len=16, long_rows="leave_out"), GRPO)
    assert [one.row.trace_id for one in found] == ["s0/0", "s0/1", "s0/2", "s1/0", "s2/0"]
    assert found[-1].training_sample.advantages[3] == pytest.approx(-1.0, abs=1e-4)  # compared with the long one
    assert "prime_rl.row_left_out trace_id=s3/0" in caplog.text


def test_a_step_without_rows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="without a row"):
        packed([group(1.0, 0.0)], lambda one: last_turns(one, 0))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="sdpa").double().eval()


def exact(model: PreTrainedModel, groups: list[Group]) -> list[Group]:
    """The groups with the model's own log-probs: on the policy that is trained, every loss has the same gradient."""

    def of(one: Any) -> Any:
        ids = torch.tensor([[*one.prompt_ids.tolist(), *one.response_ids.tolist()]])
        with torch.no_grad():
            found = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        logprobs = (found[len(one.prompt_ids) - 1 :].numpy() * one.loss_mask).astype(np.float32)
        return trace(
            **{name: getattr(one, name) for name in one.__struct_fields__ if name != "response_logprobs"},
            response_logprobs=logprobs,
        )

    return [
        Group(
            one.task_id,
            tuple(session(each.session_id, each.reward, *map(of, each.trajectory.traces)) for each in one.sessions),
        )
        for one in groups
    ]


def half_as_much(one: Any) -> Any:
    return outcome_weighted(one, 0.5)


@pytest.mark.parametrize("aggregation", ["token_mean", "session_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("mask", [None, half_as_much], ids=["plain", "weighted"])
def test_prime_rls_loss_has_our_gradient(model: PreTrainedModel, aggregation: str, mask: Mask | None) -> None:
    groups = exact(model, several())
    chosen = algorithm("grpo", {"loss.aggregation": aggregation, "loss.correction.level": "none"})
    more = [] if mask is None else [mask]
    ours = pack_ours([sample for one in groups for sample in make_samples(one, chosen, *more)])
    expected = policy_loss(loss_inputs(ours, token_logprobs(model, ours)), chosen.loss).loss  # type: ignore[arg-type]
    loader = object.__new__(of_prime_rl("trainer.rl.data").DataLoader)
    batches = [
        loader._micro_batch_to_tensor(one) for rank in packed(groups, *more, by=chosen, data_ranks=2) for one in rank
    ]
    scale = sum(int(one["loss_mask"].sum()) for one in batches)
    config = of_prime_rl("configs.trainer").DefaultLossConfig(kl_tau=0.0)
    found = sum(prime_loss(one, trainer_logprobs(model, one).float(), config, scale) for one in batches)
    assert float(found) == pytest.approx(float(expected), abs=1e-5)
    weights = list(model.parameters())
    pairs = zip(torch.autograd.grad(expected, weights), torch.autograd.grad(found, weights), strict=True)  # type: ignore[arg-type]
    assert all(torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5) for mine, theirs in pairs)


def test_the_guides_configuration_is_read_by_prime_rls_own_loader() -> None:
    [block] = re.findall(r"```toml\n(# trainer\.toml\n.*?)```", GUIDE.read_text(), re.DOTALL)
    config = of_prime_rl("configs.trainer").TrainerConfig(**tomllib.loads(block))
    assert (config.rollout_transport.type, config.weight_broadcast.type) == ("filesystem", "filesystem")
    assert (config.model.seq_len, config.max_steps, config.model.cp) == (32768, 200, 1)


# The loop, with files.


class Broadcasts(Engines):
    """Keeps what was in each folder of weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.files: list[set[str]] = []

    async def push(self, save: Any, version: int) -> Any:
        path = self.folder / f"pushed{version}"
        path.mkdir(parents=True, exist_ok=True)

        def into(_: Path) -> None:
            save(path)

        profile = await super().push(into, version)
        self.files.append({one.name for one in path.iterdir()})
        return profile


def broadcast(output_dir: Path, step: int) -> None:
    folder = output_dir / "broadcasts" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "STABLE").touch()


async def test_every_broadcast_is_loaded_before_the_next_batch_is_collected(tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    engines = Broadcasts(tmp_path)
    chosen = settings(num_samples=2, groups_per_step=2, max_steps=2, data_ranks=2, first_version=5)
    receive = of_prime_rl("transports.rollouts.filesystem").FileSystemMicroBatchReceiver
    ranks = [receive(output_dir, rank, 1) for rank in range(2)]
    async with (
        PlainCollector(Service(engines), ({"task_id": f"task-{n}"} for n in itertools.count())) as collector,
        asyncio.TaskGroup() as running,
        asyncio.timeout(30),
    ):
        running.create_task(feed(output_dir, collector, engines, chosen, GRPO))
        await asyncio.sleep(0.3)
        assert engines.pushed == []  # no weights yet, so nothing is collected
        for step in (1, 2):
            broadcast(output_dir, step - 1)
            while not all(rank.can_receive() for rank in ranks):
                await asyncio.sleep(0.02)
            batches = [rank.receive() for rank in ranks]
            assert len(batches[0]) == len(batches[1])
            lines = (output_dir / "rollouts" / f"step_{step}" / "sources.jsonl").read_text().splitlines()
            assert [json.loads(line)["versions"] for line in lines] == [[[4 + step, 0, 3]]] * 4
        broadcast(output_dir, 2)
    assert [version for version, _ in engines.pushed] == [5, 6, 7]
    assert engines.files == [{"model.safetensors"}] * 3


async def test_engines_may_be_down_for_a_while(tmp_path: Path) -> None:
    engines = Broadcasts(tmp_path)
    engines.num_down = 1

    async def begin() -> None:
        await asyncio.sleep(0.1)
        for step in (0, 1):
            broadcast(tmp_path / "run", step)

    async with PlainCollector(Service(engines), ({"task_id": f"task-{n}"} for n in itertools.count())) as collector:
        await asyncio.gather(feed(tmp_path / "run", collector, engines, settings(), GRPO), begin())
    assert [version for version, _ in engines.pushed] == [1, 2]


async def test_stale_groups_are_left_out_and_others_collected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engines = Broadcasts(tmp_path)
    found = [
        [Group("old", tuple(session(f"o{n}", float(n), trace(versions=[v])) for n, v in enumerate((9, 7))))],
        [Group("new", tuple(session(f"n{n}", float(n), trace(versions=[8])) for n in range(2)))],
    ]

    class Given:
        async def collect(self, num_groups: int) -> list[Group]:
            assert num_groups == 1
            return found.pop(0)

    async def late() -> None:
        await asyncio.sleep(0.1)
        for step in (0, 1):
            broadcast(tmp_path / "run", step)

    with caplog.at_level(logging.WARNING):
        await asyncio.gather(feed(tmp_path / "run", Given(), engines, settings(first_version=9), GRPO), late())
    assert "prime_rl.group_left_out task_id=old" in caplog.text
    lines = (tmp_path / "run" / "rollouts" / "step_1" / "sources.jsonl").read_text().splitlines()
    assert [json.loads(line)["trace_id"] for line in lines] == ["n0/0", "n1/0"]


async def test_an_adapter_and_a_late_broadcast_are_refused(tmp_path: Path) -> None:
    class Nobody:
        async def collect(self, num_groups: int) -> list[Group]:
            raise AssertionError

    async def as_adapter() -> None:
        await asyncio.sleep(0.1)
        broadcast(tmp_path / "run", 0)
        (tmp_path / "run/broadcasts/step_0/adapter_config.json").write_text("{}")

    engines = Broadcasts(tmp_path)
    with pytest.raises(InvalidRequest, match=r"train without model\.lora"):
        await asyncio.gather(as_adapter(), feed(tmp_path / "run", Nobody(), engines, settings(), GRPO))
    with pytest.raises(NodeError, match=r"wrote no .*step_0/STABLE within 0\.1 s"):
        await feed(tmp_path / "empty", Nobody(), engines, settings(patience_s=0.1), GRPO)
