"""What the audit counts and says, on a session written by hand; and the comparison of log-probs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gangline.domain.completion import Certificate, CompletionTree
from gangline.domain.conversation import SamplingParams
from gangline.domain.errors import BuilderError
from gangline.domain.tokens import Logprobs, TokenIds, logprobs
from gangline.domain.trajectory import Splice, Trajectory, TurnSpan
from gangline.rows.audit import AuditReport, ClassCount, Violation, audit, merge_reports
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.comparability import why_not_comparable
from gangline.rows.logprob_audit import compare_logprobs
from support.strategies import session_sample

SAMPLE = session_sample()


def built(on_divergence: str = "split"):
    builder = PrefixMergingBuilder(PrefixMergingConfig.model_validate({"on_divergence": on_divergence}))
    return builder.build(SAMPLE.tree, session_id="session-1", task_id="task-1")


def test_turns_and_tokens_are_counted_by_how_they_came_by_their_context() -> None:
    report = audit(built(), SAMPLE.tree)
    assert report.ok
    assert report.classes == {
        "first": ClassCount(2, 5),
        "exact_stitched": ClassCount(2, 5),
        "split": ClassCount(2, 3),
    }
    assert (report.num_sampled_tokens, report.num_trained_tokens) == (13, 12)


def test_a_spliced_turn_is_counted_as_such_and_is_no_violation() -> None:
    report = audit(built("splice"), SAMPLE.tree)
    assert report.ok
    assert report.classes["spliced"] == ClassCount(1, 2)


def test_a_violation_names_trace_completion_and_place() -> None:
    trajectory = built()
    first = trajectory.traces[0]
    masked = first.response_logprobs.copy()
    masked[3] = -1.0
    corrupt = msgspec.structs.replace(first, response_logprobs=masked)
    report = audit(msgspec.structs.replace(trajectory, traces=(corrupt, *trajectory.traces[1:])), SAMPLE.tree)
    (violation,) = report.violations
    assert violation.rule == "logprobs"
    assert violation.message == "session-1.t0: a masked id has a log-prob at 3"


def with_trace(index: int, **changes: object) -> Trajectory:
    traces = list(built().traces)
    traces[index] = msgspec.structs.replace(traces[index], **changes)
    return msgspec.structs.replace(built(), traces=tuple(traces))


FIRST, LAST = built().traces[0], built().traces[-1]
TWICE = (*built().traces, LAST)
MASK = FIRST.loss_mask


def poked(array: np.ndarray, at: int, value: float) -> np.ndarray:
    out = array.copy()
    out[at] = value
    return out


@pytest.mark.parametrize(
    ("trajectory", "expected"),
    [
        (
            msgspec.structs.replace(built(), num_completions=9),
            ("once", None, None, "num_completions is 9, the journal has 6"),
        ),
        (
            msgspec.structs.replace(built(), traces=TWICE),
            ("once", None, "c0005", "c0005 is a turn 2 times"),
        ),
        (
            msgspec.structs.replace(built(), traces=built().traces[:-1]),
            ("once", None, "c0005", "c0005 is in no trace: its sampled tokens are lost"),
        ),
        (
            with_trace(1, trace_id="session-1.t0"),
            ("lineage", "session-1.t0", None, "2 traces are called session-1.t0"),
        ),
        (
            with_trace(1, session_id="elsewhere"),
            ("lineage", "session-1.t1", None, "belongs to session elsewhere"),
        ),
        (
            with_trace(2, parent_trace_id=None),
            (
                "lineage",
                "session-1.t2",
                "c0004",
                "parent_trace_id is None, the parent of c0004 is in session-1.t0",
            ),
        ),
        (
            with_trace(0, response_logprobs=FIRST.response_logprobs[:-1]),
            ("lengths", "session-1.t0", None, "session-1.t0: response_logprobs has 12 entries for 13 ids"),
        ),
        (
            with_trace(0, certificates=FIRST.certificates[:-1]),
            ("lengths", "session-1.t0", None, "session-1.t0: has 2 certificates for 3 turns"),
        ),
        (with_trace(1, spans=(), certificates=()), ("lengths", "session-1.t1", None, "session-1.t1: has no turn")),
        (
            with_trace(0, spans=(FIRST.spans[0], TurnSpan("c0001", 2, 7), FIRST.spans[2])),
            ("lengths", "session-1.t0", None, "session-1.t0: turn c0001 at [2, 7) overlaps, or leaves the row"),
        ),
        (
            with_trace(0, spans=(*FIRST.spans[:2], TurnSpan("c0003", 10, 14))),
            ("lengths", "session-1.t0", None, "session-1.t0: turn c0003 at [10, 14) overlaps, or leaves the row"),
        ),
        (
            with_trace(0, untrainable="side"),
            ("mask", "session-1.t0", None, "session-1.t0: the row is untrainable, yet its mask is not all 0"),
        ),
        (
            with_trace(0, loss_mask=poked(MASK, 1, 2)),
            ("mask", "session-1.t0", None, "session-1.t0: the mask is neither 0 nor 1 at 1"),
        ),
        (
            with_trace(0, loss_mask=MASK | 1),
            ("ids", "session-1.t0", None, "session-1.t0: an id that no turn sampled has mask 1 at 3, 4, 7 and 2 more"),
        ),
        (
            with_trace(0, response_versions=poked(FIRST.response_versions, 4, 5)),
            ("versions", "session-1.t0", None, "session-1.t0: a masked id has a policy version at 4"),
        ),
        (
            with_trace(1, spans=(TurnSpan("c9999", 0, 2),)),
            ("once", "session-1.t1", "c9999", "session-1.t1, c9999: is a turn, but not in the journal"),
        ),
        (
            with_trace(0, loss_mask=poked(MASK, 0, 0)),
            ("mask", "session-1.t0", "c0000", "session-1.t0, c0000: some sampled ids are masked and others are not"),
        ),
        (
            with_trace(0, loss_mask=MASK * (np.arange(13) > 2)),
            ("mask", "session-1.t0", "c0000", "session-1.t0, c0000: is masked, and no certificate says why"),
        ),
        (
            with_trace(0, response_ids=poked(FIRST.response_ids, 5, 99)),
            ("ids", "session-1.t0", "c0001", "session-1.t0, c0001: the ids are not the sampled ones"),
        ),
        (
            with_trace(0, response_logprobs=poked(FIRST.response_logprobs, 5, -9)),
            ("logprobs", "session-1.t0", "c0001", "session-1.t0, c0001: the log-probs are not the recorded ones"),
        ),
        (
            with_trace(0, response_versions=poked(FIRST.response_versions, 0, 5)),
            (
                "versions",
                "session-1.t0",
                "c0000",
                "session-1.t0, c0000: the policy versions are not those of the certificate",
            ),
        ),
        (
            with_trace(0, response_ids=poked(FIRST.response_ids, 3, 99)),
            (
                "context",
                "session-1.t0",
                "c0001",
                "session-1.t0, c0001: the ids before the turn are not the prompt that the engine saw",
            ),
        ),
        (
            with_trace(3, loss_mask=LAST.loss_mask | 1, untrainable=None),
            (
                "mask",
                "session-1.t3",
                "c0005",
                "session-1.t3, c0005: must not be trained on (aborted), but has mask 1",
            ),
        ),
        (
            with_trace(0, finish_reason="length"),
            (
                "certificate",
                "session-1.t0",
                "c0003",
                "session-1.t0, c0003: finish_reason is length, the last turn's is stop",
            ),
        ),
        (
            with_trace(0, splices=(Splice("c0001", 4, "unknown"),)),
            (
                "splice",
                "session-1.t0",
                None,
                "session-1.t0: a splice of c0001 at 4 is not where that turn's context begins",
            ),
        ),
    ],
    ids=lambda one: one[3] if isinstance(one, tuple) else "",
)
def test_a_violation_says_what_is_broken_and_where(
    trajectory: Trajectory, expected: tuple[str, str | None, str | None, str]
) -> None:
    found = [
        (one.rule, one.trace_id, one.completion_id, one.message) for one in audit(trajectory, SAMPLE.tree).violations
    ]
    assert expected in found
    assert {one.session_id for one in audit(trajectory, SAMPLE.tree).violations} <= {"session-1", "elsewhere"}


def test_a_certificate_that_claims_what_the_ids_deny_is_a_violation() -> None:
    drifted = SAMPLE.tree["c0004"]
    lied = msgspec.structs.replace(drifted, certificate=msgspec.structs.replace(drifted.certificate, context="exact"))
    tree = [lied if one.completion_id == "c0004" else one for one in SAMPLE.tree]
    report = audit(PrefixMergingBuilder().build(CompletionTree(tree), session_id="session-1", task_id="task-1"), tree)
    assert [(one.rule, one.message) for one in report.violations] == [
        ("certificate", "session-1.t2, c0004: certified exact, but the prompt ids say diverged")
    ]


def test_a_spliced_context_that_is_not_the_prompts_end_is_a_violation() -> None:
    spliced, *others = built("splice").traces
    other = msgspec.structs.replace(spliced, response_ids=poked(spliced.response_ids, 13, 99))
    report = audit(msgspec.structs.replace(built("splice"), traces=(other, *others)), SAMPLE.tree)
    assert [(one.rule, one.completion_id, one.message) for one in report.violations] == [
        ("splice", "c0004", "session-1.t0, c0004: the spliced context is not the end of the turn's prompt")
    ]


def test_too_few_recorded_logprobs_are_a_violation() -> None:
    short = msgspec.structs.replace(SAMPLE.tree["c0002"], logprobs=logprobs([-1.0]))
    tree = [short if one.completion_id == "c0002" else one for one in SAMPLE.tree]
    assert [(one.rule, one.completion_id, one.message) for one in audit(built(), tree).violations] == [
        ("logprobs", "c0002", "session-1.t1, c0002: the journal has 1 log-probs for 2 ids")
    ]


@pytest.mark.parametrize(("recorded", "is_one"), [(0.0, True), (1e-4, True), (0.01, False), (float("-inf"), False)])
def test_a_recorded_logprob_is_finite_and_not_above_zero(recorded: float, is_one: bool) -> None:
    """Some engines round a certain token's to a little above 0. One that is not finite is masked by the builder."""
    side = SAMPLE.tree["c0002"]
    odd = msgspec.structs.replace(side, logprobs=logprobs([recorded, -1.0]))
    tree = [odd if one.completion_id == "c0002" else one for one in SAMPLE.tree]
    trajectory = with_trace(1, response_logprobs=odd.logprobs)
    violations = audit(trajectory, tree).violations
    assert [one.message for one in violations] == (
        [] if is_one else ["session-1.t1, c0002: a recorded log-prob is not one: not finite, or above 0"]
    )


