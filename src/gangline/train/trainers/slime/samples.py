"""Converts groups to the `Sample` objects of slime and miles.

A sample is one trace, and the samples of one session share its `rollout_id`, by which the trainer counts steps and
averages losses.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gangline.domain.conversation import Message, Text
from gangline.domain.errors import InvalidGroup, InvalidRequest
from gangline.domain.image_files import placed_images
from gangline.domain.lifecycle import STOPPED_BY_LIMIT
from gangline.domain.masks import SamplingMask
from gangline.grading.transcript import chat_messages
from gangline.models.language.vision import ImageReader
from gangline.train.collecting.admission import version_spans
from gangline.train.collecting.groups import Group
from gangline.train.trainers.contract import TrainerRow, rows_of
from gangline.train.trainers.pixels import processed

_CUT_SHORT = ("agent_timeout", *STOPPED_BY_LIMIT)


def to_samples(
    groups: Sequence[Group],
    num_samples: int,
    *,
    sample_type: Any = None,
    first_group: int = 0,
    temperature: float = 1.0,
    reader: ImageReader | None = None,
    replays_experts: bool = False,
    replays_masks: bool = False,
) -> list[list[list[Any]]]:
    """For each group the samples of each session, nested like slime's compact rollouts: [group][session][trace].

    Samples of a session share `rollout_id` and `index`, which are unique among the sessions of these groups. `reward`
    is the trace's own if the evaluator rewards traces separately; `metadata["session_reward"]` is the session's.

    num_samples: sessions per group. sample_type: the trainer's `Sample`; slime's is imported if None. reader: image
    processor of the trained model; without it rows with images are refused. replays_experts: fill
    `rollout_routed_experts`, int32 [len(tokens) - 1, layers, chosen], for `--use-rollout-routing-replay`.
    replays_masks: fill `rollout_top_p_token_ids` and `rollout_top_p_token_offsets`, of the response, for
    `--rollout-top-p` below 1. first_group: `group_index` of the first. temperature: `rollout_temperature`.
    `weight_versions` has one entry per turn, or more if weights changed within it; `metadata` contains the trace's id
    and the range of each version.

    Raises: InvalidGroup if a group is incomplete or of another temperature, InvalidRequest if slime's type lacks a
    field.
    """
    make = _maker(sample_type_of("slime") if sample_type is None else sample_type, reader)
    takes_images = reader is not None
    options = {"takes_images": takes_images, "replays_experts": replays_experts, "replays_masks": replays_masks}
    rows = [rows_of(group, num_samples, temperature=temperature, **options) for group in groups]
    return [
        [
            [make(row, number, number * num_samples + place) for row in session]
            for place, session in enumerate(_by_session(group))
        ]
        for number, group in enumerate(rows, first_group)
    ]


def sample_type_of(trainer: str) -> Any:
    """trainer: name of its package, `slime` or `miles`. Raises: ImportError."""
    try:
        return importlib.import_module(f"{trainer}.utils.types").Sample
    except ImportError as error:
        raise ImportError(
            f"{trainer} is not here: run this where {trainer} trains (a package of that name on PyPI is another "
            "package), or give its Sample as sample_type."
        ) from error


def _by_session(rows: Sequence[TrainerRow]) -> list[list[TrainerRow]]:
    """The rows of each session, in the order of the group."""
    sessions: dict[str, list[TrainerRow]] = {}
    for row in rows:
        sessions.setdefault(row.session_id, []).append(row)
    return list(sessions.values())


def _maker(sample_type: Any, reader: ImageReader | None) -> Callable[[TrainerRow, int, int], Any]:
    known = {field.name for field in dataclasses.fields(sample_type)}

    def make(row: TrainerRow, group_index: int, index: int) -> Any:
        numbers = {"group_index": group_index, "index": index, "rollout_id": index}
        fields = _fields(row, sample_type.Status) | numbers
        if reader is not None and placed_images(row.trace):
            fields["multimodal_train_inputs"] = processed(row.trace, reader)
        if row.routed_experts is not None:
            fields["rollout_routed_experts"] = row.routed_experts.astype(np.int32)
        if row.sampling_mask is not None:
            _require_cut_everywhere(row, row.sampling_mask)
            fields["rollout_top_p_token_ids"] = row.sampling_mask.ids.tolist()
            fields["rollout_top_p_token_offsets"] = row.sampling_mask.offsets.tolist()
        if missing := fields.keys() - known:
            raise InvalidRequest(
                f"this version of the trainer has no {', '.join(sorted(missing))} in its Sample: without it what was "
                "sampled cannot be handed over whole."
            )
        if "session_id" in known:  # newer versions route by it
            fields["session_id"] = row.session_id
        return sample_type(**fields)

    return make


def _fields(row: TrainerRow, status: Any) -> dict[str, Any]:
    spans = version_spans(row.versions)
    return {
        "prompt": chat_messages(row.trace.prompt_messages),
        "tokens": [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
        "response": _text(row.trace.response_messages),
        "response_length": len(row.response_ids),
        "reward": row.reward,
        "loss_mask": row.loss_mask.tolist(),
        "rollout_log_probs": row.logprobs.tolist(),
        "weight_versions": [str(span.version) for span in spans],
        "status": status.TRUNCATED if _is_cut_short(row) else status.COMPLETED,
        "metadata": {
            "task_id": row.task_id,
            "session_id": row.session_id,
            "trace_id": row.trace_id,
            "session_reward": row.session_reward,
            "version_spans": [(span.version, span.start, span.end) for span in spans],
        },
    }


def _require_cut_everywhere(row: TrainerRow, mask: SamplingMask) -> None:
    """slime treats a token without kept ids as certain: its log-prob is 0, and nothing is learned from it.

    Source: slime at 624b824, `utils/ppo_utils.py`. Raises: InvalidGroup.
    """
    if ((row.loss_mask != 0) & (mask.counts == 0)).any():
        raise InvalidGroup(
            f"{row.trace_id} has tokens that were drawn from the whole vocabulary, and under --rollout-top-p "
            "slime takes them for certain. Sample all turns with capture.sampling.top_p.override and "
            "capture.sampling_masks."
        )


def _is_cut_short(row: TrainerRow) -> bool:
    return row.outcome in _CUT_SHORT or row.trace.finish_reason == "length"


def _text(messages: Sequence[Message]) -> str:
    """The model's own text. slime displays it, but trains on tokens."""
    replies = [message for message in messages if message.role == "assistant"]
    return "\n".join(part.text for message in replies for part in message.parts if isinstance(part, Text))
