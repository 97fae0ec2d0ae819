"""The output of `gangline show`: a task's sessions, a session's traces and turns, a trace's tokens.

It fits a terminal of 80 columns. Control characters in text from agents and tools are removed.

The grader's output shows why a session has its reward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

import msgspec
from rich.console import Group, RenderableType
from rich.style import Style
from rich.text import Text

from gangline.cli.results.token_runs import Run, elided, runs_of, standing
from gangline.cli.terminal.output import printable, printable_lines
from gangline.cli.terminal.tables import Column, FactTable, numbers, prose
from gangline.cli.terminal.views import causes_view, coloured
from gangline.domain.conversation import Document, Image, Thinking, ToolCall, ToolResult
from gangline.domain.sandbox import in_binary_units
from gangline.domain.unshown import unshown_lines
from gangline.rows.forks.calls import LINEAGE_FILE, RESUME_FILE, ForkLineage

if TYPE_CHECKING:
    from gangline.cli.results.known_texts import TextOf
    from gangline.domain.completion import Lineage
    from gangline.domain.conversation import Message, Part
    from gangline.domain.session import SessionResult
    from gangline.domain.trajectory import Trace, TurnSpan
    from gangline.domain.usage import SessionUsage, Usage

_HEAD, _TAIL = 48, 80
_SHORT_CHARS = 300
"""Characters of a message, from its head and tail, unless the whole is requested."""
_MOST_NOTES = 3
_CONTEXT = Style(color="grey58")
_SPLICED = Style(color="magenta", italic=True)
_UNTRAINED = Style(color="grey58", strike=True)
_ELIDED = Style(color="grey58", italic=True)


def grading_lines(details: Mapping[str, object]) -> Iterator[Text]:
    """One line per finding, nested ones with dotted names. Multi-line text follows below its name."""
    if details:
        yield Text("grading", "bold")
    for name, value in _findings(details):
        lines = printable_lines(_text(value)).splitlines()
        if len(lines) < 2:
            yield Text(f"  {name}: {''.join(lines)}")
            continue
        yield Text(f"  {name}:")
        yield from (Text(f"    {line}") for line in lines)


def _findings(details: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in details.items():
        if isinstance(value, Mapping) and value:
            yield from _findings(cast("Mapping[str, object]", value), f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _text(value: object) -> str:
    """A list of texts becomes one line each."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        if items and all(isinstance(item, str) for item in items):
            return "\n".join(cast("list[str]", items))
    return json.dumps(value, ensure_ascii=False, default=str)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def task_view(results: Iterable[SessionResult]) -> RenderableType:
    """One line for each session, then the causes of failures, and inputs that models were not shown."""
    unseen: dict[str, str] = {}
    causes: dict[str, str] = {}
    table = FactTable(
        *("session", "outcome", "reward#", "turns#", numbers("rows", 2)),
        *(numbers("sampled", 1), Column("exact", 3)),
    )
    for result in results:
        completions = result.completions
        for line in unshown_lines(completions):
            unseen.setdefault(line, result.session_id)
        known = sum(completion.parent_id is not None for completion in completions)
        exact = sum(completion.certificate.context == "exact" for completion in completions)
        table.add_row(
            result.session_id,
            coloured(result.outcome),
            _number(result.reward),
            str(len(completions)),
            str(0 if result.trajectory is None else len(result.trajectory.traces)),
            str(sum(len(completion.sampled_ids) for completion in completions)),
            f"{exact} of {known}" if known else "–",
        )
        if result.failure is not None:
            causes[result.session_id] = f"{result.failure.boundary}: {result.failure.message}"
    notes = [Text(f"{session_id}: {line}", "yellow") for line, session_id in unseen.items()]
    return Group(table, *causes_view(causes), *notes[:_MOST_NOTES])


def session_view(result: SessionResult) -> RenderableType:
    """How the session went: outcome, reward, time in each stage, resources."""
    head = Text.assemble((result.session_id, "bold"), f"  {result.outcome}")
    head.append(f"  reward {_number(result.reward)}", "bold green" if result.reward else "")
    lines = [head, Text(f"task {result.task_id}, attempt {result.attempt}, node {result.node_id or 'none'}")]
    if (lineage := result.artifacts.get(LINEAGE_FILE)) is not None:
        lines.append(Text(_fork_line(lineage)))
    if (lineage := result.artifacts.get(RESUME_FILE)) is not None:
        lines.append(Text(_resume_line(lineage)))
    if result.timings:
        stages = (f"{timing.stage} {timing.ended_at - timing.started_at:.2f} s" for timing in result.timings)
        lines.append(Text("time: " + ", ".join(stages)))
    lines += [Text(f"image {printable(image)}: {digest}") for image, digest in result.images.items()]
    if result.usage is not None:
        lines += [Text(f"{part}: {text}") for part, text in _usage_lines(result.usage)]
    if result.failure is not None:
        lines.append(Text(f"failure: {result.failure.boundary}, {result.failure.message}", "red"))
    lines += [Text(line, "yellow") for line in unshown_lines(result.completions)]
    lines += grading_lines(result.reward_details)
    if result.artifacts:
        names = ", ".join(sorted(result.artifacts))
        lines.append(Text(f"kept files, by `gangline logs {result.session_id} FILE`: {names}"))
    if result.trajectory is None:
        lines.append(Text("no trajectory was built"))
    return Group(*lines)


