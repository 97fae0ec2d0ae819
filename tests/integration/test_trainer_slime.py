"""Groups as slime's samples, and slime's rollout function at a real server, called back over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

from gangline.domain.errors import InvalidGroup, InvalidRequest, LeaseLost, PortUnavailable
from gangline.server.run import serving
from gangline.server.service.callbacks import signature
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.train.collecting.collector import ReplenishingCollector, informative
from gangline.train.collecting.groups import Group, ValiditySettings
from gangline.train.trainers import slime as adapter
from gangline.train.trainers.callbacks import CallbackClient, receiving
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request
from support.slime.types import Sample, Status, normalised
from support.training.samples import group, session, trace

TOKEN = "control-secret"
ARGS = SimpleNamespace(
    reward_key=None,
    advantage_estimator="grpo",
    rewards_normalization=True,
    grpo_std_normalization=True,
    rollout_batch_size=2,
    n_samples_per_prompt=2,
    global_batch_size=4,
    rollout_temperature=1.0,
)


def rollout_of(*given: Any, **options: Any) -> adapter.SlimeRollout:
    """Of nodes that have their engines already."""
    return adapter.SlimeRollout(*given, supply=None, **options)


def to_samples(groups: Any, num_samples: int) -> list[list[list[Sample]]]:
    return adapter.to_samples(groups, num_samples, sample_type=Sample)


def flat(batch: list[list[list[Sample]]]) -> list[Sample]:
    return [sample for group in batch for session in group for sample in session]


def read(batch: list[list[list[Sample]]]) -> list[ReadRow]:
    """By length and mask, as slime's rollout manager and trainer do."""
    found = list[ReadRow]()
    for sample in flat(batch):
        length, mask = sample.response_length, sample.loss_mask
        assert mask is not None
        assert sample.rollout_log_probs is not None
        assert len(mask) == len(sample.rollout_log_probs) == length
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        versions = np.full(length, -1)
        for version, start, end in sample.metadata["version_spans"]:
            versions[start:end] = version
        assert sample.weight_versions == [str(version) for version, _, _ in sample.metadata["version_spans"]]
        found.append(
            ReadRow(
                task_id=str(sample.group_index),
                session_id=str(sample.rollout_id),
                prompt_ids=sample.tokens[:-length],
                response_ids=sample.tokens[-length:],
                loss_mask=mask,
                logprobs=sample.rollout_log_probs,
                versions=versions.tolist(),
                reward=sample.get_reward_value(ARGS),
            )
        )
    return found


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_the_adapter_keeps_the_contract(check: Check) -> None:
    run_check(check, Subject(convert=to_samples, read=read, contract=adapter.CONTRACT))


def test_a_sample_says_what_slime_shows_of_it() -> None:
    first, _, third, _ = flat(to_samples([group(1.0, 0.0), group(0.0, 1.0)], 2))
    assert (first.group_index, first.index, third.group_index, third.index) == (0, 0, 1, 2)
    assert first.session_id == first.metadata["session_id"] == "s0"
    assert first.metadata["task_id"] == "task-1"
    assert isinstance(first.prompt, list)


@pytest.mark.parametrize("outcome", ["agent_timeout", "turn_limit", "token_limit"])
def test_a_session_that_was_cut_short_is_truncated(outcome: str) -> None:
    cut = session("s0", 0.0, outcome=outcome)
    long = session("s1", 0.0, trace(finish_reason="length"))
    samples = flat(to_samples([Group("task-1", (cut, long, session("s2", 1.0)))], 3))
    assert [sample.status for sample in samples] == [Status.TRUNCATED, Status.TRUNCATED, Status.COMPLETED]


def test_a_slime_that_cannot_take_all_is_refused() -> None:
    @dataclass
    class Old:
        tokens: list[int]

    Old.Status = Status  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match=r"has no .*loss_mask.*weight_versions in its Sample"):
        adapter.to_samples([group(1.0, 0.0)], 2, sample_type=Old)


def test_without_slime_it_says_where_to_run() -> None:
    with pytest.raises(ImportError, match="is another"):
        adapter.to_samples([group(1.0, 0.0)], 2)


@pytest.mark.parametrize("divided", [True, False])
def test_rewards_are_compared_as_by_slime_where_sessions_have_one_trace(divided: bool) -> None:
    args = SimpleNamespace(**{**vars(ARGS), "grpo_std_normalization": divided})
    samples = flat(to_samples([group(1.0, 0.2, 0.0), group(0.5, 0.5, 0.5)], 3))
    raw, compared = adapter.post_process_rewards(args, samples)
    assert raw == [1.0, 0.2, 0.0, 0.5, 0.5, 0.5]
    assert compared == pytest.approx(normalised(samples, 3, divided=divided), abs=1e-9)


