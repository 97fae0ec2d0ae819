"""verl: converts groups to its `DataProto`, as its agent loops pass them to its trainer.

A row is one trace: the prompt padded on the left, the response (tool output included) on the right, `response_mask` 1
for trained tokens. The reward (the trace's own if the evaluator rewards traces separately) is the score of the last
token. verl groups rows by `uid`, here the task's id, and counts every row separately: if sessions have several traces,
pass an `algorithm`, and use the advantages in the batch instead of `compute_advantage`'s.

Source: verl 0.9.1, `protocol.DataProto`, `experimental/agent_loop/agent_loop.py`, `trainer/ppo/ray_trainer.py`.

Routed experts are in verl's tensor format. Source: verl 0.9.1, `experimental/agent_loop/agent_loop.py`.

Images are in the format of verl's batches: each row's processed pixels, and positions of text, time, height and width.

Source: verl 0.9.1, `experimental/agent_loop/agent_loop.py` (`_compute_multi_modal_inputs`, `_compute_position_ids`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gangline.domain.errors import InvalidRequest
from gangline.domain.experts import ExpertArray
from gangline.domain.image_files import placed_images
from gangline.models.language.vision import ImageReader
from gangline.settings.installation import extra_command
from gangline.train.collecting.groups import Group
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.samples import make_samples, over_batch
from gangline.train.trainers.contract import TrainerRow, rows_of
from gangline.train.trainers.pixels import processed

__all__ = ["CONTRACT", "to_data_proto"]

try:
    from verl.protocol import DataProto
except ImportError as error:
    raise ImportError(f"this adapter makes verl's own batches and needs verl 0.9: {extra_command('verl')}") from error

__all__ = ["CONTRACT", "to_data_proto"]

CONTRACT = 3
"""Version of the contract with trainers that this adapter fulfils."""


def multi_modal_inputs(rows: Sequence[TrainerRow], reader: ImageReader) -> NDArray[Any]:
    """[B] dictionaries: `pixel_values`, `image_grid_thw`, `images_seqlens`; empty for rows without images."""
    found = np.empty(len(rows), dtype=object)
    for number, row in enumerate(rows):
        found[number] = _inputs(row, reader) if placed_images(row.trace) else {}
    return found


def _inputs(row: TrainerRow, reader: ImageReader) -> dict[str, Any]:
    """Raises: PixelsMissing."""
    inputs = processed(row.trace, reader)
    grid = inputs["image_grid_thw"]
    return inputs | {"images_seqlens": torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])}


def vision_positions(
    input_ids: Tensor, attention_mask: Tensor, inputs: NDArray[Any], processor: Any, placeholder_id: int
) -> Tensor:
    """[B, 4, P + T], in verl's format for models with multi-dimensional positions; the first dimension is for text.

    processor: verl's, with the model's `get_rope_index` bound to it.
    """
    rows = zip(input_ids[:, None], attention_mask[:, None], inputs, strict=True)
    return torch.cat([_positions(ids, mask, one, processor, placeholder_id) for ids, mask, one in rows])


def _positions(ids: Tensor, mask: Tensor, inputs: dict[str, Any], processor: Any, placeholder_id: int) -> Tensor:
    given: dict[str, Any] = {"image_grid_thw": inputs.get("image_grid_thw"), "video_grid_thw": None}
    if "mm_token_type_ids" in inspect.signature(processor.get_rope_index).parameters:  # since transformers 5.3
        given["mm_token_type_ids"] = (ids == placeholder_id).to(ids.dtype)
    seen, _ = processor.get_rope_index(input_ids=ids, attention_mask=mask, **given)
    of_text = torch.ones_like(ids)
    of_text[0, mask[0].bool()] = torch.arange(int(mask.sum()))
    return torch.cat([of_text[:, None], seen.transpose(0, 1)], dim=1)


def expert_tensor(experts: ExpertArray) -> torch.Tensor:
    """int16, as in verl. Raises: InvalidRequest for a number above the int16 range."""
    if experts.size and int(experts.max()) > np.iinfo(np.int16).max:
        raise InvalidRequest(f"verl holds experts as int16, and there is expert {int(experts.max())}.")
    return torch.from_numpy(experts.astype(np.int16))


def to_data_proto(
    groups: Sequence[Group],
    num_samples: int,
    *,
    pad_id: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
    algorithm: Algorithm | None = None,
    temperature: float = 1.0,
    replays_experts: bool = False,
    reader: ImageReader | None = None,
    processor: Any = None,
) -> DataProto:
    """One row per trace, in the order of groups, sessions and traces.

    num_samples: sessions per group. prompt_length, response_length: widths P and T; None: as wide as the longest row.
    algorithm: adds `advantages` and `returns` [B, T], with equal weight for each session.

    Tensors: `prompts` [B, P], `responses`, `response_mask`, `rollout_log_probs`, `rm_scores`, `token_level_scores`,
    `rollout_versions` (-1 if masked) [B, T], `input_ids`, `attention_mask`, `position_ids` [B, P + T]. Non-tensors,
    [B]: `uid`, `session_id`, `trace_id`, `session_reward`, `__num_turns__`, and the oldest and newest policy version as
    `min_global_steps`, `max_global_steps`.

    replays_experts: add `routed_experts` [B, P + T, layers, chosen], int16, for verl's router replay; 0 for padding,
    and for the last token, which was never an input.

    reader, processor: of the trained vision model; `processor` is verl's own (`verl.utils.hf_processor`), which
    computes the model's positions. Rows then have `multi_modal_inputs`, and `position_ids` are [B, 4, P + T]. Without
    them rows with images are refused.

    Raises: InvalidGroup if a group is incomplete or of another temperature, InvalidRequest if a row exceeds the widths:
    nothing is cut.
    """
    carried = {"takes_images": _sees(reader, processor), "replays_experts": replays_experts}
    rows = [row for group in groups for row in rows_of(group, num_samples, temperature=temperature, **carried)]
    if not rows:
        raise InvalidRequest("a batch needs at least one group.")
    prompt_width = _width("prompt", [row.prompt_ids for row in rows], prompt_length)
    width = _width("response", [row.response_ids for row in rows], response_length)
    tensors = _tensors(rows, prompt_width, width, pad_id)
    if replays_experts:
        tensors["routed_experts"] = _experts(rows, prompt_width, width)
    labels = _labels(rows)
    if reader is not None:
        inputs = labels["multi_modal_inputs"] = multi_modal_inputs(rows, reader)
        ids, mask = tensors["input_ids"], tensors["attention_mask"]
        tensors["position_ids"] = vision_positions(ids, mask, inputs, processor, reader.placeholder_id)
    if algorithm is not None:
        algorithm.require_group_advantages("to_data_proto")
        sees = reader is not None
        found = [sample for group in groups for sample in make_samples(group, algorithm, takes_images=sees)]
        samples = over_batch(found, algorithm.advantage)
        advantages = [sample.advantages * row.loss_mask for sample, row in zip(samples, rows, strict=True)]
        tensors["advantages"] = _padded(advantages, width, 0.0, torch.float32)
        tensors["returns"] = tensors["advantages"].clone()
    return DataProto.from_dict(tensors=tensors, non_tensors=labels, meta_info={"temperature": temperature})


def _sees(reader: ImageReader | None, processor: Any) -> bool:
    """Raises: InvalidRequest if only one of the two is given."""
    if (reader is None) != (processor is None):
        raise InvalidRequest("rows with images need both a reader and verl's processor of the model.")
    if processor is not None and not hasattr(processor, "get_rope_index"):
        raise InvalidRequest(
            f"{type(processor).__name__} has no get_rope_index: give the processor that verl.utils.hf_processor makes "
            "of a model whose positions have several dimensions."
        )
    return reader is not None


def _width(what: str, ids: Sequence[NDArray[Any]], given: int | None) -> int:
    longest = max(map(len, ids))
    if given is not None and longest > given:
        raise InvalidRequest(
            f"a {what} has {longest} ids, and {what}_length is {given}: raise it, or leave such sessions out as they "
            "are collected (`DegenerateSettings.max_tokens`)."
        )
    return longest if given is None else given


def _tensors(rows: Sequence[TrainerRow], prompt_width: int, width: int, pad_id: int) -> dict[str, Tensor]:
    prompts = _padded([row.prompt_ids for row in rows], prompt_width, pad_id, torch.int64, side="left")
    responses = _padded([row.response_ids for row in rows], width, pad_id, torch.int64)
    attention_mask = torch.cat(
        [
            _padded([np.ones(len(row.prompt_ids)) for row in rows], prompt_width, 0, torch.int64, side="left"),
            _padded([np.ones(len(row.response_ids)) for row in rows], width, 0, torch.int64),
        ],
        dim=1,
    )
    scores = _padded([_at_the_end(row) for row in rows], width, 0.0, torch.float32)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "response_mask": _padded([row.loss_mask for row in rows], width, 0, torch.int64),
        "rollout_log_probs": _padded([row.logprobs for row in rows], width, 0.0, torch.float32),
        "rollout_versions": _padded([row.versions for row in rows], width, -1, torch.int32),
        "rm_scores": scores,
        "token_level_scores": scores.clone(),
    }


def _experts(rows: Sequence[TrainerRow], prompt_width: int, width: int) -> Tensor:
    """[B, P + T, layers, chosen]. Raises: InvalidRequest if rows are from models of different shapes."""
    found = [row.routed_experts for row in rows if row.routed_experts is not None]
    if len({one.shape[1:] for one in found}) != 1:
        raise InvalidRequest("rows of one batch have experts of different numbers of layers or choices.")
    table = torch.zeros((len(rows), prompt_width + width, *found[0].shape[1:]), dtype=torch.int16)
    for line, row, experts in zip(table, rows, found, strict=True):
        start = prompt_width - len(row.prompt_ids)
        line[start : start + len(experts)] = expert_tensor(experts)
    return table


def _at_the_end(row: TrainerRow) -> NDArray[np.float32]:
    scores = np.zeros(len(row.response_ids), np.float32)
    scores[-1] = row.reward
    return scores


def _padded(
    rows: Sequence[NDArray[Any]],
    width: int,
    fill: float,
    dtype: torch.dtype,
    *,
    side: Literal["left", "right"] = "right",
) -> Tensor:
    """[len(rows), width]"""
    table = torch.full((len(rows), width), fill, dtype=dtype)
    for line, row in zip(table, rows, strict=True):
        start = width - len(row) if side == "left" else 0
        line[start : start + len(row)] = torch.from_numpy(row.astype(row.dtype))  # a copy: results are read-only
    return table


def _labels(rows: Sequence[TrainerRow]) -> dict[str, NDArray[Any]]:
    def of_each(value: Callable[[TrainerRow], Any]) -> NDArray[Any]:
        return np.array([value(row) for row in rows], dtype=object)

    return {
        "uid": of_each(lambda row: row.task_id),
        "session_id": of_each(lambda row: row.session_id),
        "trace_id": of_each(lambda row: row.trace_id),
        "session_reward": np.array([row.session_reward for row in rows], np.float32),
        "__num_turns__": np.array([len(row.trace.spans) for row in rows], np.int32),
        "min_global_steps": of_each(lambda row: int(row.versions[row.loss_mask != 0].min())),
        "max_global_steps": of_each(lambda row: int(row.versions[row.loss_mask != 0].max())),
    }
