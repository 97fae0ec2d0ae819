"""The audit passes what the builders make, and finds every kind of corruption, wherever it is planted."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gangline.domain.trajectory import Splice, Trace, Trajectory, TurnSpan
from gangline.rows.audit import audit
from gangline.rows.builders.per_request import PerRequestBuilder
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from support.strategies import Sample, completion_trees

BUILDERS = {
    "split": PrefixMergingBuilder(),
    "splice": PrefixMergingBuilder(PrefixMergingConfig(on_divergence="splice")),
    "per_request": PerRequestBuilder(),
}
few = settings(max_examples=60, deadline=None)


def build(name: str, sample: Sample) -> Trajectory:
    return BUILDERS[name].build(sample.tree, session_id="session-1", task_id="task-1")


@pytest.mark.parametrize("name", BUILDERS)
@few
@given(sample=completion_trees())
def test_what_a_builder_makes_passes(name: str, sample: Sample) -> None:
    report = audit(build(name, sample), sample.tree)
    assert report.violations == ()
    assert sum(count.tokens for count in report.classes.values()) == report.num_sampled_tokens
    assert sum(count.turns for count in report.classes.values()) == len(sample.tree)


def replaced(trace: Trace, **changes: object) -> Trace:
    return msgspec.structs.replace(trace, **changes)


def poked(array: np.ndarray, at: int, value: float) -> np.ndarray:
    out = array.copy()
    out[at] = value
    return out


def places(trace: Trace, mask: int) -> list[int]:
    return np.flatnonzero(trace.loss_mask == mask).tolist()


def pick(data: st.DataObject, choices: list[int]) -> int:
    assume(choices)
    return data.draw(st.sampled_from(choices))


def change_a_sampled_id(trace: Trace, data: st.DataObject) -> Trace:
    at = pick(data, places(trace, 1))
    return replaced(trace, response_ids=poked(trace.response_ids, at, trace.response_ids[at] + 1))


def change_a_context_id(trace: Trace, data: st.DataObject) -> Trace:
    sampled = {i for span in trace.spans for i in range(span.start, span.end)}
    at = pick(data, [i for i in range(len(trace.response_ids)) if i not in sampled])
    return replaced(trace, response_ids=poked(trace.response_ids, at, trace.response_ids[at] + 1))


def change_a_prompt_id(trace: Trace, data: st.DataObject) -> Trace:
    at = pick(data, list(range(len(trace.prompt_ids))))
    return replaced(trace, prompt_ids=poked(trace.prompt_ids, at, trace.prompt_ids[at] + 1))


def move_the_prompt_end(trace: Trace, data: st.DataObject) -> Trace:
    return replaced(trace, prompt_ids=trace.prompt_ids[:-1])


def mask_a_sampled_id(trace: Trace, data: st.DataObject) -> Trace:
    at = pick(data, places(trace, 1))
    return replaced(
        trace,
        loss_mask=poked(trace.loss_mask, at, 0),
        response_logprobs=poked(trace.response_logprobs, at, 0.0),
        response_versions=poked(trace.response_versions, at, -1),
    )


def train_on_a_masked_id(trace: Trace, data: st.DataObject) -> Trace:
    return replaced(trace, loss_mask=poked(trace.loss_mask, pick(data, places(trace, 0)), 1), untrainable=None)


def change_a_logprob(trace: Trace, data: st.DataObject) -> Trace:
    at = pick(data, places(trace, 1))
    return replaced(trace, response_logprobs=poked(trace.response_logprobs, at, trace.response_logprobs[at] - 1e-3))


def give_a_masked_id_a_logprob(trace: Trace, data: st.DataObject) -> Trace:
    return replaced(trace, response_logprobs=poked(trace.response_logprobs, pick(data, places(trace, 0)), -0.5))


def change_a_version(trace: Trace, data: st.DataObject) -> Trace:
    at = pick(data, places(trace, 1))
    return replaced(trace, response_versions=poked(trace.response_versions, at, trace.response_versions[at] + 1))


def give_a_masked_id_a_version(trace: Trace, data: st.DataObject) -> Trace:
    return replaced(trace, response_versions=poked(trace.response_versions, pick(data, places(trace, 0)), 3))


def drop_a_logprob(trace: Trace, data: st.DataObject) -> Trace:
    assume(len(trace.response_logprobs))
    return replaced(trace, response_logprobs=trace.response_logprobs[:-1])


def drop_the_last_turn(trace: Trace, data: st.DataObject) -> Trace:
    return replaced(trace, spans=trace.spans[:-1], certificates=trace.certificates[:-1])


def double_the_last_turn(trace: Trace, data: st.DataObject) -> Trace:
    last = trace.spans[-1]
    turn = slice(last.start, last.end)
    arrays = {
        name: np.concatenate([getattr(trace, name), getattr(trace, name)[turn]])
        for name in ("response_ids", "loss_mask", "response_logprobs", "response_versions")
    }
    again = TurnSpan(last.completion_id, len(trace.response_ids), len(trace.response_ids) + last.end - last.start)
    return replaced(
        trace, **arrays, spans=(*trace.spans, again), certificates=(*trace.certificates, trace.certificates[-1])
    )


def move_a_span(trace: Trace, data: st.DataObject) -> Trace:
    first, *rest = trace.spans
    assume(first.end > first.start)
    return replaced(trace, spans=(TurnSpan(first.completion_id, first.start + 1, first.end), *rest))


def name_another_completion(trace: Trace, data: st.DataObject) -> Trace:
    first, *rest = trace.spans
    return replaced(trace, spans=(TurnSpan("c9999", first.start, first.end), *rest))


def forge_a_certificate(trace: Trace, data: st.DataObject) -> Trace:
    forged = msgspec.structs.replace(trace.certificates[0], prompt_source="forged")
    return replaced(trace, certificates=(forged, *trace.certificates[1:]))


def change_the_finish_reason(trace: Trace, data: st.DataObject) -> Trace:
    return replaced(trace, finish_reason="forged")


def forge_the_lineage(trace: Trace, data: st.DataObject) -> Trace:
    return replaced(trace, parent_trace_id="elsewhere")


def declare_a_splice_that_is_none(trace: Trace, data: st.DataObject) -> Trace:
    return replaced(trace, splices=(*trace.splices, Splice(trace.spans[0].completion_id, 0, "unknown")))


def cut_a_turns_ids(trace: Trace, data: st.DataObject) -> Trace:
    """Ids, mask, log-probs and span shortened together: a row that agrees with itself, but lost a token."""
    last = trace.spans[-1]
    assume(last.end > last.start)
    arrays = {
        name: getattr(trace, name)[:-1]
        for name in ("response_ids", "loss_mask", "response_logprobs", "response_versions")
    }
    return replaced(trace, **arrays, spans=(*trace.spans[:-1], TurnSpan(last.completion_id, last.start, last.end - 1)))


Mutation = Callable[[Trace, st.DataObject], Trace]

MUTATIONS: dict[Mutation, set[str]] = {
    change_a_sampled_id: {"ids"},
    change_a_context_id: {"context"},
    change_a_prompt_id: {"context"},
    move_the_prompt_end: {"context"},
    mask_a_sampled_id: {"mask"},
    train_on_a_masked_id: {"ids", "mask"},  # ids: no turn sampled it; mask: its turn must not be trained on
    change_a_logprob: {"logprobs"},
    give_a_masked_id_a_logprob: {"logprobs"},
    change_a_version: {"versions"},
    give_a_masked_id_a_version: {"versions"},
    drop_a_logprob: {"lengths"},
    drop_the_last_turn: {"once"},
    double_the_last_turn: {"once"},
    move_a_span: {"ids"},
    name_another_completion: {"once"},
    forge_a_certificate: {"certificate"},
    change_the_finish_reason: {"certificate"},
    forge_the_lineage: {"lineage"},
    declare_a_splice_that_is_none: {"splice"},
    cut_a_turns_ids: {"ids"},
}
"""Each with the rules that it breaks, one of which the audit names: another rule would send its reader astray."""


@pytest.mark.parametrize(("mutate", "rules"), MUTATIONS.items(), ids=[mutate.__name__ for mutate in MUTATIONS])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])  # some trees fit none
@given(sample=completion_trees(), data=st.data())
def test_a_planted_fault_is_found(mutate: Mutation, rules: set[str], sample: Sample, data: st.DataObject) -> None:
    trajectory = build("split", sample)
    index = pick(data, list(range(len(trajectory.traces))))
    traces = list(trajectory.traces)
    traces[index] = mutate(traces[index], data)
    corrupt = msgspec.structs.replace(trajectory, traces=tuple(traces))
    of_the_row = [
        one for one in audit(corrupt, sample.tree).violations if one.trace_id in (None, traces[index].trace_id)
    ]
    assert rules & {violation.rule for violation in of_the_row}


@few
@given(sample=completion_trees(), data=st.data())
def test_a_lost_or_doubled_trace_is_found(sample: Sample, data: st.DataObject) -> None:
    trajectory = build("split", sample)
    index = pick(data, list(range(len(trajectory.traces))))
    lost = trajectory.traces[:index] + trajectory.traces[index + 1 :]
    doubled = (*trajectory.traces, trajectory.traces[index])
    for traces in (lost, doubled):
        corrupt = msgspec.structs.replace(trajectory, traces=traces)
        rules = {violation.rule for violation in audit(corrupt, sample.tree).violations}
        assert "once" in rules


@few
@given(sample=completion_trees())
def test_a_splice_that_the_row_does_not_declare_is_found(sample: Sample) -> None:
    trajectory = build("splice", sample)
    silent = tuple(msgspec.structs.replace(trace, splices=()) for trace in trajectory.traces)
    report = audit(msgspec.structs.replace(trajectory, traces=silent), sample.tree)
    found = {violation.trace_id for violation in report.violations if violation.rule == "context"}
    assert found == {trace.trace_id for trace in trajectory.traces if trace.splices}
