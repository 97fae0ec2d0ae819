"""Harbor's rollouts as groups and results: which are delivered, with which outcome and reward."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import Failure, GanglineError, InvalidRequest, NotFound, ServerUnavailable
from gangline.domain.lifecycle import Outcome
from gangline.domain.session import Lease, SessionResult
from gangline.domain.task import BuilderSpec
from gangline.interop.harbor.relay.api import HarborRollout, refusal
from gangline.interop.harbor.relay.delivery import reward_of, session_result
from gangline.interop.harbor.relay.groups import affinity_of, alike, ended_groups, task_id_of
from gangline.interop.harbor.relay.protocol import AnswerPiece, Cancelled, RelayedCall, decoded, encoded

PUBLISHED = {
    "created_at": "2026-11-30T08:00:00Z",
    "updated_at": "2026-11-30T08:05:00Z",
    "started_at": "2026-11-30T08:00:01Z",
    "finished_at": None,
    "id": "r1",
    "job_id": "1f0c",
    "name": "hello-world__a",
    "state": "finished",
    "retry_ids": ["r1"],
    "phase": None,
    "task": {"name": "hello-world", "digest": "sha256:" + "a" * 64, "source": None},
    "agent": {"name": "claude-code", "version": "2.1.0"},
    "model": {"name": "anthropic/claude", "provider": "anthropic", "reasoning_effort": None},
    "rewards": {"reward": 1.0},
    "usage": {"n_input_tokens": None, "n_cached_input_tokens": None, "n_output_tokens": None, "cost_usd": None},
    "error_type": None,
}
"""A rollout in the shape in which Harbor 0.26 lists it."""


def rollout(name: str = "r1", **fields: Any) -> HarborRollout:
    body = {**PUBLISHED, "id": name, "retry_ids": [name], **fields}
    return msgspec.json.decode(json.dumps(body), type=HarborRollout)


def ids(groups: list[list[HarborRollout]]) -> list[list[str]]:
    return [[one.id for one in group] for group in groups]


def test_a_group_waits_for_its_last_rollout() -> None:
    some = [rollout("r1"), rollout("r2", state="running")]
    assert ended_groups(some, ()) == []
    assert ids(ended_groups([rollout("r1"), rollout("r2", state="cancelled")], ())) == [["r1", "r2"]]


@pytest.mark.parametrize("state", ["queued", "running", "paused", "cancelling"])
def test_a_rollout_that_is_tried_again_stands_for_none(state: str) -> None:
    both = ["again", "r1"]
    first = rollout("r1", retry_ids=both, error_type="ApiError")
    assert ended_groups([first, rollout("again", retry_ids=both, state=state), rollout("r2")], ()) == []
    assert ids(ended_groups([first, rollout("again", retry_ids=both), rollout("r2")], ())) == [["again", "r2"]]


def test_tasks_agents_and_models_are_groups_of_their_own_and_one_does_not_wait_for_another() -> None:
    other_task = rollout("t", task={"name": "other", "digest": "sha256:" + "b" * 64})
    other_agent = rollout("a", agent={"name": "codex"})
    other_model = rollout("m", model={"name": "anthropic/claude", "reasoning_effort": "high"}, state="running")
    found = ended_groups([rollout("r1"), other_task, other_agent, other_model, rollout("r2")], ())
    assert ids(found) == [["r1", "r2"], ["t"], ["a"]]
    assert len({affinity_of(one) for one in (rollout(), other_task, other_agent, other_model)}) == 4


def test_what_was_delivered_is_not_delivered_again_and_a_late_retry_is_a_group_of_its_own() -> None:
    assert ended_groups([rollout("r1"), rollout("r2")], {"r1", "r2"}) == []
    late = [rollout("r1"), rollout("r2", retry_ids=["r3", "r2"]), rollout("r3", retry_ids=["r3", "r2"])]
    assert ids(ended_groups(late, {"r1", "r2"})) == [["r3"]]


def test_agents_that_differ_in_settings_alone_are_divided_and_ids_follow_from_the_rollouts() -> None:
    locks = [{"agent": {"kwargs": {"max": number % 2}}} for number in range(4)]
    found = alike([rollout(f"r{number}", lock=lock) for number, lock in enumerate(locks)])
    assert ids(found) == [["r0", "r2"], ["r1", "r3"]]
    assert task_id_of(found[0]) == task_id_of(list(reversed(found[0]))) != task_id_of(found[1])


@pytest.mark.parametrize(
    ("rewards", "found"),
    [
        (None, None),
        ({}, None),
        ({"reward": 0}, 0.0),
        ({"reward": None}, None),
        ({"reward": 0.5, "style": 1.0}, 0.5),
        ({"accuracy": 0.25}, 0.25),
        ({"accuracy": 0.25, "style": 1.0}, None),
    ],
)
def test_the_reward_is_harbors_or_there_is_none(rewards: dict[str, float] | None, found: float | None) -> None:
    assert reward_of(rollout(rewards=rewards), "reward") == found


def recorded(outcome: Outcome = "completed") -> SessionResult:
    failure = Failure(boundary="engine", code="engine_unavailable", message="gone", retryable=True)
    return SessionResult(
        session_id="harbor-r1",
        task_id="t",
        node_id="node-7",
        attempt=0,
        fence=0,
        outcome=outcome,
        failure=failure if outcome == "infra_error" else None,
    )


LOST = Failure(boundary="node", code="session_lost", message="gone", retryable=False)
VALID, INVALID = {"reward": 0.0}, {"reward": None}


@pytest.mark.parametrize(
    ("fields", "known", "outcome", "reward"),
    [
        ({}, recorded(), "completed", 1.0),
        ({"rewards": None}, recorded(), "completed", None),
        ({"error_type": "AgentTimeoutError", "rewards": VALID}, recorded(), "agent_timeout", 0.0),
        ({"error_type": "NonZeroAgentExitCodeError", "rewards": VALID}, recorded(), "agent_error", 0.0),
        ({"error_type": "VerifierTimeoutError", "rewards": INVALID}, recorded(), "infra_error", None),
        ({"error_type": "EnvironmentStartTimeoutError", "rewards": None}, None, "infra_error", None),
        ({"error_type": "CancelledError", "rewards": None, "state": "cancelled"}, recorded(), "cancelled", None),
        ({}, recorded("turn_limit"), "turn_limit", 1.0),
        ({"rewards": VALID}, recorded("infra_error"), "infra_error", None),
        ({"rewards": VALID}, recorded("no_model_call"), "no_model_call", None),
        ({"rewards": VALID}, None, "no_model_call", None),
        ({"rewards": VALID}, LOST, "infra_error", None),
    ],
)
def test_nothing_is_scored_that_we_or_harbors_machine_broke(
    fields: dict[str, Any], known: SessionResult | Failure | None, outcome: Outcome, reward: float | None
) -> None:
    lease = Lease(
        session_id="t.0", task_id="t", sample_index=0, attempt=2, fence=5, expires_at=0.0, lease_s=30.0, task={}
    )
    about = rollout(**fields)
    result = session_result(lease, about, known, BuilderSpec(), "reward")
    assert (result.outcome, result.reward) == (outcome, reward)
    assert (result.session_id, result.attempt, result.fence) == ("t.0", 2, 5)
    assert result.reward_details["harbor"]["rewards"] == about.rewards
    assert result.harness_exit is not None
    assert (result.harness_exit.exit_code == 0) == (outcome == "completed")
    assert result.failure is None or not result.failure.retryable, "Harbor decides on another attempt"


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, InvalidRequest, "HARBOR_API_KEY"),
        (403, InvalidRequest, "--relay-url"),
        (404, NotFound, "0.26"),
        (429, ServerUnavailable, "429"),
        (502, ServerUnavailable, "502"),
        (400, GanglineError, "2026-10-30"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, kind: type[GanglineError], words: str) -> None:
    error = refusal(status, "in Harbor's words", "http://harbor.test")
    assert isinstance(error, kind)
    assert words in error.message
    assert "in Harbor's words" in error.message


def test_messages_are_those_of_harbors_relay() -> None:
    text = (
        '{"type":"request","rollout_id":"r","request_id":"q","method":"POST","target":"/v1/messages?beta=true",'
        '"headers":[["content-type","application/json"]],"body_b64":"e30="}'
    )
    call = decoded(text)
    assert isinstance(call, RelayedCall)
    assert (call.body, call.headers) == (b"{}", [("content-type", "application/json")])
    assert decoded('{"type":"cancel","request_id":"q","reason":"agent_disconnected"}') == Cancelled(
        request_id="q", reason="agent_disconnected"
    )
    assert json.loads(encoded(AnswerPiece(request_id="q", body=b"\xff\x00"))) == {
        "type": "response_chunk",
        "request_id": "q",
        "body_b64": "/wA=",
    }
    other = msgspec.structs.replace(call, request_id="another", headers=[])
    assert other.digest == call.digest != msgspec.structs.replace(call, body=b"{ }").digest
