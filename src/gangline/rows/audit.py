"""The audit: checks rows against the completions they were made from, by its own rules.

It never calls a builder, and its checks apply to the rows of any builder. Every id with `loss_mask = 1` is a sampled id
of the completion that its span names, in order, exactly once, with that completion's log-probs and versions. The ids
before a turn are its prompt, except after a declared splice. No sampled token is lost or doubled; completions that a
builder declares as dropped are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from gangline.domain.completion import Certificate, Completion, CompletionTree
from gangline.domain.errors import BuilderError
from gangline.domain.image_files import image_problems
from gangline.domain.tokens import TokenIds
from gangline.domain.trajectory import Trace, Trajectory, TurnSpan
from gangline.domain.unshown import TOOL_RESULTS, TOOLS
from gangline.rows.comparability import why_not_trainable
from gangline.rows.renderings import count_renderings
from gangline.settings.evidence import evidence_kinds


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """One violated rule, with a message."""

    session_id: str
    rule: str
    """lengths, mask, ids, logprobs, versions, context, certificate, once, lineage, splice, images, experts, masks, and
    names of other kinds of evidence."""
    message: str
    trace_id: str | None = None
    completion_id: str | None = None


class ClassCount(msgspec.Struct, frozen=True):
    turns: int
    tokens: int
    """Sampled tokens, including masked ones."""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    num_sessions: int = 1
    num_traces: int
    num_completions: int
    num_sampled_tokens: int
    num_trained_tokens: int
    """With `loss_mask = 1`."""
    left_out: dict[str, int]
    """Why trainers mask some of these -> number of tokens: their log-probs are of another distribution than they were
    drawn from."""
    classes: dict[str, ClassCount]
    """By `turn_class`."""
    violations: tuple[Violation, ...]
    dropped: ClassCount = ClassCount(0, 0)
    """Completions in no trace, as the builder declared (`Trajectory.drops_turns`)."""
    drop_reasons: tuple[str, ...] = ()
    num_unshown: int = 0
    """Calls whose tools or tool results the model was not shown."""
    renderings: dict[str, int] = {}
    """See `DriftReport`."""

    @property
    def ok(self) -> bool:
        return not self.violations


def turn_class(trace: Trace, index: int) -> str:
    """Returns how turn `index` of a trace got its context.

    first · exact_stitched, exact_engine, exact_rendered: by the source of the prompt ids · split: its prompt diverged,
    and its trace begins with that prompt · spliced: at or after a splice, so the row's context is not the engine's.
    """
    certificate, span = trace.certificates[index], trace.spans[index]
    if any(splice.at <= span.start for splice in trace.splices):
        return "spliced"
    if certificate.context == "diverged":
        return "split"
    return "first" if certificate.context == "first" else f"exact_{certificate.prompt_source}"


def audit(trajectory: Trajectory, completions: Iterable[Completion]) -> AuditReport:
    """Check every trace of a session's trajectory. Linear in tokens for rows of exact chains.

    Raises: BuilderError when the completions do not fit together.
    """
    try:
        tree = CompletionTree(completions)
    except ValueError as error:
        raise BuilderError(
            f"session {trajectory.session_id}: the journal is not a tree of completions: {error}"
        ) from error
    violations = list(_check_session(trajectory, tree))
    dropped = _dropped(trajectory, tree)
    classes: dict[str, ClassCount] = {}
    left_out: Counter[str] = Counter()
    for trace in _with_whole_prompts(trajectory):
        found = list(_check_trace(trace, tree))
        violations += found
        if not any(violation.rule == "lengths" for violation in found):
            _count_classes(trace, classes)
            _count_left_out(trace, left_out)
    return AuditReport(
        num_traces=len(trajectory.traces),
        num_completions=len(tree),
        num_sampled_tokens=sum(len(completion.sampled_ids) for completion in tree),
        num_trained_tokens=sum(int(np.count_nonzero(trace.loss_mask)) for trace in trajectory.traces),
        left_out=dict(left_out),
        classes=classes,
        violations=tuple(violations),
        dropped=ClassCount(len(dropped), sum(len(completion.sampled_ids) for completion in dropped)),
        drop_reasons=(trajectory.drops_turns,) if dropped and trajectory.drops_turns is not None else (),
        num_unshown=sum(bool({TOOLS, TOOL_RESULTS} & set(call.dropped)) for call in tree),
        renderings=count_renderings(call.certificate for call in tree),
    )


def merge_reports(reports: Iterable[AuditReport]) -> AuditReport:
    """Combine the reports of many sessions."""
    parts = list(reports)
    classes: dict[str, ClassCount] = {}
    for part in parts:
        for name, count in part.classes.items():
            before = classes.get(name, ClassCount(0, 0))
            classes[name] = ClassCount(before.turns + count.turns, before.tokens + count.tokens)
    return AuditReport(
        num_sessions=sum(part.num_sessions for part in parts),
        num_traces=sum(part.num_traces for part in parts),
        num_completions=sum(part.num_completions for part in parts),
        num_sampled_tokens=sum(part.num_sampled_tokens for part in parts),
        num_trained_tokens=sum(part.num_trained_tokens for part in parts),
        left_out=dict(sum((Counter(part.left_out) for part in parts), Counter[str]())),
        classes=classes,
        violations=tuple(violation for part in parts for violation in part.violations),
        dropped=ClassCount(sum(part.dropped.turns for part in parts), sum(part.dropped.tokens for part in parts)),
        drop_reasons=tuple(dict.fromkeys(reason for part in parts for reason in part.drop_reasons)),
        num_unshown=sum(part.num_unshown for part in parts),
        renderings=dict(sum((Counter(part.renderings) for part in parts), Counter[str]())),
    )


def _dropped(trajectory: Trajectory, tree: CompletionTree) -> list[Completion]:
    """Returns completions in no trace, if the builder declares that it drops some."""
    if trajectory.drops_turns is None:
        return []
    kept = {span.completion_id for trace in trajectory.traces for span in trace.spans}
    return [completion for completion in tree if completion.completion_id not in kept]


def _count_classes(trace: Trace, classes: dict[str, ClassCount]) -> None:
    for index, span in enumerate(trace.spans):
        name = turn_class(trace, index)
        before = classes.get(name, ClassCount(0, 0))
        classes[name] = ClassCount(before.turns + 1, before.tokens + span.end - span.start)


def _count_left_out(trace: Trace, left_out: Counter[str]) -> None:
    for certificate, span in zip(trace.certificates, trace.spans, strict=True):
        num = int(np.count_nonzero(trace.loss_mask[span.start : span.end]))
        if num and (why := why_not_trainable(certificate)) is not None:
            left_out[why] += num


def _with_whole_prompts(trajectory: Trajectory) -> Iterator[Trace]:
    """Yields the traces with the ids that a tree stores elsewhere. A prompt whose ids cannot all be found stays too
    short."""
    streams: dict[str, TokenIds] = {}
    for trace in trajectory.traces:
        prompt_ids = trace.prompt_ids
        if (place := trace.shared_prefix) is not None:
            kept = streams.get(place.trace_id, np.empty(0, np.int32))[: place.num_ids]
            prompt_ids = np.concatenate([kept, prompt_ids])
            trace = msgspec.structs.replace(trace, prompt_ids=prompt_ids)
        streams[trace.trace_id] = np.concatenate([prompt_ids, trace.response_ids])
        yield trace


def _check_session(trajectory: Trajectory, tree: CompletionTree) -> Iterator[Violation]:
    """Check that every completion is used exactly once, and the lineage."""

    def broken(rule: str, message: str, trace: str | None = None, completion: str | None = None) -> Violation:
        return Violation(
            session_id=trajectory.session_id, rule=rule, message=message, trace_id=trace, completion_id=completion
        )

    spans = Counter(span.completion_id for trace in trajectory.traces for span in trace.spans)
    for completion in tree:
        times = spans[completion.completion_id]
        if times != 1 and not (times == 0 and trajectory.drops_turns is not None):
            what = "is in no trace: its sampled tokens are lost" if times == 0 else f"is a turn {times} times"
            yield broken("once", f"{completion.completion_id} {what}", completion=completion.completion_id)
    if trajectory.num_completions != len(tree):
        yield broken("once", f"num_completions is {trajectory.num_completions}, the journal has {len(tree)}")
    models = _roles_trained(trajectory, tree)
    if len(models) > 1:
        named = ", ".join(sorted(f"role {role}" if role else "the policy" for role in models))
        yield broken("mask", f"tokens of several models are trained on: those of {named}")
    holder = {span.completion_id: trace.trace_id for trace in trajectory.traces for span in trace.spans}
    for trace_id, times in Counter(trace.trace_id for trace in trajectory.traces).items():
        if times > 1:
            yield broken("lineage", f"{times} traces are called {trace_id}", trace_id)
    for trace in trajectory.traces:
        if trace.session_id != trajectory.session_id:
            yield broken("lineage", f"belongs to session {trace.session_id}", trace.trace_id)
        first = trace.spans[0].completion_id if trace.spans else None
        if first is None or first not in tree:
            continue  # reported by the trace's own checks
        parent = tree[first].parent_id
        expected = None if parent is None else holder.get(parent)
        if trace.parent_trace_id != expected:
            message = f"parent_trace_id is {trace.parent_trace_id}, the parent of {first} is in {expected}"
            yield broken("lineage", message, trace.trace_id, first)


def _roles_trained(trajectory: Trajectory, tree: CompletionTree) -> set[str | None]:
    """Returns the roles whose own engines sampled the tokens with mask 1; None: the policy's engines."""
    return {
        tree[span.completion_id].certificate.engine_role
        for trace in trajectory.traces
        for span in trace.spans
        if span.completion_id in tree and trace.loss_mask[span.start : span.end].any()
    }


