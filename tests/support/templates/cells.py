"""One cell: a recording through a template, by one route, and what came of it.

equal: every prompt is the template's rendering of the client's messages. kept: apart from the model's own turns, which
stay as they were sampled. fitted: of messages that were changed, and
the record names the change. said: it differs, and the record says so. refused: not served, and the facts of the
template say so before any session. Faults: `silent`, another prompt without a word; `refused_late`, refused within the
session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from msgspec.structs import replace

from gangline.domain.completion import Completion
from gangline.domain.conversation import Message, ModelCall, Text, ToolCall
from gangline.domain.errors import GanglineError
from gangline.domain.node_views import TemplateFacts
from gangline.models.engines.templates.probe import probe_template
from gangline.node.calls.reading.body import read_here
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.capture.capture import tool_call_id
from gangline.node.capture.references import resolved
from gangline.settings import plugins
from gangline.settings.node import CallLimits
from support.engines.pooled import pooled
from support.node.proxy import MemoryJournal
from support.templates import judge
from support.templates.engine import LaboratoryEngine, Writer
from support.templates.recordings import Recording

__all__ = ["ROUTES", "Bench", "Cell", "Outcome", "Route"]

Route = Literal["ids", "rendered"]
Outcome = Literal["equal", "kept", "fitted", "said", "refused", "refused_late", "silent"]

ROUTES: tuple[Route, ...] = ("ids", "rendered")
_WORST: tuple[Outcome, ...] = ("silent", "refused_late", "refused", "said", "fitted", "kept", "equal")
_LIMITS = CallLimits()


@dataclass
class Cell:
    template: str
    recording: str
    route: Route
    outcome: Outcome = "equal"
    notes: set[str] = field(default_factory=set[str])
    """Changes, fallbacks, causes, refusals."""
    shown: str = ""
    """Of a fault: what was sent, and what the template writes."""

    def add(self, outcome: Outcome, *notes: str) -> None:
        self.outcome = _WORST[min(_WORST.index(self.outcome), _WORST.index(outcome))]
        self.notes.update(notes)


@cache
def _dialect(name: str) -> Any:
    return plugins.made("dialect", name)


class Bench:
    """One template, probed once, for all recordings."""

    def __init__(self, name: str, template: str, facts: TemplateFacts, writer: Writer) -> None:
        self.name = name
        self.template = template
        self.facts = facts
        self.writer = writer

    @classmethod
    async def of(cls, name: str, template: str) -> Bench:
        writer = Writer(template)
        facts = await probe_template(LaboratoryEngine(writer, takes_ids=True))
        return cls(name, template, facts, writer)

    async def cell(self, name: str, recording: Recording, route: Route) -> Cell:
        engine = LaboratoryEngine(self.writer, takes_ids=route == "ids", template=self.facts)
        session = ModelSession(
            SessionSpec(session_id="s", attempt=1, key="k", retry_grace_s=0.0),
            await pooled(engine),
            MemoryJournal(),
        )
        cell = Cell(self.name, name, route)
        dialect = _dialect(recording.dialect)
        keys: dict[str, str] = {}
        ids: dict[str, str] = {}
        for request in recording.requests:
            read = read_here(dialect, request.raw(keys), "call", recording.path, _LIMITS)
            engine.reply = request.reply
            call = resolved(read.call, session._ledger)  # pyright: ignore[reportPrivateUsage]
            subscription = session.subscribe(read.call, read.mark, read.known)
            try:
                await subscription.flight.reply()
            except GanglineError as error:
                known = self._known_before(call)
                cell.add("refused" if known else "refused_late", *(known or [f"refused: {error.message}"]))
                break
            finally:
                subscription.leave()
            keys[request.key] = key = subscription.flight.record_key
            self._judge(cell, call, session.tree, engine, ids)
            calls = [part for part in engine.said[-1].parts if isinstance(part, ToolCall)]
            ids |= {tool_call_id(key, 0, index): one.call_id for index, one in enumerate(calls)}
        await session.fence("over")
        return cell

    def _known_before(self, call: ModelCall) -> list[str]:
        """Why the facts say, before any session, that a run with these tools is not served."""
        facts = self.facts
        if facts.refuses:
            return ["refused: every conversation"]
        if call.tools and facts.refuses_tools:
            return [f"refused: calls of tools: {facts.refuses_tools}"]
        if call.tools and facts.renders_tool_results is False:
            return ["refused: some results of tools, of which it renders none"]
        if call.tools and facts.refuses_some_tools:
            return [f"refused: some tools: {facts.refuses_some_tools}"]
        return []

    def _judge(self, cell: Cell, call: ModelCall, tree: Any, engine: LaboratoryEngine, ids: dict[str, str]) -> None:
        """ids: of calls, the client's -> the engine's."""
        completion: Completion = list(tree)[-1]
        certificate = completion.certificate
        prompt = self.writer.tokenizer.decode(tree.prompt_ids(completion).tolist())
        if certificate.fallback is not None:
            cell.notes.add(f"row: {certificate.fallback}")
        if certificate.context == "diverged" and certificate.fallback is None:
            cell.notes.add(f"row: {certificate.cause}")
        changes: dict[str, int] = completion.metadata.get("fitted", {})
        cell.notes.update(f"changed: {name}" for name in changes)
        came = engine.asked[-1]
        meant = replace(came, messages=judge.with_ids(call.messages, ids))
        if prompt in [self._written(one) for one in (replace(came, messages=call.messages), meant)]:
            cell.add("equal")
        elif changes and prompt == self._written(came):
            cell.add("fitted")
        elif self._keeps_sampled_turns(tree, completion, came if changes else meant):
            cell.add("fitted" if changes else "kept")
        elif certificate.as_rendered is False:
            cell.add("said", f"said: {certificate.unlike_rendering}")
        else:
            cell.add("silent")
            cell.shown = cell.shown or _difference(prompt, self._written(came))
        lost = judge.lost_texts(call.messages, prompt)
        cell.notes |= {f"lost: {role}" for role in lost - {"assistant"}}

    def _pieces(self, tree: Any, completion: Completion) -> list[str]:
        """What came before and after each sampled turn of the prompt."""
        line = [completion]
        while line[0].parent_id is not None and line[0].certificate.context == "exact":
            line.insert(0, tree[line[0].parent_id])
        decode = self.writer.tokenizer.decode
        ends = [decode(one.prompt_suffix_ids.tolist()) for one in line[1:]]
        return [decode(tree.prompt_ids(line[0]).tolist()), *ends]

    def _written(self, call: ModelCall, *, prompt: bool = True) -> str | None:
        return judge.rendering(self.template, call.messages, call.tools, call.template_kwargs, prompt=prompt)

    def _keeps_sampled_turns(self, tree: Any, last: Completion, call: ModelCall) -> bool:
        expected = self._written(call)
        return expected is not None and judge.keeps_sampled_turns(
            self._pieces(tree, last), expected, self._opening(call)
        )

    def _opening(self, call: ModelCall) -> str:
        """A generation prompt after a user's message."""
        plain = replace(call, messages=(Message("user", (Text("x"),)),))
        with_prompt, without = self._written(plain), self._written(plain, prompt=False)
        if with_prompt is None or without is None:
            return ""
        num_shared = next(
            (i for i, (a, b) in enumerate(zip(with_prompt, without, strict=False)) if a != b), len(without)
        )
        return with_prompt[num_shared:]


def _difference(sent: str, expected: str | None) -> str:
    if expected is None:
        return "the template refuses the client's messages"
    least = min(len(sent), len(expected))
    at = next((i for i in range(least) if sent[i] != expected[i]), least)
    return f"sent ...{sent[max(0, at - 60) : at + 120]!r}\nnot  ...{expected[max(0, at - 60) : at + 120]!r}"
