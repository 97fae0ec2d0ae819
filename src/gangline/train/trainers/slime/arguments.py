"""The trainer's options: options that this adapter reads, and options with which training would silently be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.train.trainers.slime.rewards import POST_PROCESS, compares_rewards, require_known_estimator

_REWARDS = "rewards come from the tasks' evaluators"
IGNORED_BY_ROLLOUTS: Mapping[str, str] = {
    "custom_generate_function_path": "the tasks' harnesses generate",
    "rm_type": _REWARDS,
    "custom_rm_path": _REWARDS,
    "group_rm": _REWARDS,
    "reward_key": "a reward is one number",
    "dynamic_sampling_filter_path": "give the rollout `admit`, such as collector.informative",
    "rollout_sample_filter_path": "give the rollout `admit`, or `validity`",
    "rollout_sample_hook_path": "samples are made of whole sessions",
    "rollout_all_samples_process_path": "groups that are not trained on are not kept",
    "mask_offpolicy_in_partial_rollout": "correct older tokens with --use-tis, or leave old groups out with `admit`",
}
"""Options supported by the trainers' own rollout function but not here: attribute -> reason."""


def refuse_options(args: Any, refused: Mapping[str, str]) -> None:
    """refused: attribute -> reason. Raises: InvalidRequest if one of them is set."""
    for name, reason in refused.items():
        if value := getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise InvalidRequest(f"{flag} {value} would be ignored: {reason}. Leave it out.", param=name)


def require_fitting(args: Any) -> None:
    """Check for options with which sessions would be dropped, or incomparable rewards compared.

    Raises: InvalidRequest.
    """
    if getattr(args, "custom_reward_post_process_path", None) is None:
        require_known_estimator(args.advantage_estimator)
    if args.n_samples_per_prompt == 1 and compares_rewards(args):
        raise InvalidRequest(
            f"--advantage-estimator {args.advantage_estimator} compares the sessions of a prompt, and "
            "--n-samples-per-prompt is 1: every advantage would be 0. Sample at least 2."
        )
    num_sessions = args.rollout_batch_size * args.n_samples_per_prompt
    if cut := num_sessions % args.global_batch_size:
        raise InvalidRequest(
            f"the trainer takes whole steps of --global-batch-size {args.global_batch_size} sessions and would drop "
            f"{cut} of the {num_sessions} of each rollout (--rollout-batch-size times --n-samples-per-prompt): choose "
            "a divisor of it."
        )
    _require_whole_distribution(args)
    if getattr(args, "use_opd", False) and getattr(args, "opd_type", None) == "sglang":
        raise InvalidRequest(
            "--opd-type sglang wants the teacher's log-probs on each sample, which sessions do not have: use "
            "--opd-type megatron."
        )


def _require_whole_distribution(args: Any) -> None:
    """Raises: InvalidRequest."""
    if getattr(args, "rollout_top_k", -1) not in (-1, None):
        raise InvalidRequest(
            f"--rollout-top-k {args.rollout_top_k} would be ignored: nodes sample by the tasks' capture.sampling and "
            "their own policy. Leave it out."
        )


def require_compared_by_session(args: Any, samples: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Raises: InvalidRequest if a session has several samples and slime would compare samples."""
    if not compares_rewards(args) or getattr(args, "custom_reward_post_process_path", None) is not None:
        return
    if several := [session[0] for group in samples for session in group if len(session) > 1]:
        raise InvalidRequest(
            f"session {several[0].session_id} has several samples, and slime would compare the whole batch as one "
            f"group. Give it --custom-reward-post-process-path {POST_PROCESS}."
        )


def carries_over(args: Any) -> bool:
    """Whether unfinished groups continue in the next call under newer weights: `--partial-rollout`."""
    return bool(getattr(args, "partial_rollout", False))


def require_correction(args: Any) -> None:
    """Check that tokens of older weights, as in groups carried over, are corrected for.

    The trainer recomputes its old log-probs with its newest weights: without a correction, the ratio would compare
    those weights with themselves. Raises: InvalidRequest.
    """
    if getattr(args, "loss_type", "policy_loss") != "policy_loss":
        return
    if not getattr(args, "use_tis", False) and not getattr(args, "use_rollout_logprobs", False):
        raise InvalidRequest(
            "groups that are carried over to the next rollout have tokens of older weights, and nothing corrects for "
            "that: add --use-tis or --use-rollout-logprobs, or carry nothing over (no --partial-rollout)."
        )


def replays_experts(args: Any) -> bool:
    """Whether tokens are routed as during sampling: `--use-rollout-routing-replay`."""
    return bool(getattr(args, "use_rollout_routing_replay", False))


def replays_masks(args: Any) -> bool:
    """Whether slime computes log-probs relative to the ids that tokens were drawn from: `--rollout-top-p` below 1.

    Nodes sample by the tasks' `capture.sampling`, and record the ids under `capture.sampling_masks`.
    """
    return getattr(args, "rollout_top_p", 1.0) != 1.0


def num_groups_in_flight(args: Any) -> int:
    """`--over-sampling-batch-size`, or `--rollout-batch-size` if unset."""
    return getattr(args, "over_sampling_batch_size", None) or args.rollout_batch_size
