"""miles: a rollout class for its newer interface, based on slime's adapter.

    # my_rollout.py, for miles's --rollout-function-path my_rollout.Rollout
    class Rollout(MilesRollout):
        def groups(self) -> GroupRollouts:
            return GroupRollouts(server_url, task_of, folder)

miles is derived from slime: samples, engines, router and loops are the same. It creates one object of the class and
passes the engines' version to each call. It compares rewards by group and session itself, and refuses traces of one
session with different rewards.

Source: miles, github.com/radixark/miles at 31f1ca9 (2026-08-21): `miles/rollout/base_types.py`,
`miles/rollout/inference_rollout/compatibility.py`, `miles/ray/rollout/`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from gangline.domain.errors import InvalidRequest
from gangline.models.language.vision import ImageReader
from gangline.train.trainers.slime.arguments import refuse_options, replays_experts, replays_masks
from gangline.train.trainers.slime.rewards import POST_PROCESS, compares_rewards
from gangline.train.trainers.slime.rollout import CONTRACT, GroupRollouts
from gangline.train.trainers.slime.samples import sample_type_of, to_samples

__all__ = ["CONTRACT", "REFUSED", "GroupRollouts", "MilesRollout", "require_comparable", "to_samples"]

REFUSED = {
    "use_dynamic_global_batch_size": "steps are of whole sessions, of --global-batch-size each",
    "multi_lora": "sessions belong to no adapter",
    "use_rollout_indexer_replay": "nodes do not ask engines for the tokens that they attended to",
}


class MilesRollout(ABC):
    """Derive from it, and pass your class as --rollout-function-path."""

    sample_type: ClassVar[Any] = None
    """miles's `Sample`, imported if None."""
    output_type: ClassVar[Any] = None
    """miles's `RolloutFnTrainOutput`, imported if None."""
    reader: ClassVar[ImageReader | None] = None
    """Image processor of the trained model. Without it, rows with images are refused."""

    def __init__(self, given: Any) -> None:
        """given: miles's `RolloutFnConstructorInput`. Raises: ImportError without miles."""
        self._args = given.args
        self._data_source = given.data_source
        self._rollouts = self.groups()
        self._num_groups = 0
        if self.sample_type is None:
            type(self).sample_type = sample_type_of("miles")
        if self.output_type is None:
            type(self).output_type = importlib.import_module("miles.rollout.base_types").RolloutFnTrainOutput

    @abstractmethod
    def groups(self) -> GroupRollouts:
        """Returns where tasks are run. Called once."""

    def __call__(self, given: Any) -> Any:
        """`RolloutFnTrainOutput` of `rollout_batch_size` groups: samples as [group][session][trace].

        given: miles's `RolloutFnTrainInput`. Raises: as `GroupRollouts.collect`; WeightsNotLoaded if the engines have
        another version than miles expects.
        """
        if given.evaluation:
            raise InvalidRequest("this rollout class is for training: give miles another --eval-function-path.")
        refuse_options(self._args, REFUSED)
        if replays_masks(self._args):
            raise InvalidRequest(
                f"--rollout-top-p is {self._args.rollout_top_p:g}: the trainer's log-probs are over the whole "
                "vocabulary, and rows are drawn by the tasks' capture.sampling. Leave it at 1."
            )
        groups = self._rollouts.collect(self._args, self._data_source, given.weight_version)
        samples = to_samples(
            groups,
            self._args.n_samples_per_prompt,
            sample_type=self.sample_type,
            first_group=self._num_groups,
            temperature=self._args.rollout_temperature,
            reader=self.reader,
            replays_experts=replays_experts(self._args),
        )
        self._num_groups += len(groups)
        require_comparable(self._args, samples)
        return self.output_type(samples=samples)

    def stop(self) -> None:
        """Cancel groups in flight and end the thread; idempotent."""
        self._rollouts.stop()


def require_comparable(args: Any, samples: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Raises: InvalidRequest if miles would refuse the rewards, or split samples of one session."""
    sessions = [session for group in samples for session in group]
    is_compared = compares_rewards(args) and getattr(args, "custom_reward_post_process_path", None) is None
    if is_compared and any(len({sample.reward for sample in session}) > 1 for session in sessions):
        raise InvalidRequest(
            "traces of a session have their own rewards, and miles takes one a session. Give it "
            f"--custom-reward-post-process-path {POST_PROCESS}."
        )
    if getattr(args, "train_backend", "megatron") == "fsdp" and any(len(session) > 1 for session in sessions):
        raise InvalidRequest(
            "sessions have several samples, which miles's FSDP backend divides among its ranks one by one, so that "
            "ranks would differ in their number of steps: use the Megatron backend, or the builder prefix_merging."
        )