def test_a_session_of_several_traces_weighs_one_when_rewards_are_compared() -> None:
    several = session("s0", 1.0, trace(), trace(turns=[(12, 2)]), trace(turns=[(13, 2)]))
    one, other = Group("task-1", (several, session("s1", 0.0))), group(0.0, 1.0)
    samples = flat(to_samples([one, other], 2))
    _, compared = adapter.post_process_rewards(ARGS, samples)
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert compared == pytest.approx([half] * 3 + [-half] + [-half, half])


def test_rewards_that_slime_does_not_compare_stay_as_they_are() -> None:
    args = SimpleNamespace(**{**vars(ARGS), "advantage_estimator": "ppo"})
    assert adapter.post_process_rewards(args, flat(to_samples([group(1.0, 0.0)], 2))) == ([1.0, 0.0], [1.0, 0.0])


def test_an_estimator_whose_baseline_is_unknown_is_refused(tmp_path: Path) -> None:
    args = SimpleNamespace(**{**vars(ARGS), "advantage_estimator": "vapo"})
    with pytest.raises(InvalidRequest, match="'vapo' is not known here"):
        adapter.post_process_rewards(args, flat(to_samples([group(1.0, 0.0)], 2)))
    rollout = rollout_of("http://127.0.0.1:9", task_of, tmp_path, sample_type=Sample)
    with pytest.raises(InvalidRequest, match="'vapo' is not known here"):
        rollout(args, 0, Prompts())


def test_samples_of_one_session_share_a_rollout_id_that_no_other_has() -> None:
    several = session("s0", 1.0, trace(), trace(turns=[(12, 2)]))
    batch = to_samples([Group("task-1", (several, session("s1", 0.0))), group(0.0, 1.0)], 2)
    assert [[[one.rollout_id for one in samples] for samples in some] for some in batch] == [[[0, 0], [1]], [[2], [3]]]


def test_the_best_trace_of_a_good_session_takes_all_of_its_advantage() -> None:
    told = session("s0", 1.0, trace(reward=0.0), trace(turns=[(12, 2)], reward=1.0))
    samples = flat(to_samples([Group("task-1", (told, session("s1", 0.0)))], 2))
    raw, compared = adapter.post_process_rewards(ARGS, samples)
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert raw == [0.0, 1.0, 0.0]
    assert compared == pytest.approx([0.0, half, -half])


# The callback flow, at a real server.


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ServerClient]:
    options: dict[str, Any] = {"check_task": any_plugin, "callback_base_s": 0.02}
    async with (
        serving(data_dir=tmp_path / "server", control_token=TOKEN, **options) as running,
        ServerClient(running.url, TOKEN) as client,
    ):
        yield client


@asynccontextmanager
async def node_at(service: ServerClient, *rewards: float, broken: str = "", traces: int = 1) -> AsyncIterator[None]:
    """A node that gives the sessions of each task these rewards; the last of the task `broken` has none."""

    async def work() -> None:
        node = FakeNode(service)
        while True:
            for lease in await node.lease(wait_s=30.0):
                is_broken = lease.task_id == broken and lease.sample_index == len(rewards) - 1
                reward = None if is_broken else rewards[lease.sample_index]
                several = (trace(turns=[(10 + number, 2)]) for number in range(traces))
                trajectory = session(lease.session_id, reward, *several).trajectory
                with contextlib.suppress(LeaseLost):  # cancelled meanwhile, with what a call left unfinished
                    await node.finish([lease], reward=reward, trajectory=trajectory)

    working = asyncio.create_task(work())
    try:
        yield
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


@dataclass
class Prompts:
    """slime's data source."""

    num_taken: int = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        first = self.num_taken
        self.num_taken += num_samples
        return [[Sample(index=number)] * 2 for number in range(first, first + num_samples)]


def task_of(sample: Sample) -> dict[str, Any]:
    return request(f"prompt{sample.index}").model_dump(mode="json", exclude_unset=True)


