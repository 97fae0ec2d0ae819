"""Builders on sessions written by hand: what a person would expect to see."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np
import pytest

from gangline.domain.completion import CompletionTree
from gangline.domain.contracts import Reward
from gangline.domain.conversation import Message, ModelCall, Text
from gangline.domain.errors import BuilderError, EvaluatorError, InvalidRequest
from gangline.domain.tokens import encode_msgpack, logprobs
from gangline.domain.trajectory import SharedPrefix, Trajectory
from gangline.node.capture.placing import PlaceIndex
from gangline.rows import chains
from gangline.rows.audit import audit
from gangline.rows.builders.per_request import PerRequestBuilder, PerRequestConfig
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.builders.tree import token_tree
from gangline.rows.rewards import apply_reward
from gangline.rows.shared_prefixes import with_whole_prompts
from gangline.settings.plugins import make_builder
from support.strategies import Sample, session_sample, user

EVERY_BUILDER = ("message_prefix", "per_request", "prefix_merging", "tree")


def built(sample: Sample, **config: object):
    builder = PrefixMergingBuilder(PrefixMergingConfig.model_validate(config))
    return builder.build(sample.tree, session_id="session-1", task_id="task-1")


def test_three_exact_turns_make_one_row_and_the_drifted_turn_another() -> None:
    main, side, drifted, aborted = built(session_sample()).traces
    assert main.prompt_ids.tolist() == [1, 4, 5, 6]
    assert main.response_ids.tolist() == [10, 11, 2, 7, 1, 12, 2, 7, 8, 1, 14, 15, 2]
    assert main.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert (main.role, side.role) == ("main", "side")
    assert drifted.parent_trace_id == main.trace_id
    assert drifted.certificates[0].cause == "bpe_merge"
    assert aborted.untrainable == "aborted: the call ended before its reply did"
    assert not aborted.loss_mask.any()


@pytest.mark.parametrize("name", EVERY_BUILDER)
def test_rows_name_their_session_and_the_builder_that_made_them(name: str) -> None:
    made = make_builder(name, {}).build(session_sample().tree, session_id="session-7", task_id="task-3")
    assert (made.session_id, made.task_id, made.builder) == ("session-7", "task-3", name)
    assert [(trace.session_id, trace.trace_id) for trace in made.traces] == [
        ("session-7", f"session-7.t{index}") for index in range(len(made.traces))
    ]


@pytest.mark.parametrize("name", EVERY_BUILDER)
def test_turns_of_other_roles_are_masked_by_every_builder(name: str) -> None:
    sample = session_sample()
    made = make_builder(name, {"roles": ["side"]}).build(sample.tree, session_id="session-1", task_id="task-1")
    assert [trace.role for trace in made.traces if trace.loss_mask.any()] == ["side"]
    main = next(trace for trace in made.traces if trace.role == "main")
    assert main.untrainable == "role main: the builder trains on side only"
    assert main.certificates[0].untrainable == main.untrainable


def test_splicing_goes_on_after_the_rendered_end_of_turn_and_says_so() -> None:
    main, *_ = built(session_sample(), on_divergence="splice").traces
    assert main.response_ids.tolist()[-4:] == [7, 1, 16, 2]
    assert [(s.completion_id, s.at, s.cause) for s in main.splices] == [("c0004", 13, "bpe_merge")]


def test_splicing_a_truncated_turn_keeps_the_rendered_end_as_context() -> None:
    sample = Sample()
    sample.add(prompt=[1, 4], sampled=[10, 11], messages=(user("go"),), finish_reason="length")
    sample.add(prompt=[1, 4, 10, 99, 2, 7, 1], sampled=[12, 2], messages=(user("go"), user("on")), parent_id="c0000")
    (trace,) = built(sample, on_divergence="splice").traces
    assert trace.response_ids.tolist() == [10, 11, 2, 7, 1, 12, 2]
    assert trace.loss_mask.tolist() == [1, 1, 0, 0, 0, 1, 1]


def test_a_turn_whose_prompt_does_not_begin_with_the_one_before_is_never_spliced() -> None:
    sample = Sample()
    sample.add(prompt=[1, 4, 5], sampled=[10, 2], messages=(user("go"),))
    sample.add(prompt=[1, 9, 5, 10, 2, 7, 1], sampled=[12, 2], messages=(user("went"), user("on")), parent_id="c0000")
    assert [len(trace.spans) for trace in built(sample, on_divergence="splice").traces] == [1, 1]


def parent_of(sample: Sample, *messages: Message) -> str | None:
    """The call that capture makes the parent of one with these messages."""
    index = PlaceIndex(sample.tree)
    for completion in sample.tree:
        call = ModelCall(dialect="chat", model="model", messages=sample.messages[completion.completion_id])
        index.add(completion, index.place(call).digest)
    return index.place(ModelCall(dialect="chat", model="model", messages=messages)).parent_id


@pytest.mark.parametrize(("echo", "rows"), [("reply 0", [["c0000", "c0001"]]), ("short", [["c0000"], ["c0001"]])])
def test_splicing_joins_a_reply_that_was_rendered_again_and_not_one_that_the_client_edited(
    echo: str, rows: list[list[str]]
) -> None:
    """The published rule joins both: the prompt begins with the one before, and an end of turn follows."""
    sample = Sample()
    sample.add(prompt=[1, 4], sampled=[10, 11, 2], messages=(user("go"),))
    talk = (user("go"), Message("assistant", (Text(echo),)), user("on"))
    sample.add(prompt=[1, 4, 99, 2, 7, 1], sampled=[12, 2], messages=talk, parent_id=parent_of(sample, *talk))
    traces = built(sample, on_divergence="splice").traces
    assert [[span.completion_id for span in trace.spans] for trace in traces] == rows
    assert sum(int(trace.loss_mask.sum()) for trace in traces) == 5
    if len(traces) == 2:
        assert traces[1].prompt_ids.tolist() == sample.prompts["c0001"]
        assert not any(trace.splices for trace in traces)


def test_choices_of_one_call_share_their_prompt_and_only_the_first_is_continued() -> None:
    sample = Sample()
    sample.add(prompt=[1, 4], sampled=[10, 2], messages=(user("go"),))
    for reply in ([11, 2], [12, 2]):
        sample.add(prompt=[1, 4, 10, 2, 7], sampled=reply, messages=(user("go"), user("on")), parent_id="c0000")
    chain, sibling = built(sample).traces
    assert chain.response_ids.tolist() == [10, 2, 7, 11, 2]
    assert sibling.prompt_ids.tolist() == [1, 4, 10, 2, 7]
    assert sibling.response_ids.tolist() == [12, 2]
    assert sibling.parent_trace_id == chain.trace_id


def test_a_turn_without_usable_logprobs_is_masked_inside_its_row() -> None:
    sample = Sample()
    sample.add(prompt=[1], sampled=[10, 2], messages=(user("go"),), untrainable="a log-prob is NaN")
    sample.add(prompt=[1, 10, 2, 7], sampled=[11, 2], messages=(user("go"), user("on")), parent_id="c0000")
    (trace,) = built(sample).traces
    assert trace.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert trace.untrainable is None
    assert [certificate.untrainable for certificate in trace.certificates] == ["a log-prob is NaN", None]


def test_a_reply_with_wrong_logprobs_is_masked_and_says_why_or_raises_when_strict() -> None:
    sample = Sample()
    good = sample.add(prompt=[1], sampled=[10, 2], messages=(user("go"),))
    tree = CompletionTree([msgspec.structs.replace(good, logprobs=logprobs([-1.0]))])
    (trace,) = PerRequestBuilder().build(tree, session_id="session-1", task_id="task-1").traces
    assert trace.untrainable == "1 log-probs for 2 sampled ids"
    with pytest.raises(BuilderError, match="1 log-probs for 2 sampled ids"):
        PerRequestBuilder(PerRequestConfig(strict=True)).build(tree, session_id="session-1", task_id="task-1")


def test_a_logprob_that_is_no_number_masks_its_turn() -> None:
    sample = Sample()
    good = sample.add(prompt=[1], sampled=[10, 2], messages=(user("go"),))
    tree = CompletionTree([msgspec.structs.replace(good, logprobs=logprobs([-1.0, float("nan")]))])
    (trace,) = PerRequestBuilder().build(tree, session_id="session-1", task_id="task-1").traces
    assert trace.untrainable == "a log-prob is not finite"


def test_an_aborted_call_keeps_the_reason_that_its_certificate_has() -> None:
    sample = Sample()
    sample.add(prompt=[1], sampled=[10], messages=(user("go"),), status="aborted", untrainable="an id was missing")
    assert [trace.untrainable for trace in built(sample).traces] == ["an id was missing"]


def test_a_false_claim_of_exactness_splits_or_raises_when_strict() -> None:
    sample = session_sample()
    claims = msgspec.structs.replace(sample.tree["c0004"].certificate, context="exact")
    lied = [msgspec.structs.replace(c, certificate=claims) if c.completion_id == "c0004" else c for c in sample.tree]
    tree = CompletionTree(lied)
    trajectory = PrefixMergingBuilder().build(tree, session_id="session-1", task_id="task-1")
    assert [len(trace.spans) for trace in trajectory.traces] == [3, 1, 1, 1]
    for name in EVERY_BUILDER:
        with pytest.raises(BuilderError, match="c0004: certified exact"):
            make_builder(name, {"strict": True}).build(tree, session_id="session-1", task_id="task-1")
        truth = make_builder(name, {"strict": True}).build(session_sample().tree, session_id="s", task_id="t")
        assert truth.num_completions == 6


def test_a_turn_that_is_certified_diverged_begins_a_row_although_its_ids_fit() -> None:
    sample = main_and_side()
    doubtful = sample.tree["c0002"]
    claims = msgspec.structs.replace(doubtful.certificate, context="diverged")
    tree = CompletionTree([*list(sample.tree)[:2], msgspec.structs.replace(doubtful, certificate=claims)])
    assert turns(PrefixMergingBuilder().build(tree, session_id="session-1", task_id="task-1")) == [
        ["c0000"],
        ["c0001"],
        ["c0002"],
    ]


def test_a_conversation_of_thousands_of_split_turns_is_built() -> None:
    sample = Sample()
    sample.add(prompt=[1, 5], sampled=[10, 2], messages=(user("go"),))
    for index in range(2000):
        sample.add(prompt=[1, 6], sampled=[10, 2], messages=(user("go"),), parent_id=f"c{index:04d}")
    assert len(built(sample).traces) == 2001


def test_nothing_extends_an_aborted_call() -> None:
    sample = Sample()
    sample.add(prompt=[1, 4], sampled=[10, 11], messages=(user("go"),), status="aborted", finish_reason="abort")
    sample.add(prompt=[1, 4, 10, 11, 7], sampled=[12, 2], messages=(user("go"), user("on")), parent_id="c0000")
    aborted, continued = built(sample).traces
    assert not aborted.loss_mask.any()
    assert continued.prompt_ids.tolist() == [1, 4, 10, 11, 7]
    assert continued.parent_trace_id == aborted.trace_id


def main_and_side() -> Sample:
    """Two exact turns of one conversation, with a call of another one between them."""
    sample = Sample()
    first = sample.add(prompt=[1, 4], sampled=[10, 2], messages=(user("go"),))
    sample.add(prompt=[1, 9], sampled=[13, 2], messages=(user("title"),))
    talk = (user("go"), first.response, user("on"))
    sample.add(prompt=[1, 4, 10, 2, 7], sampled=[11, 2], messages=talk, parent_id="c0000")
    return sample


def turns(trajectory: Trajectory) -> list[list[str]]:
    return [[span.completion_id for span in trace.spans] for trace in trajectory.traces]


def by_messages(sample: Sample, **config: object) -> Trajectory:
    builder = make_builder("message_prefix", config)
    return builder.build(sample.tree, session_id="session-1", task_id="task-1")


def test_by_messages_a_call_of_another_conversation_closes_the_open_trace() -> None:
    assert turns(by_messages(main_and_side())) == [["c0000"], ["c0001"], ["c0002"]]
    assert turns(built(main_and_side())) == [["c0000", "c0002"], ["c0001"]]


def test_by_messages_an_aborted_call_closes_nothing() -> None:
    sample = Sample()
    first = sample.add(prompt=[1, 4], sampled=[10, 2], messages=(user("go"),))
    talk = (user("go"), first.response, user("on"))
    for status in ("aborted", "complete"):
        sample.add(prompt=[1, 4, 10, 2, 7], sampled=[11, 2], messages=talk, parent_id="c0000", status=status)
    assert turns(by_messages(sample)) == [["c0000", "c0002"], ["c0001"]]


@pytest.mark.parametrize("said", ["reply 0", "reply 0, edited"])
def test_by_messages_a_turn_continues_only_what_the_client_did_not_edit(said: str) -> None:
    sample = Sample()
    sample.add(prompt=[1, 4], sampled=[10, 2], messages=(user("go"),))
    talk = (user("go"), Message("assistant", (Text(said),)), user("on"))
    sample.add(prompt=[1, 4, 10, 2, 7], sampled=[11, 2], messages=talk, parent_id="c0000")
    expected = [["c0000", "c0001"]] if said == "reply 0" else [["c0000"], ["c0001"]]
    assert turns(by_messages(sample)) == expected


def test_by_messages_rerendered_ids_split_or_are_spliced_as_told() -> None:
    assert turns(by_messages(session_sample())) == [["c0000", "c0001"], ["c0002"], ["c0003"], ["c0004"], ["c0005"]]
    *_, spliced, _ = by_messages(session_sample(), on_divergence="splice").traces
    assert [span.completion_id for span in spliced.spans] == ["c0003", "c0004"]
    assert spliced.response_ids.tolist() == [14, 15, 2, 7, 1, 16, 2]
    assert [(splice.completion_id, splice.at, splice.cause) for splice in spliced.splices] == [
        ("c0004", 3, "bpe_merge")
    ]


def test_by_messages_calls_in_tokens_go_on_as_their_ids_do() -> None:
    sample = Sample()
    sample.add(prompt=[1, 4], sampled=[10, 2], messages=())
    sample.add(prompt=[1, 4, 10, 2, 7], sampled=[11, 2], messages=(), parent_id="c0000")
    assert turns(by_messages(sample)) == [["c0000", "c0001"]]


def as_tree(sample: Sample) -> Trajectory:
    return make_builder("tree", {}).build(sample.tree, session_id="session-1", task_id="task-1")


def test_a_tree_keeps_of_each_prompt_only_what_no_earlier_trace_has() -> None:
    main, side, drifted, aborted = as_tree(session_sample()).traces
    assert main.shared_prefix is None
    assert (side.shared_prefix, side.prompt_ids.tolist()) == (SharedPrefix(main.trace_id, 1), [9])
    assert (drifted.shared_prefix, drifted.prompt_ids.tolist()) == (SharedPrefix(main.trace_id, 14), [90, 2, 7, 1])
    assert (aborted.shared_prefix, aborted.prompt_ids.tolist()) == (SharedPrefix(drifted.trace_id, 18), [])
    assert side.parent_trace_id is None  # it shares ids with the main conversation, and does not come from it


def test_choices_of_one_call_are_branches_though_they_sampled_the_same_ids() -> None:
    sample = Sample()
    for _ in range(2):
        sample.add(prompt=[1, 4], sampled=[10, 2], messages=(user("go"),))
    sample.add(prompt=[1, 4], sampled=[10, 3, 2], messages=(user("go"),))
    sample.add(prompt=[1, 4, 10, 3, 2, 7], sampled=[11, 2], messages=(user("went"),))
    first, again, third, late = as_tree(sample).traces
    assert [again.response_ids.tolist(), third.response_ids.tolist()] == [[10, 2], [10, 3, 2]]
    assert again.shared_prefix == third.shared_prefix == SharedPrefix(first.trace_id, 2)
    assert (late.shared_prefix, late.prompt_ids.tolist()) == (SharedPrefix(third.trace_id, 5), [7])


def test_the_flat_tree_names_the_token_before_each_token() -> None:
    flat = token_tree(as_tree(main_and_side()))
    assert flat.ids.tolist() == [1, 4, 10, 2, 7, 11, 2, 9, 13, 2]
    assert flat.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5, 0, 7, 8]
    assert flat.depths.tolist() == [0, 1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert flat.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert flat.logprobs.tolist() == [0.0, 0.0, -0.25, -0.75, 0.0, -2.25, -2.75, 0.0, -1.25, -1.75]
    assert flat.versions.tolist() == [-1, -1, 0, 0, -1, 0, 0, -1, 0, 0]
    assert flat.trace_starts == {"session-1.t0": 0, "session-1.t1": 7}


def test_a_flat_tree_of_nothing_is_empty() -> None:
    empty, flat = token_tree(as_tree(Sample())), token_tree(as_tree(main_and_side()))
    assert (len(empty.ids), empty.trace_starts) == (0, {})
    for name in ("ids", "parents", "depths", "loss_mask", "logprobs", "versions"):
        assert getattr(empty, name).dtype == getattr(flat, name).dtype
    assert (flat.ids.dtype, flat.loss_mask.dtype, flat.logprobs.dtype) == (np.int32, np.int8, np.float32)


def test_a_trace_whose_prefix_is_not_there_is_refused() -> None:
    trajectory = as_tree(session_sample())
    torn = msgspec.structs.replace(trajectory, traces=trajectory.traces[1:])
    with pytest.raises(InvalidRequest, match="keep the rows of a session together"):
        list(with_whole_prompts(torn.traces))
    with pytest.raises(InvalidRequest, match="not before it"):
        token_tree(torn)


@pytest.mark.parametrize(
    "forged", [None, SharedPrefix("session-1.t0", 13), SharedPrefix("session-1.t1", 4), SharedPrefix("elsewhere", 14)]
)
def test_the_audit_sees_a_prefix_that_is_not_the_prompts(forged: SharedPrefix | None) -> None:
    sample = session_sample()
    built_tree = as_tree(sample)
    traces = list(built_tree.traces)
    assert audit(built_tree, sample.tree).ok
    traces[2] = msgspec.structs.replace(traces[2], shared_prefix=forged)
    report = audit(msgspec.structs.replace(built_tree, traces=tuple(traces)), sample.tree)
    assert {(violation.rule, violation.completion_id) for violation in report.violations} >= {("context", "c0004")}


def test_an_images_placeholders_are_masked_context_wherever_they_stand() -> None:
    sample = Sample()
    image = [30] * 576
    sample.add(prompt=[1, *image, 4], sampled=[10, 2], messages=(user("look"),))
    sample.add(prompt=[1, *image, 4, 10, 2, *image, 7], sampled=[11, 2], messages=(user("look"),), parent_id="c0000")
    (trace,) = built(sample).traces
    assert trace.prompt_ids.tolist() == [1, *image, 4]
    assert trace.response_ids.tolist() == [10, 2, *image, 7, 11, 2]
    assert trace.loss_mask.sum() == 4
    assert not trace.loss_mask[2:579].any()


def with_image() -> Sample:
    """A call in text, one that shows an image, and one after it."""
    sample = Sample()
    first = sample.add(prompt=[1, 4], sampled=[10, 2], messages=(user("go"),))
    talk = (user("go"), first.response, user("look"))
    seen = sample.add(
        prompt=[1, 4, 10, 2, 30, 7], sampled=[11, 2], messages=talk, parent_id="c0000", untrainable="images"
    )
    talk = (*talk, seen.response, user("and"))
    sample.add(
        prompt=[*sample.context("c0001"), 8], sampled=[12, 2], messages=talk, parent_id="c0001", untrainable="images"
    )
    return sample


def test_what_stands_before_an_image_is_trained_on_in_a_row_of_its_own() -> None:
    before, after = built(with_image()).traces
    assert (before.response_ids.tolist(), before.loss_mask.tolist()) == ([10, 2], [1, 1])
    assert after.prompt_ids.tolist() == [1, 4, 10, 2, 30, 7]
    assert after.response_ids.tolist() == [11, 2, 8, 12, 2]
    assert (after.untrainable, after.loss_mask.any()) == ("images", False)


def test_no_turn_of_a_row_with_an_image_is_trained_on() -> None:
    sample = with_image()
    shown, last = sample.tree["c0001"], sample.tree["c0002"]
    claims = msgspec.structs.replace(last.certificate, untrainable=None)
    tree = CompletionTree([sample.tree["c0000"], shown, msgspec.structs.replace(last, certificate=claims)])
    _, after = PrefixMergingBuilder().build(tree, session_id="session-1", task_id="task-1").traces
    assert len(after.spans) == 2
    assert [certificate.untrainable for certificate in after.certificates] == ["images", "images"]
    assert not after.loss_mask.any()


def test_texts_and_roles_of_calls_stand_at_their_tokens() -> None:
    sample = main_and_side()
    first = msgspec.structs.replace(sample.tree["c0000"], sampled_texts=("a", "b"), metadata={"agent_role": "solver"})
    main, side = (
        PrefixMergingBuilder()
        .build(
            CompletionTree([first, sample.tree["c0001"], sample.tree["c0002"]]),
            session_id="session-1",
            task_id="task-1",
        )
        .traces
    )
    assert main.response_texts == ("a", "b", None, None, None)
    assert side.response_texts == ()
    assert [span.agent_role for span in main.spans] == ["solver", None]


@pytest.mark.parametrize(("ended_with", "rendered_with", "kept"), [(2, 3, [7]), (3, 2, [7]), (5, 3, [3, 7])])
def test_splicing_knows_every_end_of_turn_id(ended_with: int, rendered_with: int, kept: list[int]) -> None:
    """A model that may end its turn with 2 or 3; what is rendered need not be what was sampled. 5 ends no turn."""
    sample = Sample()
    sample.add(prompt=[1], sampled=[10, ended_with], messages=(user("go"),), finish_reason="length")
    sample.add(prompt=[1, 99, rendered_with, 7], sampled=[12, 2], messages=(user("go"),), parent_id="c0000")
    (trace,) = built(sample, on_divergence="splice", end_of_turn_ids=(2, 3)).traces
    assert trace.response_ids.tolist() == [10, ended_with, *kept, 12, 2]


def test_an_empty_reply_is_a_turn_that_trains_nothing_and_is_continued() -> None:
    sample = Sample()
    sample.add(prompt=[1, 4], sampled=[], messages=(user("go"),), finish_reason="length")
    sample.add(prompt=[1, 4, 2, 7], sampled=[12, 2], messages=(user("go"), user("on")), parent_id="c0000")
    (trace,) = built(sample).traces
    assert [(span.start, span.end) for span in trace.spans] == [(0, 0), (2, 4)]
    assert trace.loss_mask.tolist() == [0, 0, 1, 1]
    assert trace.certificates[0].untrainable == "no token was sampled"


def test_no_completion_gives_an_empty_trajectory() -> None:
    assert built(Sample()).traces == ()


class _MainOnly(PrefixMergingBuilder):
    drops_turns: ClassVar[str] = "side calls are left out"

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        whole = super().build(tree, session_id=session_id, task_id=task_id)
        return msgspec.structs.replace(whole, traces=tuple(trace for trace in whole.traces if trace.role == "main"))


def test_a_builder_that_drops_turns_says_so_in_its_trajectories() -> None:
    sample = session_sample()
    dropping = chains.built(_MainOnly(), sample.tree, session_id="session-1", task_id="task-1")
    assert (dropping.drops_turns, dropping.session_id, dropping.task_id) == (
        "side calls are left out",
        "session-1",
        "task-1",
    )
    assert audit(dropping, sample.tree).dropped.turns == 1
    whole = chains.built(PrefixMergingBuilder(), sample.tree, session_id="session-1", task_id="task-1")
    assert whole.drops_turns is None
    assert encode_msgpack(whole) == encode_msgpack(built(sample))


def test_builders_come_by_name_with_their_own_settings() -> None:
    assert isinstance(make_builder("per_request", {}), PerRequestBuilder)
    merging = make_builder("prefix_merging", {"on_divergence": "splice"})
    assert isinstance(merging, PrefixMergingBuilder)
    assert merging.config.on_divergence == "splice"


def test_a_reward_goes_to_every_trace_unless_a_trace_has_its_own() -> None:
    trajectory = built(session_sample())
    own = trajectory.traces[1].trace_id
    rewarded = apply_reward(trajectory, Reward(reward=0.5, trace_rewards={own: 1.0}))
    assert rewarded.reward == 0.5
    assert [trace.reward for trace in rewarded.traces] == [0.5, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("reward", [Reward(reward=float("nan")), Reward(reward=1.0, trace_rewards={"elsewhere": 1.0})])
def test_a_reward_that_fits_no_trace_or_is_no_number_is_refused(reward: Reward) -> None:
    with pytest.raises(EvaluatorError):
        apply_reward(built(session_sample()), reward)
