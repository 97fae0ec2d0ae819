"""Forks whose calls behind the fork another engine answers: over the parent's exact tokens, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Message, ModelCall, Text
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trajectory
from gangline.node.backends.engine import BackendSpec
from gangline.node.capture.ledger import Ledger
from gangline.node.sessions.attempt import Attempt
from gangline.rows.audit import audit
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.forks.calls import LINEAGE_FILE, REPLAYED, ForkLineage
from gangline.serving.scripted.server import scripted_server
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from support.node.attempt import lease_of, node_parts
from support.node.proxy import MemoryJournal

RULES: list[dict[str, Any]] = [
    {"turn": 0, "text": "First I look.", "tool_calls": [{"run": "echo one"}]},
    {"turn": 1, "tool_calls": [{"run": "echo two"}]},
    {"turn": 2, "tool_calls": [{"run": "echo three"}]},
    {"turn": 3, "text": "all done"},
]
CRITIC: list[dict[str, Any]] = [
    {"turn": 2, "text": "I am the critic.", "tool_calls": [{"run": "echo critic"}]},
    {"turn": 3, "text": "the critic is done"},
]


class MirroredTokenizer(TinyTokenizer):
    """Other ids for the same text."""

    def encode(self, text: str) -> list[int]:
        return [self.num_ids - 1 - one for one in super().encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([self.num_ids - 1 - one for one in ids])


class WordyTemplate(TinyTokenizer):
    """The same ids for the same text, and another text for the same conversation."""

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        return self.encode("<|im_start|>system\nYou speak.<|im_end|>\n") + super().render(messages, **options)


async def lived(
    folder: Path,
    name: str,
    *,
    parent: SessionResult | None = None,
    critic: TinyTokenizer | None = None,
    **task: Any,
) -> SessionResult:
    """A session of a node whose role `critic` has its own engine, if there is a tokenizer for it."""
    agent = {"harness": "native", "settings": {"tools": ["shell"]}}
    lease = lease_of(name, **{"agent": agent, **task})

    async def recorded(_session_id: str, _attempt: int) -> SessionResult:
        assert parent is not None
        return parent

    async with (
        node_parts(folder / name, script={"rules": RULES}) as parts,
        scripted_server({"rules": CRITIC}, critic or TinyTokenizer()) as url,
        asyncio.timeout(60),
    ):
        if critic is not None:
            await parts.backends.add(BackendSpec(url, role="critic"))
        return await Attempt(lease, msgspec.structs.replace(parts, recorded=recorded)).live()


def fork_of(parent: SessionResult, turn: int) -> dict[str, Any]:
    return {"session_id": parent.session_id, "attempt": parent.attempt, "turn": turn, "engine": "critic"}


@pytest.fixture
async def parent(tmp_path: Path) -> SessionResult:
    result = await lived(tmp_path, "parent")
    assert (result.outcome, len(result.completions)) == ("completed", 4), result.failure
    return result


def built(completions: Sequence[Completion], engine_role: str | None) -> Trajectory:
    builder = PrefixMergingBuilder(PrefixMergingConfig(engine_role=engine_role, strict=True))
    return builder.build(CompletionTree(completions), session_id="fork", task_id="t1")


async def test_another_engine_goes_on_over_the_exact_tokens_of_the_record(
    tmp_path: Path, parent: SessionResult
) -> None:
    result = await lived(tmp_path, "fork", parent=parent, critic=TinyTokenizer(), fork=fork_of(parent, 2))
    assert (result.outcome, result.failure) == ("completed", None)
    replayed, own = result.completions[:2], result.completions[2:]
    assert [one.metadata[REPLAYED] for one in replayed] == [one.completion_id for one in parent.completions[:2]]
    assert [one.certificate.engine_role for one in result.completions] == [None, None, "critic", "critic"]
    assert [one.response for one in replayed] == [one.response for one in parent.completions[:2]]
    assert "I am the critic." in str(own[0].response)
    for one in own:
        assert (one.certificate.context, one.certificate.prompt_source) == ("exact", "stitched")
    tree, theirs = CompletionTree(result.completions), CompletionTree(parent.completions)
    context = theirs.context_ids(parent.completions[1]).tolist()
    assert tree.prompt_ids(own[0]).tolist()[: len(context)] == context
    lineage = msgspec.json.decode(result.artifacts[LINEAGE_FILE], type=ForkLineage)
    assert (lineage.engine, lineage.turn, lineage.num_replayed) == ("critic", 2, 2)


async def test_the_other_engines_tokens_are_trained_on_only_where_its_role_is_asked_for(
    tmp_path: Path, parent: SessionResult
) -> None:
    result = await lived(tmp_path, "fork", parent=parent, critic=TinyTokenizer(), fork=fork_of(parent, 2))
    num_own = sum(len(one.sampled_ids) for one in result.completions[2:])
    for wanted, num_trained in ((None, 0), ("critic", num_own)):
        trajectory = built(result.completions, wanted)
        assert audit(trajectory, result.completions).violations == ()
        (trace,) = trajectory.traces
        assert int(trace.loss_mask.sum()) == num_trained
    assert num_own > 0


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [(MirroredTokenizer, "another tokenizer"), (WordyTemplate, "another chat template")],
)
async def test_an_engine_whose_tokens_are_others_is_refused_by_name(
    tmp_path: Path, parent: SessionResult, tokenizer: Callable[[], TinyTokenizer], why: str
) -> None:
    result = await lived(tmp_path, "fork", parent=parent, critic=tokenizer(), fork=fork_of(parent, 2))
    assert result.failure is not None
    assert f"of role 'critic' has {why} than the engine of call 1" in result.failure.message
    assert not result.failure.retryable
    assert result.completions == ()


async def test_an_engine_that_does_not_show_its_template_is_refused(tmp_path: Path, parent: SessionResult) -> None:
    unknown = [
        msgspec.structs.replace(one, certificate=msgspec.structs.replace(one.certificate, template_digest=""))
        for one in parent.completions
    ]
    shown = msgspec.structs.replace(parent, completions=tuple(unknown))
    result = await lived(tmp_path, "fork", parent=shown, critic=TinyTokenizer(), fork=fork_of(parent, 1))
    assert result.failure is not None
    assert "the engine of call 1 does not show its chat template" in result.failure.message


async def test_a_role_without_engines_is_refused_and_the_known_ones_are_named(
    tmp_path: Path, parent: SessionResult
) -> None:
    fork = fork_of(parent, 2)
    result = await lived(tmp_path, "none", parent=parent, fork=fork)
    assert result.failure is not None
    assert "no engine answers for role 'critic' on this node. Roles with engines: none." in result.failure.message
    other = await lived(tmp_path, "o", parent=parent, critic=TinyTokenizer(), fork=fork | {"engine": "judge"})
    assert other.failure is not None
    assert "no engine answers for role 'judge' on this node. Roles with engines: critic." in other.failure.message


async def test_experts_of_the_records_model_are_not_mixed_with_the_other_engines(
    tmp_path: Path, parent: SessionResult
) -> None:
    capture = {"routed_experts": True}
    result = await lived(
        tmp_path, "fork", parent=parent, critic=TinyTokenizer(), fork=fork_of(parent, 2), capture=capture
    )
    assert result.failure is not None
    assert "the record's routed experts are those of another model" in result.failure.message


async def test_a_fork_of_the_other_engines_calls_is_refused(tmp_path: Path, parent: SessionResult) -> None:
    fork = await lived(tmp_path, "fork", parent=parent, critic=TinyTokenizer(), fork=fork_of(parent, 2))
    result = await lived(tmp_path, "again", parent=fork, critic=TinyTokenizer(), fork=fork_of(fork, 3))
    assert result.failure is not None
    assert "call 3 was answered by the engines of role 'critic'" in result.failure.message


async def test_a_node_that_restarts_goes_on_from_the_repeated_calls(tmp_path: Path, parent: SessionResult) -> None:
    result = await lived(tmp_path, "fork", parent=parent, critic=TinyTokenizer(), fork=fork_of(parent, 2))
    for num_left in (2, 3):
        left = result.completions[:num_left]
        ledger = Ledger("fork", 1, MemoryJournal(), left, role_after_fork="critic")
        tree, last = ledger.tree, left[-1]
        said = (*tree.messages(last), last.response, Message("user", (Text("go on"),)))
        model = last.metadata.get("requested_model", last.model)
        call = ModelCall(dialect=last.dialect, model=model, messages=said, tools=tree.tools(last))
        assert ledger.index_of("critic").place(call).parent_id == last.completion_id
        assert ledger.index_of(None).place(call).parent_id is None
