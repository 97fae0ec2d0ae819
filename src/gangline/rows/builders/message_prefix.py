"""`message_prefix`: the rule of verl's gateway RFC. Source: "Agent Abstractions and Trajectory Gateway for VERL",
"Request Handling" and "Trajectory Output".

A session has one open trace. A call whose messages begin with the trace's messages and its last reply continues it:
only the tokens of its new messages are appended. Any other call closes the trace and opens a new one with its own whole
prompt. So a sub-agent's call between two turns of the main conversation ends the main trace, which `prefix_merging`
would keep whole. Use this builder for comparison, or if a trainer needs rows in the order of the calls.

The RFC's gateway tokenises the new messages itself, so its contexts are exact. Here they come from the journal: the
suffix of an exact prompt. If the messages continue but the ids do not, `on_divergence` decides:

- `split` (the default): the trace is closed, so that no row contains a context that the engine did not see;
- `splice`: the trace continues with the new messages' ids cut from the re-rendered prompt, and records the place and
  the reason.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.trajectory import Trajectory
from gangline.rows.builders.splicing import MayJoin, end_of_turn_ids, splice_chains
from gangline.rows.chains import (
    BuilderConfig,
    Chain,
    check_claims,
    find_chains,
    goes_on_from,
    make_trajectory,
    turns_of,
)


class MessagePrefixConfig(BuilderConfig):
    on_divergence: Literal["split", "splice"] = "split"
    """The rule for a turn whose messages continue the trace, but whose ids do not."""
    end_of_turn_ids: tuple[int, ...] = ()
    """Only for `splice`. Empty: the last sampled ids of the turns that ended by themselves."""


class MessagePrefixBuilder:
    name: ClassVar[str] = "message_prefix"
    Config: ClassVar[type[BaseModel]] = MessagePrefixConfig

    def __init__(self, config: MessagePrefixConfig | None = None) -> None:
        self.config = config or MessagePrefixConfig()

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        """Raises: BuilderError (only with `strict`)."""
        if self.config.strict:
            check_claims(tree)
        continues = _OpenTrace(tree).continues
        pieces = [piece for chain in find_chains(tree, merge=True) for piece in _cut(chain, continues)]
        order = {completion.completion_id: index for index, completion in enumerate(tree)}
        pieces.sort(key=lambda piece: order[piece.completions[0].completion_id])
        if self.config.on_divergence == "splice":
            end_ids = self.config.end_of_turn_ids or end_of_turn_ids(tree, self.config.engine_role)
            rows = splice_chains(pieces, end_ids, continues)
        else:
            rows = [(piece, turns_of(piece)) for piece in pieces]
        return make_trajectory(
            tree, rows, session_id=session_id, task_id=task_id, builder=self.name, config=self.config
        )


class _OpenTrace:
    """Decides which call continues the open trace. An aborted call neither continues a trace nor closes it."""

    def __init__(self, tree: CompletionTree) -> None:
        complete = [completion.completion_id for completion in tree if completion.status == "complete"]
        self._open_before = dict(zip(complete[1:], complete, strict=False))

    def continues(self, before: Completion, completion: Completion) -> bool:
        """The message-level prefix check: the open trace ends with `before`, and all its messages are shared."""
        found_open = self._open_before.get(completion.completion_id) == before.completion_id
        return found_open and goes_on_from(before, completion)


def _cut(chain: Chain, continues: MayJoin) -> list[Chain]:
    """Returns an exact chain cut before each turn that the rule does not let follow. No ids are copied."""
    pieces: list[Chain] = []
    before: Completion | None = None
    for completion in chain.completions:
        if before is not None and continues(before, completion):
            pieces[-1].completions.append(completion)
        else:
            prompt_ids = chain.context_ids[: CompletionTree.num_prompt_ids(completion)]
            pieces.append(Chain([completion], prompt_ids, chain.context_ids))
        before = completion
    return pieces