def test_reports_of_sessions_add_up() -> None:
    report = audit(built(), SAMPLE.tree)
    both = merge_reports([report, report])
    assert both.num_sessions == 2
    assert both.num_sampled_tokens == 26
    assert both.classes["first"] == ClassCount(4, 10)


def test_every_number_of_a_merged_report_is_the_sum_and_every_violation_is_kept() -> None:
    broken = Violation(session_id="session-1", rule="ids", message="wrong")
    one = AuditReport(
        num_traces=1,
        num_completions=2,
        num_sampled_tokens=3,
        num_trained_tokens=4,
        left_out={"a": 5, "b": 1},
        classes={"first": ClassCount(6, 7)},
        violations=(broken,),
        dropped=ClassCount(8, 9),
        drop_reasons=("a side call",),
    )
    other = AuditReport(
        num_sessions=2,
        num_traces=10,
        num_completions=20,
        num_sampled_tokens=30,
        num_trained_tokens=40,
        left_out={"a": 50},
        classes={"first": ClassCount(60, 70), "split": ClassCount(1, 2)},
        violations=(broken,),
        dropped=ClassCount(80, 90),
        drop_reasons=("a title", "a side call"),
    )
    assert merge_reports([one, other]) == AuditReport(
        num_sessions=3,
        num_traces=11,
        num_completions=22,
        num_sampled_tokens=33,
        num_trained_tokens=44,
        left_out={"a": 55, "b": 1},
        classes={"first": ClassCount(66, 77), "split": ClassCount(1, 2)},
        violations=(broken, broken),
        dropped=ClassCount(88, 99),
        drop_reasons=("a side call", "a title"),
    )


