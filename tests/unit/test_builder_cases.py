"""Builders on sessions written by hand: what a person would expect to see."""

from __future__ import annotations

import msgspec
import pytest

from gangline.domain.completion import CompletionTree
from gangline.domain.contracts import Reward
from gangline.domain.errors import BuilderError, EvaluatorError
from gangline.domain.tokens import logprobs
from gangline.plugins import make_builder
from gangline.trajectories.per_request import PerRequestBuilder, PerRequestConfig
from gangline.trajectories.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.trajectories.rewards import apply_reward
from strategies import Sample, session_sample, user


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


def test_a_false_claim_of_exactness_splits_or_raises_when_strict() -> None:
    sample = session_sample()
    claims = msgspec.structs.replace(sample.tree["c0004"].certificate, context="exact")
    lied = [msgspec.structs.replace(c, certificate=claims) if c.completion_id == "c0004" else c for c in sample.tree]
    tree = CompletionTree(lied)
    trajectory = PrefixMergingBuilder().build(tree, session_id="session-1", task_id="task-1")
    assert [len(trace.spans) for trace in trajectory.traces] == [3, 1, 1, 1]
    with pytest.raises(BuilderError, match="c0004: certified exact"):
        PrefixMergingBuilder(PrefixMergingConfig(strict=True)).build(tree, session_id="session-1", task_id="task-1")


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


def test_no_completion_gives_an_empty_trajectory() -> None:
    assert built(Sample()).traces == ()


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
