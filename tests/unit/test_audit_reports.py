"""What the audit counts and says, on a session written by hand; and the comparison of log-probs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from gangline.domain.completion import Certificate
from gangline.domain.conversation import SamplingParams
from gangline.domain.errors import BuilderError
from gangline.domain.tokens import Logprobs, TokenIds
from gangline.trajectories.audit import ClassCount, audit, merge_reports
from gangline.trajectories.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.trajectories.comparability import why_not_comparable
from gangline.trajectories.logprob_audit import compare_logprobs
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


def test_reports_of_sessions_add_up() -> None:
    report = audit(built(), SAMPLE.tree)
    both = merge_reports([report, report])
    assert both.num_sessions == 2
    assert both.num_sampled_tokens == 26
    assert both.classes["first"] == ClassCount(4, 10)


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
