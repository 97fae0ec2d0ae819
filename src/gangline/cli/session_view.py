"""What `gangline show` prints: a task's sessions, a session's traces and turns, a trace's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gangline.cli.token_runs import Run, TextOf, elided, runs_of, standing
from gangline.domain.conversation import ToolCall, message_text

if TYPE_CHECKING:
    from gangline.domain.completion import Lineage
    from gangline.domain.conversation import Message
    from gangline.domain.session import SessionResult
    from gangline.domain.trajectory import Trace, TurnSpan

__all__ = ["session_view", "task_view", "token_legend", "tokens_view", "trace_view"]

_HEAD, _TAIL = 48, 80
_SAID_CHARS = 60
_CONTEXT = Style(color="grey58")
_SPLICED = Style(color="magenta", italic=True)
_UNTRAINED = Style(color="grey58", strike=True)
_ELIDED = Style(color="grey58", italic=True)


def _table(*titles: str) -> Table:
    """Titles that end with `#` are of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        number = title.endswith("#")
        table.add_column(title.removesuffix("#"), justify="right" if number else "left", overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def task_view(results: Iterable[SessionResult]) -> Table:
    """One line for each session."""
    table = _table("session", "outcome", "reward#", "turns#", "rows#", "sampled#", "exact", "failure")
    for result in results:
        completions = result.completions
        known = sum(completion.parent_id is not None for completion in completions)
        exact = sum(completion.certificate.context == "exact" for completion in completions)
        table.add_row(
            Text(result.session_id),
            result.outcome,
            _number(result.reward),
            str(len(completions)),
            str(0 if result.trajectory is None else len(result.trajectory.traces)),
            str(sum(len(completion.sampled_ids) for completion in completions)),
            f"{exact} of {known}" if known else "–",
            Text("" if result.failure is None else f"{result.failure.boundary}: {result.failure.message}"),
        )
    return table


def session_view(result: SessionResult) -> RenderableType:
    """How the session went: outcome, reward, time in each stage."""
    head = Text.assemble((result.session_id, "bold"), f"  {result.outcome}")
    head.append(f"  reward {_number(result.reward)}", "bold green" if result.reward else "")
    lines = [head, Text(f"task {result.task_id}, attempt {result.attempt}, node {result.node_id or 'none'}")]
    if result.timings:
        stages = (f"{timing.stage} {timing.ended_at - timing.started_at:.2f} s" for timing in result.timings)
        lines.append(Text("time: " + ", ".join(stages)))
    if result.failure is not None:
        lines.append(Text(f"failure: {result.failure.boundary}, {result.failure.message}", "red"))
    if result.reward_details:
        lines.append(Text(f"evaluator: {result.reward_details}"))
    if result.trajectory is None:
        lines.append(Text("no trajectory was built"))
    return Group(*lines)


def trace_view(trace: Trace, index: int, lineages: Mapping[str, Lineage] | None = None) -> RenderableType:
    """Where the trace begins and why there, and a line for each turn.

    lineages: of the session's completions, by id; None leaves them out.
    """
    head = Text.assemble((f"trace {index}", "bold"), f"  {trace.trace_id}  {trace.role}, {standing(trace)}")
    num_trained = int(trace.loss_mask.sum())
    facts = f"{_num_prompt(trace)}, {len(trace.response_ids)} response ids, {num_trained} trainable"
    lines: list[RenderableType] = [head, Text(f"{facts}, reward {_number(trace.reward)}")]
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
    return Group(*lines, _turns_table(trace, lineages or {}))


def _num_prompt(trace: Trace) -> str:
    """A trace of a tree has only its own part of the prompt."""
    shared = trace.shared_prefix
    after = "" if shared is None else f", after {shared.num_ids} ids of {shared.trace_id}"
    return f"{len(trace.prompt_ids)} prompt ids{after}"


def _turns_table(trace: Trace, lineages: Mapping[str, Lineage]) -> Table:
    from gangline.trajectories.audit import turn_class

    table = _table(
        *("turn#", "completion", "lineage", "context", "+ids#", "sampled#", "mean log-prob#", "versions", "finish"),
        "said",
    )
    said = [message for message in trace.response_messages if message.role == "assistant"]
    at = 0
    for index, (span, held) in enumerate(zip(trace.spans, trace.certificates, strict=True)):
        logprobs = trace.response_logprobs[span.start : span.end][trace.loss_mask[span.start : span.end] == 1]
        versions = dict.fromkeys(str(piece.version) for piece in held.version_spans if piece.end > piece.start)
        table.add_row(
            str(index),
            span.completion_id,
            _lineage(trace, span, lineages.get(span.completion_id)),
            turn_class(trace, index) + ("" if held.fallback is None else f" ({held.fallback})"),
            str(len(trace.prompt_ids) if index == 0 else span.start - at),
            str(span.end - span.start),
            f"{logprobs.mean():.2f}" if len(logprobs) else "masked",
            ",".join(versions) or "–",
            held.finish_reason,
            Text(_said(said[index]) if len(said) == len(trace.spans) else ""),
        )
        at = span.end
    return table


def _lineage(trace: Trace, span: TurnSpan, lineage: Lineage | None) -> str:
    """What the call is to the one before it, and its role where that is not the trace's."""
    role = "" if span.role == trace.role else f", {span.role}"
    if lineage is None:
        return role.removeprefix(", ") or "–"
    if lineage.relation in ("root", "continuation"):
        return lineage.relation + role
    cause = "" if lineage.cause is None else f" ({lineage.cause})"
    return f"{lineage.relation} of {lineage.origin_id}{cause}{role}"


def _said(message: Message) -> str:
    """A reply on one line."""
    calls = (f"{part.name}({part.arguments})" for part in message.parts if isinstance(part, ToolCall))
    text = " ".join([*message_text(message).split(), *calls])
    return text if len(text) <= _SAID_CHARS else text[: _SAID_CHARS - 1] + "…"


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


def tokens_view(trace: Trace, text_of: TextOf | None) -> Text:
    """Every token as text, or as its id: context grey, sampled tokens shaded by log-prob, `┃` before each turn."""
    out = Text()
    for run in runs_of(trace):
        if run.kind == "sampled":
            out.append("┃", "bold cyan")
        for piece, style in _pieces(run, text_of):
            out.append(piece, style)
    return out


def _pieces(run: Run, text_of: TextOf | None) -> Iterator[tuple[str, Style]]:
    start, end = elided(run, head=_HEAD, tail=_TAIL)
    for index, token_id in enumerate(run.ids):
        if index == start and end > start:
            yield f" … {end - start} ids … ", _ELIDED
        if not start <= index < end:
            yield _label(token_id, text_of), _style(run, index)


def _label(token_id: int, text_of: TextOf | None) -> str:
    if text_of is None:
        return f"{token_id} "
    text = text_of(token_id)
    shown = "".join(char if char.isprintable() else "↵\n" if char == "\n" else "·" for char in text)
    return shown or "·"


def _style(run: Run, index: int) -> Style:
    if run.kind != "sampled":
        return _SPLICED if run.spliced else _CONTEXT
    return _UNTRAINED if run.logprobs is None else _shade(run.logprobs[index])


def _shade(logprob: float) -> Style:
    """Green where the model was sure, over yellow, to red where it was not."""
    probability = math.exp(min(logprob, 0.0))
    red, green = min(1.0, 2 - 2 * probability**0.5), min(1.0, 2 * probability**0.5)
    background = f"rgb({int(40 + 170 * red)},{int(40 + 150 * green)},60)"
    return Style(color="black", bgcolor=background)
