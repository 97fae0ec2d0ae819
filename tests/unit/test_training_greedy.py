"""A greedy session alongside each task, the baseline of ReMax."""

from __future__ import annotations

from itertools import islice

import pytest

from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.task import TaskRequest
from gangline.train.collecting.collector import PlainCollector, informative
from gangline.train.collecting.groups import Greedy, ValiditySettings
from gangline.train.collecting.side_rollouts.greedy_runs import GreedyRuns, greedy_task
from gangline.train.collecting.side_rollouts.tasks import Beside
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.samples import make_samples
from support.training.samples import group
from support.training.service import FakeService

TASK = {"task_id": "t0", "instruction": "add", "num_samples": 2, "agent": {"harness": "shell"}}


def collecting(service: FakeService, on_invalid: str = "refuse", **options: object) -> PlainCollector:
    validity = ValiditySettings.model_validate({"on_invalid": on_invalid})
    beside = Beside(greedy=GreedyRuns(service, validity=validity, retry_s=0.0))
    return PlainCollector(service, islice([TASK], 1), beside=beside, validity=validity, **options)  # type: ignore[arg-type]


def test_a_greedy_task_is_one_session_of_the_task_at_temperature_0() -> None:
    rules = {"temperature": {"min": 0.5}, "top_p": {"max": 0.9}}
    body = greedy_task({**TASK, "capture": {"seed": 3, "sampling": rules}})
    assert (body["task_id"], body["num_samples"], body["instruction"]) == ("t0.greedy", 1, "add")
    sampling = {"temperature": {"override": 0.0}, "top_p": {"max": 0.9}}
    assert body["capture"] == {"seed": 3, "sampling": sampling}
    assert TaskRequest.model_validate(greedy_task(TaskRequest.model_validate(TASK), 2)).task_id == "t0.greedy.run2"


async def test_a_group_comes_with_the_reward_of_its_greedy_session() -> None:
    service = FakeService()
    service.rewards |= {"t0": (1.0, 0.0), "t0.greedy": (0.25,)}
    async with collecting(service) as collector:
        (found,) = await collector.collect(1)
    assert service.submitted == ["t0", "t0.greedy"]
    assert (found.greedy, found.rewards, service.cancelled) == (Greedy(0.25, 3), (1.0, 0.0), [])
    samples = make_samples(found, algorithm("remax"))
    assert [float(one.advantages[0]) for one in samples] == [0.75, -0.25]


async def test_the_greedy_session_of_a_group_that_is_not_wanted_is_cancelled() -> None:
    service = FakeService()
    service.rewards["t0"] = (1.0, 1.0)
    async with collecting(service, admit=informative) as collector:
        with pytest.raises(Exception, match="tasks ended"):
            await collector.collect(1)
    assert service.cancelled == ["t0.greedy"]


@pytest.mark.parametrize("on_invalid", ["refuse", "shrink", "resubmit"])
async def test_a_greedy_session_without_a_reward_is_treated_as_the_groups_are(on_invalid: str) -> None:
    service = FakeService()
    service.rewards |= {"t0": (1.0, 0.0), "t0.greedy": (None,), "t0.greedy.run2": (0.5,)}
    async with collecting(service, on_invalid) as collector:
        if on_invalid == "resubmit":
            assert (await collector.collect(1))[0].greedy == Greedy(0.5, 3)
            return
        reason = r"greedy session of t0.greedy.*not valid" if on_invalid == "refuse" else "tasks ended"
        with pytest.raises(Exception, match=reason):
            await collector.collect(1)


def test_remax_without_a_greedy_session_says_how_to_get_one() -> None:
    with pytest.raises(InvalidGroup, match="needs a greedy session alongside task-1"):
        make_samples(group(1.0, 0.0), algorithm("remax"))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"dynamic_sampling": True}, "teach without a baseline"),
        ({"advantage.scale": "deviation"}, "set scale"),
        ({"turn_credit.weight": 0.5}, "is of sessions"),
    ],
)
def test_settings_that_do_not_go_with_a_greedy_baseline_are_refused(overrides: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        algorithm("remax", overrides)