def _fork_line(lineage: bytes) -> str:
    fork = msgspec.json.decode(lineage, type=ForkLineage)
    line = f"fork of {fork.session_id} at turn {fork.turn}, {fork.num_replayed} model calls from its record"
    if fork.num_tolerated:
        line = f"{line}, values that differ tolerated in {fork.num_tolerated} messages"
    if fork.engine is not None:
        line = f"{line}, behind it the engines of role {fork.engine}"
    if fork.was_edited is not None:
        line = f"{line}, {'edited' if fork.was_edited else 'its edit reached no call'}"
    return line


def _resume_line(lineage: bytes) -> str:
    lost = msgspec.json.decode(lineage, type=ForkLineage)
    line = f"went on for a lost node, {lost.num_replayed} model calls from the record of attempt {lost.attempt}"
    return f"{line}, values that differ tolerated in {lost.num_tolerated} messages" if lost.num_tolerated else line


def _usage_lines(usage: SessionUsage) -> Iterator[tuple[str, str]]:
    for part, used in (("agent used", usage.agent), ("grading used", usage.grading)):
        if used is not None:
            yield part, ", ".join(_amounts(used)) or "nothing that is known"


def _amounts(used: Usage) -> Iterator[str]:
    if used.cpu_s is not None:
        yield f"{used.cpu_s:.3g} s of processor time"
    if used.peak_memory_bytes is not None:
        yield f"{in_binary_units(used.peak_memory_bytes)} of memory at most"
    if used.written_bytes is not None:
        yield f"{in_binary_units(used.written_bytes)} written"
    ways = (
        ("model calls", used.proxy_sent_bytes, used.proxy_received_bytes),
        ("listed hosts", used.list_sent_bytes, used.list_received_bytes),
    )
    for way, sent, received in ways:
        if sent is not None and received is not None and sent + received > 0:
            yield f"{way} {in_binary_units(sent)} out and {in_binary_units(received)} in"


def trace_view(
    trace: Trace, index: int, lineages: Mapping[str, Lineage] | None = None, *, full: bool = False
) -> RenderableType:
    """The trace's origin, then each turn with the reply and the tool results that followed it.

    lineages: of the session's completions, by id; None leaves them out. full: show messages whole.
    """
    head = Text.assemble((f"trace {index}", "bold"), f"  {trace.trace_id}  {trace.role}, {standing(trace)}")
    num_trained = int(trace.loss_mask.sum())
    facts = f"{_num_prompt(trace)}, {len(trace.response_ids)} response ids, {num_trained} trainable"
    lines: list[RenderableType] = [head, Text(f"{facts}, reward {_number(trace.reward)}")]
    role = trace.certificates[0].engine_role if trace.certificates else None
    if role is not None:
        lines.append(Text(f"answered by {printable(trace.spans[0].model)}, engine of role {role}"))
    if trace.untrainable is not None:
        lines.append(Text(f"not trainable: {trace.untrainable}", "yellow"))
    else:
        lines += [
            Text(f"turn {turn} is masked: {held.untrainable}", "yellow")
            for turn, held in enumerate(trace.certificates)
            if held.untrainable is not None
        ]
    lines += [
        Text(f"spliced at response id {splice.at} before {splice.completion_id}: {splice.cause}", "magenta")
        for splice in trace.splices
    ]
    lines += [_message_view(message, full) for message in trace.prompt_messages]
    turns = _messages_of_turns(trace)
    for turn, span in enumerate(trace.spans):
        lines.append(_turn_line(trace, turn, (lineages or {}).get(span.completion_id)))
        lines += [_message_view(message, full) for message in turns[turn]]
    return Group(*lines)


def _num_prompt(trace: Trace) -> str:
    """Describes the prompt's length. A trace of a tree has only its own part of the prompt."""
    shared = trace.shared_prefix
    after = "" if shared is None else f", after {shared.num_ids} ids of {shared.trace_id}"
    return f"{len(trace.prompt_ids)} prompt ids{after}"


