"""What every trajectory must keep, for any session: token truth, context truth, exactly once, in linear work."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.contracts import Builder
from gangline.domain.tokens import common_prefix_len, encode_msgpack
from gangline.domain.trajectory import Trace, Trajectory
from gangline.rows.audit import audit
from gangline.rows.builders.message_prefix import MessagePrefixBuilder, MessagePrefixConfig
from gangline.rows.builders.per_request import PerRequestBuilder
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.builders.tree import TreeBuilder, token_tree
from gangline.rows.drift import call_drifts, drift_report
from gangline.rows.shared_prefixes import with_whole_prompts
from support.strategies import END_OF_TURN, Sample, completion_trees

SPLIT = PrefixMergingBuilder()
SPLICE = PrefixMergingBuilder(PrefixMergingConfig(on_divergence="splice", end_of_turn_ids=(END_OF_TURN,)))
EACH = PerRequestBuilder()
BY_MESSAGES = MessagePrefixBuilder()
BY_MESSAGES_SPLICED = MessagePrefixBuilder(MessagePrefixConfig(on_divergence="splice", end_of_turn_ids=(END_OF_TURN,)))
TREE = TreeBuilder()
BUILDERS = {
    "split": SPLIT,
    "splice": SPLICE,
    "per_request": EACH,
    "message_prefix": BY_MESSAGES,
    "message_prefix_splice": BY_MESSAGES_SPLICED,
    "tree": TREE,
}
builders = pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
few = settings(max_examples=60, deadline=None)


def build(builder: Builder, sample: Sample) -> Trajectory:
    """With whole prompts; those of a tree are written out."""
    built = builder.build(sample.tree, session_id="session-1", task_id="task-1")
    return msgspec.structs.replace(built, traces=tuple(with_whole_prompts(built.traces)))


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
def test_splitting_makes_a_row_of_each_call_that_the_drift_report_does_not_count_as_exact(sample: Sample) -> None:
    """And of each further exact call of one turn, and of each aborted one."""
    exact = [one for one in sample.tree if one.status == "complete" and one.certificate.context == "exact"]
    joined = {one.parent_id for one in exact}
    rows = len(build(SPLIT, sample).traces)
    assert rows == len(sample.tree) - len(joined)
    assert rows >= len(sample.tree) - drift_report(call_drifts(sample.tree)).contexts.get("exact", 0)


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
            assert sample.tree[span.completion_id].parent_id == before.completion_id
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
    assert any(trace.role == "main" for trace in roots) == bool(roots)


@builders
@few
@given(sample=completion_trees())
def test_the_same_journal_gives_the_same_bytes(builder: Builder, sample: Sample) -> None:
    again = CompletionTree(list(sample.tree))
    rebuilt = builder.build(again, session_id="session-1", task_id="task-1")
    built = builder.build(sample.tree, session_id="session-1", task_id="task-1")
    assert encode_msgpack(built) == encode_msgpack(rebuilt)


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


@builders
@few
@given(sample=completion_trees())
def test_the_audit_agrees(builder: Builder, sample: Sample) -> None:
    """It shares no code with the builders."""
    built = builder.build(sample.tree, session_id="session-1", task_id="task-1")
    assert audit(built, sample.tree).violations == ()


@few
@given(sample=completion_trees())
def test_a_tree_is_the_merged_rows_and_nothing_else(sample: Sample) -> None:
    merged = msgspec.structs.replace(build(SPLIT, sample), builder="tree")
    assert encode_msgpack(build(TREE, sample)) == encode_msgpack(merged)


@few
@given(sample=completion_trees(max_size=16))
def test_a_tree_holds_no_context_id_twice(sample: Sample) -> None:
    """Each prompt shares as much as any earlier trace has of it."""
    built = TREE.build(sample.tree, session_id="session-1", task_id="task-1")
    streams: list[list[int]] = []
    for kept, whole in zip(built.traces, with_whole_prompts(built.traces), strict=True):
        most = max((common_prefix_len(whole.prompt_ids, np.array(ids, np.int32)) for ids in streams), default=0)
        assert (0 if kept.shared_prefix is None else kept.shared_prefix.num_ids) == most
        assert len(kept.prompt_ids) == len(whole.prompt_ids) - most
        streams.append([*whole.prompt_ids.tolist(), *whole.response_ids.tolist()])


@few
@given(sample=completion_trees())
def test_the_flat_tree_holds_each_sampled_token_once_and_every_row_as_a_path(sample: Sample) -> None:
    built = TREE.build(sample.tree, session_id="session-1", task_id="task-1")
    flat = token_tree(built)
    trained = Counter(zip(flat.ids[flat.loss_mask == 1], flat.logprobs[flat.loss_mask == 1].tolist(), strict=True))
    expected: Counter[tuple[int, float]] = Counter()
    for completion in filter(may_train, sample.tree):
        expected.update(zip(completion.sampled_ids.tolist(), completion.logprobs.tolist(), strict=True))
    assert trained == expected
    for trace in build(SPLIT, sample).traces:
        row = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        kept = next(one for one in built.traces if one.trace_id == trace.trace_id)
        num_own = len(kept.prompt_ids) + len(kept.response_ids)
        if num_own:
            assert path_to(flat.trace_starts[trace.trace_id] + num_own - 1, flat.parents, flat.ids) == row
            assert flat.depths[flat.trace_starts[trace.trace_id] + num_own - 1] == len(row) - 1


def path_to(at: int, parents: np.ndarray, ids: np.ndarray) -> list[int]:
    path: list[int] = []
    while at >= 0:
        path.append(int(ids[at]))
        assert parents[at] < at
        at = int(parents[at])
    return path[::-1]


@few
@given(sample=completion_trees())
def test_rows_of_messages_never_leave_out_or_reorder_a_call(sample: Sample) -> None:
    """The rule has one open trace: read one after the other, the rows give the calls in the order they were made."""
    for builder in (BY_MESSAGES, BY_MESSAGES_SPLICED):
        completed = [c.completion_id for c in sample.tree if c.status == "complete"]
        turns = [span.completion_id for trace in build(builder, sample).traces for span in trace.spans]
        assert [turn for turn in turns if sample.tree[turn].status == "complete"] == completed


@few
@given(sample=completion_trees())
def test_a_row_of_messages_goes_on_exactly_where_the_messages_do(sample: Sample) -> None:
    follows = {
        span.completion_id: before.completion_id
        for trace in build(BY_MESSAGES, sample).traces
        for before, span in zip(trace.spans, trace.spans[1:], strict=False)
    }
    completed = [completion for completion in sample.tree if completion.status == "complete"]
    for before, completion in pairwise(completed):
        history = (*sample.messages[before.completion_id], before.response)
        continues = sample.messages[completion.completion_id][: len(history)] == history
        exact = completion.certificate.context == "exact" and completion.parent_id == before.completion_id
        expected = before.completion_id if continues and exact else None
        assert follows.get(completion.completion_id) == expected
