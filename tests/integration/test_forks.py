"""Forks of recorded sessions in one node: the parent's calls are given again, exactly, or the session says why not."""

from __future__ import annotations

import asyncio
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.session import SessionResult
from gangline.node.backends.engine import PooledEngine
from gangline.node.backends.gate import GateMeter
from gangline.node.health.metrics import NodeMetrics
from gangline.node.sessions.attempt import Attempt
from gangline.rows.audit import audit
from gangline.rows.forks.calls import LINEAGE_FILE, REPLAYED
from support.node.attempt import lease_of, node_parts

FIRST = {"turn": 0, "pattern": "^say hi$"}
RULES: list[dict[str, Any]] = [
    FIRST | {"text": "First I look.", "tool_calls": [{"run": "echo one"}, {"run": "x=7; ls -l /etc/hostname"}]},
    {"turn": 1, "tool_calls": [{"run": "echo x is $x"}]},
    {"turn": 2, "tool_calls": [{"run": "echo three"}]},
    {"turn": 3, "text": "all done"},
]
OTHER: list[dict[str, Any]] = [{"pattern": ".", "text": "from here on otherwise"}]


async def lived(
    folder: Path, name: str, rules: list[dict[str, Any]], parent: SessionResult | None = None, **task: Any
) -> SessionResult:
    agent = {"harness": "native", "settings": {"tools": ["shell"]}}
    lease = lease_of(name, **{"agent": agent, **task})

    async def recorded(session_id: str, attempt: int) -> SessionResult:
        assert parent is not None
        assert (session_id, attempt) == (parent.session_id, parent.attempt)
        return parent

    async with node_parts(folder / name, script={"rules": [*rules, *OTHER]}) as parts, asyncio.timeout(60):
        return await Attempt(lease, msgspec.structs.replace(parts, recorded=recorded)).live()


def fork_of(parent: SessionResult, turn: int) -> dict[str, Any]:
    return {"session_id": parent.session_id, "attempt": parent.attempt, "turn": turn}


@pytest.fixture
async def parent(tmp_path: Path) -> SessionResult:
    result = await lived(tmp_path, "parent", RULES)
    assert (result.outcome, len(result.completions)) == ("completed", 4), result.failure
    return result


async def test_a_fork_repeats_its_parent_up_to_each_turn_and_goes_on_by_itself(
    tmp_path: Path, parent: SessionResult
) -> None:
    for turn in (1, 2, 3, 4):
        result = await lived(tmp_path, f"fork-{turn}", [], parent, fork=fork_of(parent, turn))
        assert (result.outcome, result.failure) == ("completed", None)
        given = [one for one in result.completions if REPLAYED in one.metadata]
        assert [one.metadata[REPLAYED] for one in given] == [one.completion_id for one in parent.completions[:turn]]
        for own, theirs in zip(result.completions, parent.completions[:turn], strict=False):
            assert own.sampled_ids.tolist() == theirs.sampled_ids.tolist()
            assert own.response == theirs.response
        lineage = msgspec.json.decode(result.artifacts[LINEAGE_FILE])
        assert (lineage["session_id"], lineage["turn"], lineage["num_replayed"]) == (parent.session_id, turn, turn)
        assert result.trajectory is not None
        assert audit(result.trajectory, result.completions).ok
        (trace,) = result.trajectory.traces
        own = result.completions[turn:]
        assert len(own) == (1 if turn < 4 else 0)
        assert int(trace.loss_mask.sum()) == sum(len(one.sampled_ids) for one in own), "the parent's are context"
        assert parent.trajectory is not None
        theirs = parent.trajectory.traces[0]
        ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        last = parent.completions[turn - 1].completion_id
        end = len(theirs.prompt_ids) + next(span.end for span in theirs.spans if span.completion_id == last)
        assert ids[:end] == [*theirs.prompt_ids.tolist(), *theirs.response_ids.tolist()][:end]


WRITES = [
    "mkdir a; echo one > a/one; ln -s a/one link",
    "printf 2 > two; chmod 700 two; echo more >> a/one",
    "rm -r a; mkdir -p b/c; head -c 5000 /dev/zero > b/c/zeros",
]
DIGEST = "tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - . | sha256sum"
"""Of names, kinds, modes and contents."""


def writing(*commands: str) -> list[dict[str, Any]]:
    return [{"turn": turn, "tool_calls": [{"run": command}]} for turn, command in enumerate(commands)]


def digest_in(result: SessionResult) -> str:
    assert (result.outcome, result.failure) == ("completed", None)
    (output,) = result.completions[-1].new_messages
    found = re.search("[0-9a-f]{64}", str(output))
    assert found is not None, output
    return found[0]


async def test_a_fork_has_the_files_that_its_parent_had_at_that_turn(tmp_path: Path) -> None:
    parent = await lived(tmp_path, "parent", writing(*WRITES))
    digests = set[str]()
    for turn in (1, 2, 3):
        there = await lived(tmp_path, f"there-{turn}", writing(*WRITES[:turn], DIGEST))
        rules = [{"turn": turn, "tool_calls": [{"run": DIGEST}]}]
        fork = await lived(tmp_path, f"fork-{turn}", rules, parent, fork=fork_of(parent, turn))
        assert digest_in(fork) == digest_in(there)
        digests.add(digest_in(fork))
    assert len(digests) == 3, "each turn changed files"


