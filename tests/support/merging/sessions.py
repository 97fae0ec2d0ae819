"""Recorded sessions of agents that continue, compact their history, send sub-agents, ask again, and edit what was said.

They are recorded as a node records them, over an engine in the process with Qwen3's tokenizer and template. Two
replies in five are sampled as ids that the tokenizer would not choose. The engine writes down what it read and
sampled at each call.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gangline.domain.completion import CompletionTree
from gangline.domain.conversation import Message, ModelCall, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.task import CaptureSpec
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from support.engines.families import FamilyEngine, Turn, family
from support.merging.published import LoggedCall
from support.node.proxy import MemoryJournal

__all__ = ["KINDS", "Recorded", "record"]

SHELL = ToolDefinition("shell", "Run.", {"type": "object", "properties": {"command": {"type": "string"}}})
WORDS = ("error", "file", "line", "test", "path", "module", "import", "value", "fishing", "naïve", "café", "a  b")
SPLIT, CUT, ON = 0.4, 0.03, 0.7
"""Shares of replies: in ids of one letter each; cut by a limit; with a tool call."""


@dataclass
class Recorded:
    """A session, and the engine's own log of it; both in the order in which calls ended."""

    tree: CompletionTree
    log: list[LoggedCall]
    edited: set[int]
    """Numbers of the calls whose reply the client went on with in other words."""
    continued: list[int | None]
    """For each call, the number of the one whose reply its prompt ends with; as the client knows it."""


@dataclass
class _World:
    """A session, its engine, and all that is drawn in it."""

    chosen: random.Random
    engine: FamilyEngine
    session: ModelSession
    journal: MemoryJournal
    edited: set[int] = field(default_factory=set[int])
    continued: list[int | None] = field(default_factory=list[int | None])
    _kept: list[tuple[Message, int]] = field(default_factory=list[tuple[Message, int]])

    @classmethod
    def new(cls, seed: str, takes_ids: bool) -> _World:
        engine, journal = FamilyEngine(family("qwen3"), [Turn()], takes_prompt_ids=takes_ids), MemoryJournal()
        spec = SessionSpec(session_id=f"session-{seed}", attempt=1, key="key", capture=CaptureSpec())
        return cls(random.Random(seed), engine, ModelSession(spec, engine, journal), journal)

    def words(self, least: int, most: int) -> str:
        return " ".join(self.chosen.choices(WORDS, k=self.chosen.randint(least, most)))

    def _reply(self) -> Turn:
        thinking, split = self.words(2, 8), self.chosen.random() < SPLIT
        if self.chosen.random() < CUT:
            return Turn(text=self.words(2, 6), thinking=thinking, split=split, finish="length")
        if self.chosen.random() < ON:
            arguments = json.dumps({"command": f"grep {self.words(1, 4)}"})
            return Turn(text=self.words(0, 4), thinking=thinking, split=split, calls=(("shell", arguments),))
        return Turn(text=self.words(2, 12), thinking=thinking, split=split)

    async def ask(self, history: list[Message]) -> Message:
        self.engine.turns = [self._reply()]
        call = ModelCall(dialect="d", model="m", messages=tuple(history), tools=(SHELL,))
        said = (number for one in reversed(history) for kept, number in self._kept if kept is one)
        self.continued.append(next(said, None))
        return (await self.session.start_call(call).reply()).choices[-1].message

    def keep(self, message: Message) -> Message:
        """What a client keeps of the last reply."""
        self._kept.append((message, self.last_number))
        return message

    @property
    def last_number(self) -> int:
        return len(self.engine.seen) - 1