def _check_trace(trace: Trace, tree: CompletionTree) -> Iterator[Violation]:
    problems = _shape_problems(trace)
    if problems:
        for problem in problems:
            yield _broken(trace, "lengths", problem)
        return
    if bool(trace.untrainable) and trace.loss_mask.any():
        yield _broken(trace, "mask", "the row is untrainable, yet its mask is not all 0")
    yield from _check_outside(trace)
    yield from _check_splices(trace)
    for problem in image_problems(trace):
        yield _broken(trace, "images", problem)
    for kind in evidence_kinds():
        if (problem := kind.problem(tree, trace)) is not None:
            yield _broken(trace, kind.rule or kind.name, problem)
    for index, span in enumerate(trace.spans):
        if span.completion_id not in tree:
            yield _broken(trace, "once", "is a turn, but not in the journal", span)
            continue
        completion = tree[span.completion_id]
        yield from _check_certificate(trace, index, completion, tree)
        yield from _check_turn(trace, index, completion)
        yield from _check_context(trace, index, completion, tree)


def _broken(trace: Trace, rule: str, message: str, span: TurnSpan | None = None) -> Violation:
    completion_id = None if span is None else span.completion_id
    where = trace.trace_id if completion_id is None else f"{trace.trace_id}, {completion_id}"
    return Violation(
        session_id=trace.session_id,
        rule=rule,
        message=f"{where}: {message}",
        trace_id=trace.trace_id,
        completion_id=completion_id,
    )


