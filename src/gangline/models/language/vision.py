"""A vision model's image processor: computes an image's grid, its number of placeholder ids, and its pixels.

For processors that split an image into a grid of patches and write one placeholder id for each merged patch (Qwen2-VL
and later families). Others are refused when loaded. Requires the extra `vision`.

Files come from agents, which are untrusted: only four formats are opened, sizes are bounded before decoding, and images
that engines and processors interpret differently (transparency, rotation by EXIF, several frames) are refused.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from gangline.domain.conversation import Image
from gangline.domain.errors import InvalidRequest
from gangline.domain.image_files import Refused, file_of
from gangline.domain.images import ImageEvidence, PlacedImage
from gangline.domain.tokens import TokenIds
from gangline.settings.installation import extra_command

MAX_PIXELS = 64_000_000
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_ORIENTATION = 0x0112
_REMEMBERED = 256


class ImageReader:
    """Thread-safe."""

    def __init__(self, processor: Any, placeholder_id: int, identity: str) -> None:
        """processor: transformers' image processor of the model.
        placeholder_id: the id that stands for a patch.
        identity: see `ImageEvidence.processor`.
        """
        self._processor = processor
        self.placeholder_id = placeholder_id
        self.identity = identity
        self._known: OrderedDict[str, PlacedImage] = OrderedDict()
        self._lock = Lock()

    @classmethod
    def load(cls, folder: str | Path) -> ImageReader:
        """The processor in a model's folder, with `preprocessor_config.json` and `config.json`.

        Raises: InvalidRequest if there is no processor, or its family has no grid.
        """
        try:
            import PIL.Image as _  # noqa: F401, PLC0415 - likewise
            from transformers import AutoImageProcessor  # noqa: PLC0415 - it needs an extra
        except ImportError as error:
            raise InvalidRequest(
                f"reading images needs transformers and Pillow. Run: {extra_command('vision')}"
            ) from error
        folder = Path(folder)
        try:
            settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            loader: Any = AutoImageProcessor
            processor = loader.from_pretrained(str(folder), local_files_only=True, backend="pil")
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{folder} has no image processor of a vision model: {error}") from error
        placeholder_id: object = config.get("image_token_id")
        if not isinstance(placeholder_id, int) or not hasattr(processor, "merge_size"):
            raise InvalidRequest(
                f"{type(processor).__name__} in {folder} makes no grid of patches: images of this family are not "
                "certified. Leave `processor` out; its calls stay untrainable."
            )
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        return cls(processor, placeholder_id, f"{type(processor).__name__}:{digest}")

    def evidence(self, images: Sequence[Image], prompt_ids: TokenIds) -> ImageEvidence:
        """The position of each image in a prompt [T]; `refused` contains the reason if it is uncertain."""
        try:
            return ImageEvidence(
                placed=self.place(images, prompt_ids), placeholder_id=self.placeholder_id, processor=self.identity
            )
        except Refused as why:
            return ImageEvidence(processor=self.identity, refused=str(why))

    def place(self, images: Sequence[Image], prompt_ids: TokenIds) -> tuple[PlacedImage, ...]:
        """Raises: Refused if the placeholders in the prompt do not match the images."""
        read = [self._read(file_of(image)) for image in images]
        is_placeholder = np.concatenate([[False], prompt_ids == self.placeholder_id, [False]])
        edges = np.flatnonzero(is_placeholder[1:] != is_placeholder[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        if len(starts) != len(read):
            raise Refused(f"{len(read)} images were sent, and the prompt has placeholders of {len(starts)}")
        for number, (one, length) in enumerate(zip(read, lengths, strict=True)):
            if one.length != length:
                raise Refused(
                    f"image {number} has {int(length)} placeholder ids in the prompt, and {one.length} by the processor"
                )
        return tuple(_at(one, int(start)) for one, start in zip(read, starts, strict=True))

    def collapsed(self, prompt_ids: TokenIds, placed: Sequence[PlacedImage]) -> TokenIds:
        """The prompt with one placeholder for each image: the form that engines expand themselves."""
        keep = np.ones(len(prompt_ids), np.bool_)
        for image in placed:
            keep[image.start + 1 : image.start + image.length] = False
        return prompt_ids[keep]

    def pixels(self, files: Sequence[bytes]) -> dict[str, Any]:
        """The processor's output for images: `pixel_values` [patches, values per patch], `image_grid_thw` [images, 3].

        Raises: Refused.
        """
        with self._lock:
            return dict(self._processor(images=[_decoded(file) for file in files], return_tensors="np"))

    def _read(self, file: bytes) -> PlacedImage:
        """The image independent of its position, with `start` 0. Raises: Refused."""
        digest = hashlib.sha256(file).hexdigest()
        with self._lock:
            if (known := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return known
        decoded = _decoded(file)
        pixels = hashlib.sha256(f"{decoded.width}x{decoded.height}:".encode() + decoded.tobytes()).hexdigest()
        with self._lock:
            made = self._processor(images=[decoded], return_tensors="np")
        time, height, width = (int(one) for one in made["image_grid_thw"][0])
        length = time * height * width // self._processor.merge_size**2
        read = PlacedImage(start=0, length=length, digest=digest, pixel_digest=pixels, grid=(time, height, width))
        with self._lock:
            self._known[digest] = read
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return read


def _at(image: PlacedImage, start: int) -> PlacedImage:
    return PlacedImage(
        start=start, length=image.length, digest=image.digest, pixel_digest=image.pixel_digest, grid=image.grid
    )


def _decoded(file: bytes) -> Any:
    """RGB. Raises: Refused."""
    from PIL import Image as Pillow  # noqa: PLC0415 - it needs an extra

    try:
        image = Pillow.open(io.BytesIO(file), formats=_FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise Refused(f"an image has more than {MAX_PIXELS} pixels")
        if getattr(image, "n_frames", 1) > 1:
            raise Refused("an image has several frames")
        if image.getexif().get(_ORIENTATION, 1) != 1:
            raise Refused("an image is rotated by its EXIF data, which engines read differently")
        if image.has_transparency_data:
            raise Refused("an image is transparent, which engines flatten differently")
        return image.convert("RGB")
    except Refused:
        raise
    except Exception as error:  # Pillow's decoders raise any error for a broken file
        raise Refused(f"an image cannot be decoded: {error}") from error