@pytest.mark.parametrize(("declared", "num"), [("side calls are left out", 2), (None, 0)])
def test_a_call_in_no_trace_is_dropped_where_the_builder_says_so_and_lost_elsewhere(
    declared: str | None, num: int
) -> None:
    """The second trace holds one call of two tokens."""
    main, _, *others = built().traces
    trajectory = msgspec.structs.replace(built(), traces=(main, *others), drops_turns=declared)
    report = audit(trajectory, SAMPLE.tree)
    assert report.dropped == ClassCount(num // 2, num)
    assert report.drop_reasons == (() if declared is None else (declared,))
    assert [(one.rule, one.completion_id) for one in report.violations] == ([] if declared else [("once", "c0002")])


def test_completions_that_are_no_tree_are_refused() -> None:
    orphan = [completion for completion in SAMPLE.tree if completion.completion_id != "c0000"]
    with pytest.raises(BuilderError, match="not a tree of completions"):
        audit(built(), orphan)


def recorded_scores(ids: TokenIds, temperature: float) -> Logprobs:
    """A model that would have said for every token of the main row what was recorded, but 0.25 less."""
    assert temperature == pytest.approx(0.7)
    row = next(t for t in built("splice").traces if len(t.prompt_ids) + len(t.response_ids) == len(ids))
    return np.concatenate([np.zeros(len(row.prompt_ids), np.float32), row.response_logprobs - np.float32(0.25)])


def test_differences_are_gathered_by_class_over_trained_tokens_only() -> None:
    stats = compare_logprobs([built("splice")], recorded_scores).stats()
    assert {name: stat.num_tokens for name, stat in stats.items()} == {"first": 5, "exact_stitched": 5, "spliced": 2}
    assert stats["spliced"].mean == pytest.approx(0.25)
    assert stats["first"].max == pytest.approx(0.25)


def test_tokens_of_another_policy_version_are_left_out_and_counted() -> None:
    compared = compare_logprobs([built()], recorded_scores, version=7)
    assert compared.by_class == {}
    assert compared.not_comparable == {"another policy version": 12}


def certificate(kind: str, constraint: str | None = None, **sampling: float) -> Certificate:
    return Certificate(
        prompt_source="engine",
        context="first",
        logprobs=kind,  # pyright: ignore[reportArgumentType]
        finish_reason="stop",
        constraint=constraint,  # pyright: ignore[reportArgumentType]
        sampling=SamplingParams(**sampling),  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (certificate("processed", temperature=0.7, top_p=1.0, top_k=-1), None),
        (certificate("processed", top_p=0.9), "sampled with top_p"),
        (certificate("processed", top_k=20, presence_penalty=0.5), "sampled with top_k, presence_penalty"),
        (certificate("temperature_scaled", top_p=0.9), None),
        (certificate("raw", top_p=0.9, top_k=5), None),
        (certificate("missing"), "log-probs missing"),
        (certificate("processed", "tool_choice"), "sampled under a grammar (tool_choice)"),
        (certificate("raw", "response_format"), "sampled under a grammar (response_format)"),
    ],
)
def test_only_logprobs_of_the_tempered_softmax_are_compared(held: Certificate, reason: str | None) -> None:
    assert why_not_comparable(held) == reason