def _shape_problems(trace: Trace) -> list[str]:
    """Returns problems that make the other checks impossible."""
    num = len(trace.response_ids)
    arrays = {
        "loss_mask": trace.loss_mask,
        "response_logprobs": trace.response_logprobs,
        "response_versions": trace.response_versions,
    }
    problems = [f"{name} has {len(array)} entries for {num} ids" for name, array in arrays.items() if len(array) != num]
    if not trace.spans:
        problems.append("has no turn")
    if len(trace.certificates) != len(trace.spans):
        problems.append(f"has {len(trace.certificates)} certificates for {len(trace.spans)} turns")
    at = 0
    for span in trace.spans:
        if not at <= span.start <= span.end <= num:
            problems.append(f"turn {span.completion_id} at [{span.start}, {span.end}) overlaps, or leaves the row")
        at = max(at, span.end)
    return problems


def _check_outside(trace: Trace) -> Iterator[Violation]:
    """Check that masks are 0 or 1, unsampled tokens are masked, and masked tokens have no log-prob and no version."""
    sampled = np.zeros(len(trace.response_ids), bool)
    for span in trace.spans:
        sampled[span.start : span.end] = True
    masked = trace.loss_mask == 0
    checks = {
        "mask": ((trace.loss_mask != 0) & (trace.loss_mask != 1), "the mask is neither 0 nor 1"),
        "ids": (~sampled & ~masked, "an id that no turn sampled has mask 1"),
        "logprobs": (masked & (trace.response_logprobs != 0.0), "a masked id has a log-prob"),
        "versions": (masked & (trace.response_versions != -1), "a masked id has a policy version"),
    }
    for rule, (wrong, message) in checks.items():
        if wrong.any():
            yield _broken(trace, rule, f"{message} at {_places(wrong)}")


def _places(wrong: np.ndarray) -> str:
    where = np.flatnonzero(wrong)
    more = f" and {len(where) - 3} more" if len(where) > 3 else ""
    return ", ".join(str(int(place)) for place in where[:3]) + more


def _check_splices(trace: Trace) -> Iterator[Violation]:
    ends = {span.completion_id: before.end for before, span in zip(trace.spans, trace.spans[1:], strict=False)}
    for splice in trace.splices:
        if ends.get(splice.completion_id) != splice.at:
            message = f"a splice of {splice.completion_id} at {splice.at} is not where that turn's context begins"
            yield _broken(trace, "splice", message)


