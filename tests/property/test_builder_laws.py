"""What every trajectory must keep, for any session: token truth, context truth, exactly once, in linear work."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.tokens import encode_msgpack
from gangline.domain.trajectory import Trace, Trajectory
from gangline.trajectories.per_request import PerRequestBuilder
from gangline.trajectories.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from strategies import END_OF_TURN, Sample, completion_trees

SPLIT = PrefixMergingBuilder()
SPLICE = PrefixMergingBuilder(PrefixMergingConfig(on_divergence="splice", end_of_turn_ids=(END_OF_TURN,)))
EACH = PerRequestBuilder()
builders = pytest.mark.parametrize("builder", [SPLIT, SPLICE, EACH], ids=["split", "splice", "per_request"])
few = settings(max_examples=60, deadline=None)
Builder = PrefixMergingBuilder | PerRequestBuilder


def build(builder: Builder, sample: Sample) -> Trajectory:
    return builder.build(sample.tree, session_id="session-1", task_id="task-1")


def may_train(completion: Completion) -> bool:
    untrainable = completion.certificate.untrainable is not None
    return completion.status == "complete" and not untrainable and len(completion.sampled_ids) > 0


def versions(completion: Completion) -> list[int]:
    """Token by token, as the spans say."""
    spans = completion.certificate.version_spans
    return [
        next(span.version for span in spans if span.start <= i < span.end) for i in range(len(completion.sampled_ids))
    ]


def first_splice(trace: Trace) -> int:
    return min((splice.at for splice in trace.splices), default=len(trace.response_ids))


@builders
@few
@given(sample=completion_trees())
def test_every_completion_is_a_turn_of_exactly_one_trace(builder: Builder, sample: Sample) -> None:
    trajectory = build(builder, sample)
    counted = Counter(span.completion_id for trace in trajectory.traces for span in trace.spans)
    assert counted == Counter({completion.completion_id: 1 for completion in sample.tree})
    assert trajectory.num_completions == len(sample.tree)


@builders
@few
@given(sample=completion_trees())
def test_a_turn_holds_the_sampled_ids_logprobs_and_versions_of_its_completion(builder: Builder, sample: Sample) -> None:
    for trace in build(builder, sample).traces:
        for span in trace.spans:
            completion = sample.tree[span.completion_id]
            turn = slice(span.start, span.end)
            trained = may_train(completion)
            n = len(completion.sampled_ids)
            assert trace.response_ids[turn].tolist() == completion.sampled_ids.tolist()
            assert trace.loss_mask[turn].tolist() == [int(trained)] * n
            assert trace.response_logprobs[turn].tolist() == (completion.logprobs.tolist() if trained else [0.0] * n)
            assert trace.response_versions[turn].tolist() == (versions(completion) if trained else [-1] * n)


@builders
@few
@given(sample=completion_trees())
def test_whatever_was_not_sampled_is_masked(builder: Builder, sample: Sample) -> None:
    for trace in build(builder, sample).traces:
        sampled = {at for span in trace.spans for at in range(span.start, span.end)}
        between = [at for at in range(len(trace.response_ids)) if at not in sampled]
        assert not trace.loss_mask[between].any()
        assert not trace.response_logprobs[between].any()
        assert (trace.response_versions[between] == -1).all()


@builders
@few
@given(sample=completion_trees())
def test_before_a_splice_a_turn_stands_after_exactly_what_the_engine_saw(builder: Builder, sample: Sample) -> None:
    for trace in build(builder, sample).traces:
        row = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        for span in trace.spans:
            if span.start < first_splice(trace):
                assert row[: len(trace.prompt_ids) + span.start] == sample.prompts[span.completion_id]


@few
@given(sample=completion_trees())
def test_splitting_never_splices(sample: Sample) -> None:
    assert not any(trace.splices for trace in build(SPLIT, sample).traces)


@few
@given(sample=completion_trees())
def test_only_an_exact_turn_follows_another_in_a_split_trace(sample: Sample) -> None:
    for trace in build(SPLIT, sample).traces:
        for before, span in zip(trace.spans, trace.spans[1:], strict=False):
            completion = sample.tree[span.completion_id]
            assert completion.parent_id == before.completion_id
            assert completion.certificate.context == "exact"


@few
@given(sample=completion_trees())
def test_the_first_exact_child_that_completed_extends_the_chain(sample: Sample) -> None:
    trajectory = build(SPLIT, sample)
    follows = {
        span.completion_id: before.completion_id
        for trace in trajectory.traces
        for before, span in zip(trace.spans, trace.spans[1:], strict=False)
    }
    extended: set[str] = set()
    for completion in sample.tree:
        parent = completion.parent_id
        joins = completion.status == "complete" and completion.certificate.context == "exact" and parent not in extended
        assert follows.get(completion.completion_id) == (parent if joins else None)
        if joins and parent is not None:
            extended.add(parent)


@few
@given(sample=completion_trees())
def test_the_published_rule_joins_wherever_the_prompt_begins_with_the_one_before(sample: Sample) -> None:
    for trace in build(SPLICE, sample).traces:
        at = {span.completion_id: index for index, span in enumerate(trace.spans)}
        for splice in trace.splices:
            index = at[splice.completion_id]
            before, span = trace.spans[index - 1], trace.spans[index]
            prompt, earlier = sample.prompts[span.completion_id], sample.prompts[before.completion_id]
            tail = prompt[len(earlier) :]
            after_end = tail[tail.index(END_OF_TURN) :]
            if sample.tree[before.completion_id].sampled_ids.tolist()[-1:] == [END_OF_TURN]:
                after_end = after_end[1:]
            assert prompt[: len(earlier)] == earlier
            assert splice.at == before.end
            assert trace.response_ids[before.end : span.start].tolist() == after_end
            assert splice.cause == sample.tree[span.completion_id].certificate.cause


@builders
@few
@given(sample=completion_trees())
def test_messages_are_the_conversation_of_the_last_turn(builder: Builder, sample: Sample) -> None:
    for trace in build(builder, sample).traces:
        first, last = trace.spans[0].completion_id, trace.spans[-1].completion_id
        assert trace.prompt_messages == sample.messages[first]
        assert trace.response_messages[-1] == sample.tree[last].response
        if not trace.splices:
            said = (*trace.prompt_messages, *trace.response_messages)
            assert said == (*sample.messages[last], sample.tree[last].response)


@builders
@few
@given(sample=completion_trees())
def test_a_fully_masked_trace_says_why_and_no_other_does(builder: Builder, sample: Sample) -> None:
    for trace in build(builder, sample).traces:
        assert (trace.untrainable is None) == bool(trace.loss_mask.any())
        for span, certificate in zip(trace.spans, trace.certificates, strict=True):
            assert (certificate.untrainable is None) == may_train(sample.tree[span.completion_id])


@builders
@few
@given(sample=completion_trees())
def test_lineage_leads_to_the_trace_that_holds_the_parent(builder: Builder, sample: Sample) -> None:
    trajectory = build(builder, sample)
    holder = {span.completion_id: trace.trace_id for trace in trajectory.traces for span in trace.spans}
    for trace in trajectory.traces:
        parent = sample.tree[trace.spans[0].completion_id].parent_id
        assert trace.parent_trace_id == (None if parent is None else holder[parent])
        if trace.parent_trace_id is not None:
            parents = {t.trace_id: t for t in trajectory.traces}
            assert trace.role == parents[trace.parent_trace_id].role
    roots = [trace for trace in trajectory.traces if trace.parent_trace_id is None]
    assert sum(trace.role == "main" for trace in roots) == min(1, len(roots))


@builders
@few
@given(sample=completion_trees())
def test_the_same_journal_gives_the_same_bytes(builder: Builder, sample: Sample) -> None:
    again = CompletionTree(list(sample.tree))
    rebuilt = builder.build(again, session_id="session-1", task_id="task-1")
    assert encode_msgpack(build(builder, sample)) == encode_msgpack(rebuilt)


@settings(max_examples=5, deadline=None)
@given(sample=completion_trees(max_size=40))
def test_a_merged_session_holds_no_id_twice(sample: Sample) -> None:
    """Linear: a trace repeats ids of another only where its prompt had to be written out anew."""
    trajectory = build(SPLIT, sample)
    num_ids = sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in trajectory.traces)
    first = {trace.spans[0].completion_id for trace in trajectory.traces}
    expected = sum(
        (len(sample.prompts[c.completion_id]) if c.completion_id in first else len(c.prompt_suffix_ids))
        + len(c.sampled_ids)
        for c in sample.tree
    )
    assert num_ids == expected
