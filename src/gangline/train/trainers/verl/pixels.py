"""Images as verl's batches have them: each row's processed pixels, and positions of text, time, height and width.

Source: verl 0.9.1, `experimental/agent_loop/agent_loop.py` (`_compute_multi_modal_inputs`, `_compute_position_ids`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gangline.domain.image_files import placed_images
from gangline.models.language.vision import ImageReader
from gangline.train.trainers.contract import TrainerRow
from gangline.train.trainers.pixels import processed

__all__ = ["multi_modal_inputs", "vision_positions"]


def multi_modal_inputs(rows: Sequence[TrainerRow], reader: ImageReader) -> NDArray[Any]:
    """[B] of dictionaries: `pixel_values`, `image_grid_thw`, `images_seqlens`; empty where a row has no image."""
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
    """[B, 4, P + T], as verl hands them to models whose positions have several dimensions; the first one is the text's.

    processor: verl's, to which it has bound the model's `get_rope_index`.
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