@pytest.fixture
def token_env(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRAINER_KEY", TOKEN)
    return "TRAINER_KEY"


async def test_slime_collects_groups_as_callbacks_arrive(service: ServerClient, tmp_path: Path, token_env: str) -> None:
    rollout = rollout_of(
        service.url, task_of, tmp_path / "inbox", token_env=token_env, num_in_flight=3, sample_type=Sample
    )
    prompts = Prompts()
    async with node_at(service, 0.0, 1.0):
        first = await asyncio.to_thread(rollout, ARGS, 0, prompts)
        second = await asyncio.to_thread(rollout, ARGS, 1, prompts)
        samples = flat([*first, *second])
        assert [sample.reward for sample in samples] == [0.0, 1.0] * 4
        assert [sample.group_index for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len({sample.metadata["session_id"] for sample in samples}) == 8
        with pytest.raises(InvalidRequest, match="eval-function-path"):
            rollout(ARGS, 0, prompts, evaluation=True)
        await asyncio.to_thread(rollout.stop)
    rollout.stop()


async def test_slime_is_told_why_a_group_is_refused_and_goes_on(
    service: ServerClient, tmp_path: Path, token_env: str
) -> None:
    rollout = rollout_of(
        service.url, task_of, tmp_path / "inbox", token_env=token_env, num_in_flight=1, sample_type=Sample
    )
    prompts = Prompts()
    async with node_at(service, 1.0, 0.0, broken="prompt0"):
        with pytest.raises(InvalidGroup, match=r"1 of 2 sessions of prompt0 are valid .*it has no reward"):
            await asyncio.to_thread(rollout, ARGS, 0, prompts)
        samples = await asyncio.to_thread(rollout, ARGS, 0, prompts)
        assert [some[0][0].metadata["task_id"] for some in samples] == ["prompt1", "prompt2"]
        await asyncio.to_thread(rollout.stop)


async def test_slime_is_told_why_the_rollout_cannot_begin(tmp_path: Path) -> None:
    async with receiving(ServerClient("http://127.0.0.1:9"), tmp_path / "other", key=None) as taken:
        port = int(taken.url.split(":")[2].split("/")[0])
        rollout = rollout_of("http://127.0.0.1:9", task_of, tmp_path / "in", port=port, sample_type=Sample)
        with pytest.raises(PortUnavailable, match="in use"):
            await asyncio.to_thread(rollout, ARGS, 0, Prompts())
        rollout.stop()


def test_groups_may_not_shrink(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="groups of one size"):
        rollout_of("http://127.0.0.1:9", task_of, tmp_path, validity=ValiditySettings(on_invalid="shrink"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"global_batch_size": 3}, "would drop 1 of the 4"),
        ({"rollout_top_k": 20}, "--rollout-top-k 20 would be ignored"),
        ({"n_samples_per_prompt": 1, "global_batch_size": 2}, "every advantage would be 0"),
        ({"partial_rollout": True}, "add --use-tis or --use-rollout-logprobs"),
        ({"use_opd": True, "opd_type": "sglang"}, "use --opd-type megatron"),
        ({"custom_rm_path": "my.rm"}, "--custom-rm-path my.rm would be ignored: rewards come from the tasks"),
        ({"dynamic_sampling_filter_path": "my.filter"}, "give the rollout `admit`"),
    ],
)
def test_options_under_which_slime_would_train_wrongly_are_refused(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    rollout = rollout_of("http://127.0.0.1:9", task_of, tmp_path, sample_type=Sample)
    with pytest.raises(InvalidRequest, match=told):
        rollout(SimpleNamespace(**{**vars(ARGS), **changes}), 0, Prompts())


async def test_sessions_of_several_samples_need_rewards_compared_by_session(
    service: ServerClient, tmp_path: Path, token_env: str
) -> None:
    path = {"custom_reward_post_process_path": "gangline.train.trainers.slime.post_process_rewards"}
    rollout = rollout_of(
        service.url, task_of, tmp_path / "inbox", token_env=token_env, num_in_flight=1, sample_type=Sample
    )
    prompts = Prompts()
    async with node_at(service, 0.0, 1.0, traces=2):
        with pytest.raises(InvalidRequest, match="--custom-reward-post-process-path gangline"):
            await asyncio.to_thread(rollout, ARGS, 0, prompts)
        batch = await asyncio.to_thread(rollout, SimpleNamespace(**vars(ARGS), **path), 0, prompts)
        assert [[len(samples) for samples in some] for some in batch] == [[2, 2], [2, 2]]
        await asyncio.to_thread(rollout.stop)


async def finish(service: ServerClient, reward: float = 1.0) -> None:
    node = FakeNode(service)
    for lease in await node.lease(wait_s=30.0):
        await node.finish([lease], reward=reward, trajectory=session(lease.session_id, reward).trajectory)


async def delivered(service: ServerClient, task_id: str) -> None:
    async for event in service.events(after=0, task_id=task_id):
        if event.kind == "callback.delivered":
            return


async def test_a_group_is_stored_before_its_callback_is_acknowledged(service: ServerClient, tmp_path: Path) -> None:
    async with receiving(service, tmp_path / "inbox", key=TOKEN) as client:
        await client.submit(request("t"))
        await finish(service)
        await asyncio.wait_for(delivered(service, "t"), 30)
        assert [path.name for path in (tmp_path / "inbox").iterdir()] == ["t.msgpack"]
    # Another process, and a server that has forgotten: what was acknowledged is here.
    gone = CallbackClient(service, tmp_path / "inbox", key=TOKEN, secret=None, recheck_s=1.0)
    assert [one.reward for one in await gone.result("t")] == [1.0, 1.0]
    gone.forget("t")
    assert list((tmp_path / "inbox").iterdir()) == []
    assert [one.reward for one in await gone.result("t")] == [1.0, 1.0]  # the server still has it


async def test_a_task_submitted_as_to_polar_calls_back_too(service: ServerClient, tmp_path: Path) -> None:
    async with receiving(service, tmp_path / "inbox", key=TOKEN) as client:
        task = {"task_id": "t", "instruction": "do it", "num_samples": 2, "agent": {"harness": "shell"}}
        async with (
            aiohttp.ClientSession(headers={"X-Polar-Control-Token": TOKEN}) as http,
            http.post(f"{service.url}/rollout/task/submit", json={**task, "callback_url": client.url}) as reply,
        ):
            assert reply.status < 300
        await finish(service)
        assert (await asyncio.wait_for(client.wait("t"), 30)).ended
        assert len(to_samples([Group("t", tuple(await client.result("t")))], 2)[0]) == 2


async def post(url: str, body: bytes, key: str | None = TOKEN) -> int:
    headers = {} if key is None else {"X-Gangline-Signature": signature(key, body)}
    async with aiohttp.ClientSession() as http, http.post(url, data=BytesIO(body), headers=headers) as reply:
        return reply.status


async def test_only_the_server_can_say_that_a_task_has_ended(service: ServerClient, tmp_path: Path) -> None:
    async with receiving(service, tmp_path / "inbox", key=TOKEN) as client:
        await client.submit(request("t"))
        body = json.dumps({"task_id": "t", "status": "ended", "rewards": [99.0, 99.0]}).encode()
        assert await post(client.url, body, key=None) == 401
        assert await post(client.url, body, key="another") == 401
        assert await post(client.url, body) == 503  # it has not: there is no result to store
        for other in (b'{"task_id": "../../etc"}', b"[]", b"{", b'{"task_id": 1}'):
            assert await post(client.url, other) == 400
        assert await post(client.url, b" " * (16 * 1024**2 + 1)) == 413
        assert list((tmp_path / "inbox").iterdir()) == []


async def test_a_callback_that_comes_twice_changes_nothing(service: ServerClient, tmp_path: Path) -> None:
    async with receiving(service, tmp_path / "inbox", key=TOKEN) as client:
        tasks = iter([request("t"), request("t2")])
        collector = ReplenishingCollector(client, tasks, num_in_flight=1, admit=informative)
        async with collector, node_at(service, 1.0, 0.0):
            (first,) = await collector.collect(1)
            body = json.dumps({"task_id": "t"}).encode()
            assert await asyncio.gather(*(post(client.url, body) for _ in range(8))) == [204] * 8
            (second,) = await collector.collect(1)
    assert [first.task_id, second.task_id] == ["t", "t2"]


async def test_a_task_whose_callback_is_lost_is_found(service: ServerClient, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    async with receiving(service, tmp_path / "inbox", key=TOKEN, public_url=nobody, recheck_s=0.05) as client:
        await client.submit(request("t"))
        waiting = asyncio.create_task(client.wait("t"))
        await finish(service)
        assert (await asyncio.wait_for(waiting, 30)).ended
        assert [one.reward for one in await client.result("t")] == [1.0, 1.0]


async def test_a_task_may_be_signed_with_a_key_of_its_own(
    service: ServerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_TASK_KEY", "of-this-trainer")
    async with receiving(service, tmp_path / "inbox", key="of-this-trainer", secret="GANGLINE_TASK_KEY") as client:
        await client.submit({"task_id": "t", "instruction": "do it", "agent": {"harness": "shell"}})
        await finish(service)
        await asyncio.wait_for(delivered(service, "t"), 30)
        assert len(await client.result("t")) == 1
