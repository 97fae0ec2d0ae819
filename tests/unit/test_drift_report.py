"""The drift report: what counts as a break, what it is put down to, what it costs."""

from __future__ import annotations

import msgspec
import pytest

from gangline.domain.completion import Completion, Lineage
from gangline.domain.errors import BuilderError
from gangline.rows.drift import call_drifts, drift_by, drift_report
from support.strategies import Sample, user


def a_session() -> Sample:
    """Two exact turns; a third whose prompt lost the last id of five; an aborted one of its own."""
    sample = Sample()
    one = sample.add(prompt=[1, 2], sampled=[5, 2], messages=(user("a"),))
    two = sample.add(
        prompt=[1, 2, 5, 2, 7], sampled=[6], messages=(user("a"), one.response, user("b")), parent_id=one.completion_id
    )
    messages = (*sample.messages[two.completion_id], two.response, user("c"))
    sample.add(
        prompt=[1, 2, 5, 2, 7, 8, 9, 9],
        sampled=[3, 3, 3],
        messages=messages,
        parent_id=two.completion_id,
        cause="bpe_merge",
        prompt_source="engine",
    )
    sample.add(prompt=[4], sampled=[4], messages=(user("x"),), status="aborted", untrainable="aborted: it was enough")
    return sample


def test_a_prompt_that_lost_sampled_ids_is_a_break_with_its_place_and_cause() -> None:
    report = drift_report(call_drifts(a_session().tree))
    assert report.contexts == {"first": 2, "exact": 1, "diverged": 1}
    (one,) = report.breaks
    assert (one.kind, one.cause, one.completion_id) == ("diverged", "bpe_merge", "c0002")
    assert (one.first_divergence, one.num_parent_ids, one.num_prompt_ids) == (5, 6, 8)
    assert report.causes == {"bpe_merge": 1}
    assert report.exact_share == 0.5
    assert (report.num_repeated_tokens, report.num_forgotten_tokens) == (8, 1)
    assert report.median_first_divergence == pytest.approx(5 / 6)


def test_what_cannot_be_trained_on_is_counted_with_its_reason() -> None:
    report = drift_report(call_drifts(a_session().tree))
    assert (report.num_completions, report.num_aborted, report.num_sampled_tokens) == (4, 1, 7)
    assert report.untrainable == {"aborted: it was enough": 1}
    assert report.num_untrainable_tokens == 1
    assert report.prompt_sources == {"engine": 3, "stitched": 1}


def changed(completion: Completion) -> Completion:
    lineage = Lineage(relation="changed", origin_id="c0001", cause="system_changed", first_change=0)
    return msgspec.structs.replace(completion, lineage=lineage)


def test_a_call_whose_client_edited_the_history_is_a_break_though_it_has_no_parent() -> None:
    *others, last = a_session().tree
    report = drift_report(call_drifts([*others, changed(msgspec.structs.replace(last, status="complete"))]))
    assert report.num_changed == 1
    assert [one.kind for one in report.breaks] == ["diverged", "changed"]
    assert report.causes == {"bpe_merge": 1, "system_changed": 1}
    assert report.exact_share == pytest.approx(1 / 3)
    assert report.breaks[1].first_divergence is None


def test_an_exact_branch_of_an_edited_history_is_no_exact_continuation() -> None:
    one, two, *_ = a_session().tree
    report = drift_report(call_drifts([one, changed(two)]))
    assert report.contexts == {"first": 1, "exact": 1}
    assert report.exact_share == 0.0


def test_a_session_without_follow_up_has_no_share() -> None:
    first, *_ = a_session().tree
    report = drift_report(call_drifts([first]))
    assert report.exact_share is None
    assert report.median_first_divergence is None


def test_calls_are_grouped_by_any_key_and_add_up() -> None:
    calls = call_drifts(a_session().tree)
    groups = drift_by((call.prompt_source, call) for call in calls)
    assert {name: report.num_completions for name, report in groups.items()} == {"engine": 3, "stitched": 1}
    assert sum(report.num_sampled_tokens for report in groups.values()) == drift_report(calls).num_sampled_tokens


def test_completions_that_are_no_tree_are_refused() -> None:
    _, *orphans = a_session().tree
    with pytest.raises(BuilderError, match="not a tree"):
        call_drifts(orphans)
