"""What TRL is handed of groups, and what is refused before it is asked for anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from gangline.domain.conversation import SamplingParams
from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.trajectory import SharedPrefix, Trajectory
from gangline.train.collecting.groups import Group
from gangline.train.trainers.trl import ServiceRollouts, rollout_rows, session_reward
from support.training.samples import EXACT, session, trace
from support.training.service import FakeService
from support.training.trl_training import NoEngines, connecting


def test_a_session_is_a_row_with_all_that_its_trace_has() -> None:
    several_turns = trace(turns=((10, 2), (11, 12, 2)), between=(7, 8), versions=(3, 4))
    rows = rollout_rows([Group("a", (session("a0", 1.0, several_turns), session("a1", 0.0)))], 2)
    assert rows.keys() == {"prompt_ids", "completion_ids", "logprobs", "env_mask", "versions", "session"}
    assert rows["prompt_ids"] == [[1, 4, 5], [1, 4, 5]]
    assert rows["completion_ids"] == [[10, 2, 7, 8, 11, 12, 2], [10, 11, 2]]
    assert rows["env_mask"] == [[1, 1, 0, 0, 1, 1, 1], [1, 1, 1]]
    assert rows["logprobs"][0] == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5, -0.5]
    assert rows["versions"][0] == [3, 3, -1, -1, 4, 4, 4]
    assert session_reward(session=rows["session"], prompts=[], completions=[]) == [1.0, 0.0]


def test_turns_that_were_drawn_from_another_distribution_are_masked_or_refused() -> None:
    cut = msgspec.structs.replace(EXACT, logprobs="processed", sampling=SamplingParams(top_p=0.9))
    side_call = trace(turns=((10, 2), (11, 2)), between=(7,), certificates=(cut, EXACT))
    rows = rollout_rows([Group("a", (session("a0", 1.0, side_call), session("a1", 0.0)))], 2)
    assert rows["env_mask"][0] == [0, 0, 0, 1, 1]
    assert rows["logprobs"][0] == [0.0, 0.0, 0.0, -0.5, -0.5]
    nothing_else = session("a0", 1.0, trace(certificates=(cut,)))
    with pytest.raises(InvalidGroup, match=r"top_p 0\.9: set capture\.sampling\.top_p\.override: 1 in the tasks"):
        rollout_rows([Group("a", (nothing_else, session("a1", 0.0)))], 2)


def test_a_prompt_that_another_trace_keeps_is_written_out() -> None:
    kept = trace(loss_mask=np.zeros(3, np.int8), untrainable="log-probs missing")
    one = session("a0", 1.0, kept, trace(prompt_ids=np.array([9], np.int32)))
    assert one.trajectory is not None
    first, second = one.trajectory.traces
    shared = msgspec.structs.replace(second, shared_prefix=SharedPrefix(trace_id=first.trace_id, num_ids=5))
    trajectory: Trajectory = msgspec.structs.replace(one.trajectory, traces=(first, shared))
    one = msgspec.structs.replace(one, trajectory=trajectory)
    rows = rollout_rows([Group("a", (one, session("a1", 0.0)))], 2)
    assert rows["prompt_ids"][0] == [1, 4, 5, 10, 11, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accelerator": SimpleNamespace(num_processes=2)}, "2 processes train here"),
        ({"args": SimpleNamespace(num_generations=3)}, "4 rows are not whole groups of 3"),
    ],
    ids=["processes", "rows"],
)
def test_a_trainer_that_does_not_fit_is_told_so(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=1),
        "args": SimpleNamespace(num_generations=2),
        "state": SimpleNamespace(global_step=0),
    }
    service = FakeService()
    with (
        ServiceRollouts(connecting(service, NoEngines())) as rollouts,
        pytest.raises(InvalidRequest, match=message),
    ):
        rollouts(["any"] * 4, SimpleNamespace(**fields | changes))
    assert service.submitted == []