def test_the_audit_counts_what_trainers_will_leave_out() -> None:
    trajectory = built()
    assert audit(trajectory, SAMPLE.tree).left_out == {}
    cool = SamplingParams(temperature=0.7)
    first, *others = trajectory.traces
    changed = tuple(msgspec.structs.replace(one, logprobs="raw", sampling=cool) for one in first.certificates)
    report = audit(
        msgspec.structs.replace(trajectory, traces=(msgspec.structs.replace(first, certificates=changed), *others)),
        SAMPLE.tree,
    )
    (reason,) = report.left_out
    assert "raw log-probs at temperature 0.7" in reason
    assert report.left_out[reason] == int(np.count_nonzero(first.loss_mask)) > 0
    assert merge_reports([report, report]).left_out == {reason: 2 * report.left_out[reason]}


def test_raw_logprobs_are_scored_without_temperature() -> None:
    trajectory = built()
    raw = tuple(
        msgspec.structs.replace(
            trace, certificates=tuple(msgspec.structs.replace(held, logprobs="raw") for held in trace.certificates)
        )
        for trace in trajectory.traces
    )
    temperatures: set[float] = set()

    def score(ids: TokenIds, temperature: float) -> Logprobs:
        temperatures.add(temperature)
        return np.zeros(len(ids), np.float32)

    compare_logprobs([msgspec.structs.replace(trajectory, traces=raw)], score)
    assert temperatures == {1.0}