async def test_a_fork_whose_agent_asks_otherwise_ends_with_the_difference(
    tmp_path: Path, parent: SessionResult
) -> None:
    result = await lived(tmp_path, "other", [], parent, fork=fork_of(parent, 2), instruction="say ho")
    assert result.outcome == "infra_error"
    assert result.failure is not None
    assert result.failure.code == "fork_diverged"
    assert not result.failure.retryable
    assert "diverged at call 1: message" in result.failure.message
    assert "'say hi' was recorded, here is 'say ho'" in result.failure.message
    assert result.completions == ()


async def test_a_turn_that_the_parent_does_not_have_is_refused(tmp_path: Path, parent: SessionResult) -> None:
    result = await lived(tmp_path, "far", [], parent, fork=fork_of(parent, 5))
    assert result.failure is not None
    assert "is not forkable, because turn 5 is none of its turns: it has 1 to 4" in result.failure.message


async def test_calls_that_are_repeated_wait_for_no_engine(
    tmp_path: Path, parent: SessionResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GateMeter] = []
    turn = PooledEngine.turn

    def asked_for(engine: PooledEngine, meter: GateMeter) -> AbstractAsyncContextManager[None]:
        asked.append(meter)
        return turn(engine, meter)

    monkeypatch.setattr(PooledEngine, "turn", asked_for)
    result = await lived(tmp_path, "waits", [], parent, fork=fork_of(parent, 3))
    assert len(asked) == len(result.completions) - 3 == 1


async def test_calls_that_are_repeated_are_counted_once_by_their_parents_node(
    tmp_path: Path, parent: SessionResult
) -> None:
    result = await lived(tmp_path, "counted", [], parent, fork=fork_of(parent, 3))
    metrics = NodeMetrics()
    metrics.kept(result.completions)
    last = result.completions[-1]
    read = metrics._registry.get_sample_value
    assert read("gangline_sampled_tokens_total") == len(last.sampled_ids)


async def test_text_that_differs_in_each_run_is_tolerated_and_pinned(tmp_path: Path) -> None:
    """`ls -l` shows another time; the engine is sent the recorded one."""
    touch = "touch -d @{} dog.txt; ls -l"
    rules: list[dict[str, Any]] = [
        FIRST | {"tool_calls": [{"run": "sh ./look"}]},
        {"turn": 1, "tool_calls": [{"run": "echo two"}]},
        {"turn": 2, "text": "done"},
    ]

    def at(seconds: int) -> dict[str, Any]:
        file = {"type": "write", "path": "look", "content": touch.format(seconds)}
        return {"backend": "process", "prepare": [file, {"type": "exec", "command": "touch -d @0 look"}]}

    parent = await lived(tmp_path, "parent", rules, runtime=at(1_700_000_000))
    assert len(parent.completions) == 3
    result = await lived(tmp_path, "fork", [], parent, runtime=at(1_710_000_000), fork=fork_of(parent, 2))
    assert (result.outcome, result.failure) == ("completed", None)
    assert msgspec.json.decode(result.artifacts[LINEAGE_FILE])["num_tolerated"] == 1
    assert result.completions[-1].certificate.context == "exact"
    assert result.trajectory is not None
    assert audit(result.trajectory, result.completions).ok


EDITED: list[dict[str, Any]] = [
    *RULES[:2],
    {"turn": 2, "pattern": "Error: no space left", "tool_calls": [{"run": "echo again"}]},
    {"turn": 3, "pattern": "^again", "text": "mended"},
]


async def test_an_edit_takes_the_place_of_the_newest_result_for_the_model_alone(
    tmp_path: Path, parent: SessionResult
) -> None:
    fork = fork_of(parent, 2) | {"edit": "Error: no space left"}
    result = await lived(tmp_path, "edited", EDITED, parent, fork=fork)
    assert (result.outcome, result.failure) == ("completed", None)
    replayed, own = result.completions[:2], result.completions[2:]
    assert all(REPLAYED in one.metadata for one in replayed)
    assert not any(REPLAYED in one.metadata for one in own)
    assert len(own) == 2, "the later request carries the edit too, or the session would have another conversation"
    (sent,) = own[0].new_messages
    assert sent.role == "tool"
    assert [part.content[0].text for part in sent.parts] == ["Error: no space left"]  # type: ignore[union-attr]
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert audit(result.trajectory, result.completions).ok
    assert int(trace.loss_mask.sum()) == sum(len(one.sampled_ids) for one in own)
    lineage = msgspec.json.decode(result.artifacts[LINEAGE_FILE])
    assert lineage["was_edited"] is True


async def test_a_fork_that_ends_before_its_edit_says_so(tmp_path: Path, parent: SessionResult) -> None:
    result = await lived(tmp_path, "unedited", [], parent, fork=fork_of(parent, 4) | {"edit": "never read"})
    assert (result.outcome, len(result.completions)) == ("completed", 4)
    assert msgspec.json.decode(result.artifacts[LINEAGE_FILE])["was_edited"] is False