@dataclass
class _Agent:
    world: _World
    history: list[Message]
    retries: float = 0.0
    """Share of calls that are sent twice; the agent continues with the second reply."""
    edits: float = 0.0
    """Share of replies that the agent writes anew in its history."""

    @classmethod
    def new(cls, world: _World, role: str, task: str, **habits: float) -> _Agent:
        opening = [Message("system", (Text(f"You are the {role}."),)), Message("user", (Text(task),))]
        return cls(world, opening, **habits)

    async def turn(self) -> None:
        reply = await self.world.ask(self.history)
        if self.world.chosen.random() < self.retries:
            reply = await self.world.ask(self.history)
        self.history.append(self.world.keep(self._edited(reply)))
        calls = [part for part in reply.parts if isinstance(part, ToolCall)]
        for call in calls:
            self.history.append(Message("tool", (ToolResult(call.call_id, (Text(self.world.words(3, 20)),)),)))
        if not calls:
            self.history.append(Message("user", (Text(self.world.words(2, 10)),)))

    async def turns(self, least: int, most: int) -> None:
        for _ in range(self.world.chosen.randint(least, most)):
            await self.turn()

    def _edited(self, reply: Message) -> Message:
        """What the client sends of it: half of its edits only write it in another form."""
        if self.world.chosen.random() >= self.edits:
            return reply
        if self.world.chosen.random() < 0.5:
            return Message("assistant", tuple(_in_another_form(p) for p in reply.parts if not isinstance(p, Thinking)))
        self.world.edited.add(self.world.last_number)
        said = Text(f"Edited: {self.world.words(2, 5)}")
        return Message("assistant", (said, *(part for part in reply.parts if isinstance(part, ToolCall))))


def _in_another_form(part: Any) -> Any:
    if isinstance(part, ToolCall):
        return msgspec.structs.replace(part, arguments=json.dumps(json.loads(part.arguments), indent=1))
    return msgspec.structs.replace(part, text=f"{part.text.strip()}\n") if isinstance(part, Text) else part


async def _linear(world: _World) -> None:
    await _Agent.new(world, "coder", world.words(4, 12)).turns(5, 10)


async def _with_compaction(world: _World) -> None:
    agent = _Agent.new(world, "coder", world.words(4, 12))
    opening = list(agent.history)
    await agent.turns(3, 5)
    summary = await world.ask([*agent.history, Message("user", (Text("Summarise what was done."),))])
    told = " ".join(part.text for part in summary.parts if isinstance(part, Text))
    agent.history = [*opening, Message("user", (Text(f"Before: {told or 'nothing'}"),))]
    await agent.turns(3, 5)


def _sub_agents(are_equal: bool) -> Callable[[_World], Coroutine[Any, Any, None]]:
    async def work(world: _World) -> None:
        """Three at once, taking turns, in the middle of the main agent's work."""
        main = _Agent.new(world, "coder", world.words(4, 12))
        await main.turns(2, 4)
        task = world.words(4, 8)
        others = [
            _Agent.new(world, "explorer", task if are_equal else f"{number}: {world.words(4, 8)}")
            for number in range(3)
        ]
        for _ in range(world.chosen.randint(2, 3)):
            for agent in others:
                await agent.turn()
        await main.turns(2, 4)

    return work


async def _with_edits(world: _World) -> None:
    await _Agent.new(world, "coder", world.words(4, 12), edits=0.3).turns(5, 10)


async def _with_retries(world: _World) -> None:
    await _Agent.new(world, "coder", world.words(4, 12), retries=0.15).turns(5, 10)


async def _branching(world: _World) -> None:
    """Goes back to an earlier state at random, as a search does."""
    agent = _Agent.new(world, "coder", world.words(4, 12), retries=0.1)
    states = [list(agent.history)]
    for _ in range(world.chosen.randint(8, 14)):
        if world.chosen.random() < 0.4:
            agent.history = list(world.chosen.choice(states))
        await agent.turn()
        states.append(list(agent.history))


KINDS: dict[str, Callable[[_World], Coroutine[Any, Any, None]]] = {
    "linear": _linear,
    "compaction": _with_compaction,
    "three sub-agents": _sub_agents(are_equal=False),
    "client edits replies": _with_edits,
    "retries": _with_retries,
    "three sub-agents with equal prompts": _sub_agents(are_equal=True),
    "random branches": _branching,
}


async def record(kind: str, seed: object, *, takes_ids: bool) -> Recorded:
    """takes_ids: the engine is sent the prompt's ids where they are known; otherwise it renders every prompt."""
    world = _World.new(f"{kind} {seed}", takes_ids)
    await KINDS[kind](world)
    await world.session.fence("done")
    log = [
        LoggedCall(seen.prompt_ids, seen.sampled_ids, seen.logprobs, one.certificate.finish_reason != "length")
        for seen, one in zip(world.engine.seen, world.journal.completions, strict=True)
    ]
    return Recorded(CompletionTree(world.journal.completions), log, world.edited, world.continued)