def _check_certificate(trace: Trace, index: int, completion: Completion, tree: CompletionTree) -> Iterator[Violation]:
    """Check that the trace's copy equals the journal's, and its claims about the context agree with the ids."""
    held, span = trace.certificates[index], trace.spans[index]
    if msgspec.structs.replace(held, untrainable=completion.certificate.untrainable) != completion.certificate:
        yield _broken(trace, "certificate", "the trace's certificate is not the journal's", span)
    claimed, true = completion.certificate.context, _true_context(completion, tree)
    if claimed != true:
        yield _broken(trace, "certificate", f"certified {claimed}, but the prompt ids say {true}", span)
    if index == len(trace.spans) - 1 and trace.finish_reason != completion.certificate.finish_reason:
        message = f"finish_reason is {trace.finish_reason}, the last turn's is {completion.certificate.finish_reason}"
        yield _broken(trace, "certificate", message, span)


def _true_context(completion: Completion, tree: CompletionTree) -> str:
    if completion.parent_id is None:
        return "first"
    return "exact" if completion.prompt_shared == tree.num_context_ids(completion.parent_id) else "diverged"


def _check_turn(trace: Trace, index: int, completion: Completion) -> Iterator[Violation]:
    """Check ids, mask, log-probs and versions of one turn against its completion."""
    span = trace.spans[index]
    turn = slice(span.start, span.end)
    if not np.array_equal(trace.response_ids[turn], completion.sampled_ids):
        yield _broken(trace, "ids", "the ids are not the sampled ones", span)
        return
    mask = trace.loss_mask[turn]
    if not mask.any():
        excused = trace.certificates[index].untrainable is not None
        if completion.trainable and not excused:
            yield _broken(trace, "mask", "is masked, and no certificate says why", span)
        return
    if not completion.trainable_for(completion.certificate.engine_role):
        reason = completion.certificate.untrainable or completion.status
        yield _broken(trace, "mask", f"must not be trained on ({reason}), but has mask 1", span)
    if not mask.all():
        yield _broken(trace, "mask", "some sampled ids are masked and others are not", span)
    on = mask == 1
    yield from _check_logprobs(trace, span, completion, on)
    if not np.array_equal(trace.response_versions[turn][on], _versions(completion.certificate, len(mask))[on]):
        yield _broken(trace, "versions", "the policy versions are not those of the certificate", span)


def _check_logprobs(trace: Trace, span: TurnSpan, completion: Completion, on: np.ndarray) -> Iterator[Violation]:
    recorded = completion.logprobs
    if len(recorded) != len(completion.sampled_ids):
        yield _broken(trace, "logprobs", f"the journal has {len(recorded)} log-probs for {len(on)} ids", span)
        return
    if not np.array_equal(trace.response_logprobs[span.start : span.end][on], recorded[on]):
        yield _broken(trace, "logprobs", "the log-probs are not the recorded ones", span)
    if not (np.isfinite(recorded[on]).all() and (recorded[on] <= 1e-4).all()):
        yield _broken(trace, "logprobs", "a recorded log-prob is not one: not finite, or above 0", span)


def _versions(certificate: Certificate, num: int) -> np.ndarray:
    versions = np.full(num, -1, np.int32)
    for span in certificate.version_spans:
        versions[span.start : span.end] = span.version
    return versions


def _check_context(trace: Trace, index: int, completion: Completion, tree: CompletionTree) -> Iterator[Violation]:
    """Check that the ids before a turn are the completion's prompt.

    If the previous turn is the parent, and was itself checked, only the newer ids are compared.
    """
    span = trace.spans[index]
    before = trace.spans[index - 1] if index else None
    at = 0 if before is None else before.end
    new_ids: TokenIds = trace.response_ids[at : span.start]
    spliced = {splice.completion_id for splice in trace.splices}
    if completion.completion_id in spliced:
        prompt = tree.prompt_ids(completion)
        if len(new_ids) > len(prompt) or not np.array_equal(prompt[len(prompt) - len(new_ids) :], new_ids):
            yield _broken(trace, "splice", "the spliced context is not the end of the turn's prompt", span)
        return
    if before is not None and _is_exact_child(completion, before.completion_id, tree):
        same = np.array_equal(new_ids, completion.prompt_suffix_ids)
    else:
        row = np.concatenate([trace.prompt_ids, trace.response_ids[: span.start]])
        same = np.array_equal(row, tree.prompt_ids(completion))
    if not same:
        yield _broken(trace, "context", "the ids before the turn are not the prompt that the engine saw", span)


def _is_exact_child(completion: Completion, parent_id: str, tree: CompletionTree) -> bool:
    return completion.parent_id == parent_id and completion.prompt_shared == tree.num_context_ids(parent_id)