def _turn_line(trace: Trace, turn: int, lineage: Lineage | None) -> Text:
    from gangline.rows.audit import turn_class

    span, held = trace.spans[turn], trace.certificates[turn]
    num_new = len(trace.prompt_ids) if turn == 0 else span.start - trace.spans[turn - 1].end
    logprobs = trace.response_logprobs[span.start : span.end][trace.loss_mask[span.start : span.end] == 1]
    versions = dict.fromkeys(str(piece.version) for piece in held.version_spans if piece.end > piece.start)
    facts = [
        _lineage(trace, span, lineage),
        turn_class(trace, turn) + ("" if held.fallback is None else f" ({held.fallback})"),
        f"+{num_new} ids, {span.end - span.start} sampled",
        f"mean log-prob {logprobs.mean():.2f}" if len(logprobs) else "masked",
        f"version {','.join(versions)}" if versions else "",
        held.finish_reason,
    ]
    line = Text.assemble((f"turn {turn}", "bold cyan"), f"  {span.completion_id}  ")
    return line.append(", ".join(fact for fact in facts if fact), "dim")


def _messages_of_turns(trace: Trace) -> list[list[Message]]:
    """For each turn, its reply and the messages before the next reply; empty if they cannot be separated."""
    turns: list[list[Message]] = []
    for message in trace.response_messages:
        if message.role == "assistant":
            turns.append([])
        if turns:
            turns[-1].append(message)
    return turns if len(turns) == len(trace.spans) else [[] for _ in trace.spans]


def _message_view(message: Message, full: bool) -> RenderableType:
    table = FactTable("", prose(""))
    for part in message.parts:
        kind, text = _part_text(message, part)
        is_result = isinstance(part, ToolResult)
        shown = printable_lines(text) if full or is_result else printable(text)
        table.add_row(
            Text(f"{kind:>9}", "dim"),
            Text(shown if full else _shortened(shown), "red" if is_result and part.is_error else ""),
        )
    return table


def _part_text(message: Message, part: Part) -> tuple[str, str]:
    """A label and a text for one part of a message."""
    if isinstance(part, ToolCall):
        return "call", f"{part.name}({part.arguments})"
    if isinstance(part, ToolResult):
        return "result", "\n".join(_part_text(message, one)[1] for one in part.content)
    if isinstance(part, Image | Document):
        return message.role, f"[{type(part).__name__.lower()}: {part.url[:60]}]"
    return "thinking" if isinstance(part, Thinking) else message.role, part.text


def _shortened(text: str) -> str:
    if len(text) <= _SHORT_CHARS:
        return text
    half = _SHORT_CHARS // 2
    return f"{text[:half]} … {len(text) - 2 * half} more characters … {text[-half:]}"


def _lineage(trace: Trace, span: TurnSpan, lineage: Lineage | None) -> str:
    """The call's relation to the previous one, and its role if it differs from the trace's."""
    role = "" if span.role == trace.role else f", {span.role}"
    if lineage is None:
        return role.removeprefix(", ")
    if lineage.relation in ("root", "continuation"):
        return lineage.relation + role
    cause = "" if lineage.cause is None else f" ({lineage.cause})"
    return f"{lineage.relation} of {lineage.origin_id}{cause}{role}"


def token_legend() -> Text:
    shades = ((f" {probability:.0%} ", _shade(math.log(probability))) for probability in (1.0, 0.5, 0.1, 0.01))
    return Text.assemble(
        ("context (mask 0)", _CONTEXT),
        "  sampled, by probability: ",
        *shades,
        "  ",
        ("sampled, not trained on", _UNTRAINED),
        "  ",
        ("spliced context", _SPLICED),
    )


def tokens_view(trace: Trace, text_of: TextOf) -> Text:
    """Every token as text or id: context grey, sampled tokens shaded by log-prob, `┃` before each turn."""
    out = Text()
    for run in runs_of(trace):
        if run.kind == "sampled":
            out.append("┃", "bold cyan")
        for piece, style in _pieces(run, text_of):
            out.append(piece, style)
    return out


def _pieces(run: Run, text_of: TextOf) -> Iterator[tuple[str, Style]]:
    start, end = elided(run, head=_HEAD, tail=_TAIL)
    for index, token_id in enumerate(run.ids):
        if index == start and end > start:
            yield f" … {end - start} ids … ", _ELIDED
        if not start <= index < end:
            yield _label(token_id, text_of), _style(run, index)


def _label(token_id: int, text_of: TextOf) -> str:
    text = text_of(token_id)
    if text is None:
        return f"{token_id} "
    shown = "".join(char if char.isprintable() else "↵\n" if char == "\n" else "·" for char in text)
    return shown or "·"


def _style(run: Run, index: int) -> Style:
    if run.kind != "sampled":
        return _SPLICED if run.spliced else _CONTEXT
    return _UNTRAINED if run.logprobs is None else _shade(run.logprobs[index])


def _shade(logprob: float) -> Style:
    """From green for confident tokens, over yellow, to red for unlikely ones."""
    probability = math.exp(min(logprob, 0.0))
    red, green = min(1.0, 2 - 2 * probability**0.5), min(1.0, 2 * probability**0.5)
    background = f"rgb({int(40 + 170 * red)},{int(40 + 150 * green)},60)"
    return Style(color="black", bgcolor=background)
