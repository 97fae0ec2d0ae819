"""The files of a row's images, taken from its messages and checked against its certificates.

    reader = ImageReader.load(MODEL_FOLDER)
    inputs = reader.pixels(image_files(row))  # pixel_values, image_grid_thw

A row's images are the images in its last turn's prompt: every earlier turn was conditioned on the first of them, in the
same places.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from gangline.domain.completion import Certificate
from gangline.domain.conversation import Image, Message
from gangline.domain.images import PlacedImage, images_in, is_inline
from gangline.domain.trajectory import Trace

MAX_FILE_BYTES = 32 << 20


class HoldsImages(Protocol):
    """A trace, or a row."""

    @property
    def trace_id(self) -> str: ...
    @property
    def certificates(self) -> tuple[Certificate, ...]: ...
    @property
    def prompt_messages(self) -> tuple[Message, ...]: ...
    @property
    def response_messages(self) -> tuple[Message, ...]: ...


class Refused(ValueError):
    """An image cannot be certified; the message has the reason."""


def file_of(image: Image) -> bytes:
    """Returns the bytes of an inline image. Raises: Refused."""
    if not is_inline(image):
        raise Refused("an image is at an address: the engine fetched it, and its bytes are not known here")
    head, _, data = image.url.partition(",")
    if not head.lower().endswith(";base64"):
        raise Refused("an image's data: URL is not base64")
    if len(data) > MAX_FILE_BYTES * 4 // 3 + 4:
        raise Refused(f"an image is larger than {MAX_FILE_BYTES} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(f"an image's base64 cannot be read: {error}") from error


class PixelsMissing(ValueError):
    """A row has placeholder ids of images that it does not contain; the message names them."""


def placed_images(row: HoldsImages) -> tuple[PlacedImage, ...]:
    """Returns every image of the row; `start` counts from the beginning of its whole prompt."""
    evidence = [certificate.images for certificate in row.certificates if certificate.images is not None]
    return evidence[-1].placed if evidence else ()


def image_files(row: HoldsImages) -> list[bytes]:
    """Returns the file of each image, in order, as it was sent to the engine.

    Raises: PixelsMissing when the files in the row's messages differ from the ones its certificates name.
    """
    placed = placed_images(row)
    messages = itertools.chain(row.prompt_messages, row.response_messages)
    try:
        files = [file_of(image) for image in images_in(messages)]
    except Refused as why:
        raise PixelsMissing(f"{row.trace_id}: {why}") from why
    if len(files) != len(placed):
        raise PixelsMissing(f"{row.trace_id}: {len(placed)} images are certified, its messages have {len(files)}")
    for number, (file, image) in enumerate(zip(files, placed, strict=True)):
        if hashlib.sha256(file).hexdigest() != image.digest:
            raise PixelsMissing(f"{row.trace_id}: image {number} is another file than the certified one")
    return files


def image_problems(trace: Trace) -> Iterator[str]:
    """Yields disagreements between a trained trace and its images. The trace must have its whole prompt."""
    placed = placed_images(trace)
    if not placed or not trace.loss_mask.any():
        return
    for number, certificate in enumerate(trace.certificates):
        mine = () if certificate.images is None else certificate.images.placed
        if mine != placed[: len(mine)]:
            yield f"turn {number} was conditioned on other images than the row has"
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    evidence = trace.certificates[-1].images
    placeholder_id = -1 if evidence is None else evidence.placeholder_id
    for number, image in enumerate(placed):
        stands = ids[image.start : image.start + image.length]
        if len(stands) < image.length or (stands != placeholder_id).any():
            yield f"image {number} does not stand where its certificate says"
    try:
        image_files(trace)
    except PixelsMissing as why:
        yield str(why).partition(": ")[2]
