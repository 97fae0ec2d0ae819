"""The images of a trace in the forms that trainers accept: processed pixels, or references to files.

Trainers that accept neither refuse the trace (`gangline.train.trainers.contract.rows_of`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gangline.domain.image_files import image_files, placed_images
from gangline.domain.images import images_in
from gangline.domain.trajectory import Trace
from gangline.models.language.vision import ImageReader


class ImageRef(NamedTuple):
    url: str
    """`data:` URL of the file."""
    offset: int
    """Index of its first placeholder in the concatenated prompt and response."""
    length: int


def image_refs(trace: Trace) -> list[ImageRef]:
    """In order. Raises: PixelsMissing."""
    image_files(trace)
    images = images_in((*trace.prompt_messages, *trace.response_messages))
    return [ImageRef(one.url, at.start, at.length) for one, at in zip(images, placed_images(trace), strict=True)]


def token_types(trace: Trace) -> list[int]:
    """1 for an image placeholder, 0 for any other id, over prompt and response."""
    types = np.zeros(len(trace.prompt_ids) + len(trace.response_ids), np.int8)
    for image in placed_images(trace):
        types[image.start : image.start + image.length] = 1
    return types.tolist()


def processed(trace: Trace, reader: ImageReader) -> dict[str, Any]:
    """The processor's output as tensors: `pixel_values`, `image_grid_thw`. reader: the trained model's.

    Raises: PixelsMissing.
    """
    import torch  # noqa: PLC0415 - it needs an extra

    return {name: torch.as_tensor(np.asarray(value)) for name, value in reader.pixels(image_files(trace)).items()}
