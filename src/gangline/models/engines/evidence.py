"""Evidence beside the tokens as engines write it -> arrays: routed experts, sampling masks. Pure.

Experts: vLLM sends a NumPy file, which names its type and shape. SGLang sends the numbers alone, row after row: int32,
unless the reply says otherwise; the shape is the model's. Masks: both send a list of ids for each sampled token.

Source: vLLM 0.32.0 `entrypoints/openai/chat_completion/protocol.py` and `utils/serial_utils.py`; SGLang 0.5.23
`srt/managers/{detokenizer,tokenizer}_manager.py`, and main at a6463a1, `srt/state_capturer/routed_experts_wire.py` (the
type of experts).
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import simdjson
from numpy.typing import NDArray

from gangline.domain.conversation import SamplingParams
from gangline.domain.experts import ExpertArray
from gangline.domain.sampling_masks import SamplingMask
from gangline.models.engines.json_ids import LARGEST_ID, NO_IDS

__all__ = ["cuts", "experts_of_file", "experts_of_numbers", "mask_from_json", "narrowed", "sglang_mask"]

_HEAD_BYTES = 4 << 10
"""The head of a file of three dimensions has 128."""
_READ_HEAD = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_NUMBERS = ("int32", "uint16", "uint8")


def experts_of_file(data: bytes) -> ExpertArray:
    """The content of an `.npy` file. Raises: ValueError when it holds no experts of tokens."""
    head = io.BytesIO(data[:_HEAD_BYTES])
    try:
        read = _READ_HEAD[np.lib.format.read_magic(head)]
        shape, is_fortran, dtype = read(head)
    except (ValueError, EOFError, OSError, KeyError) as error:
        raise ValueError(f"it is no NumPy file: {error}") from error
    if len(shape) != 3 or is_fortran or dtype.kind not in "iu":
        raise ValueError(f"its shape is {shape} of {dtype}, and not (tokens, layers, experts) of integers")
    size, num_bytes = math.prod(shape), len(data) - head.tell()
    if num_bytes != size * dtype.itemsize:
        raise ValueError(f"it is no NumPy file: it has {num_bytes} bytes for {size} numbers of {dtype}")
    return narrowed(np.frombuffer(data, dtype, size, head.tell()).reshape(shape))  # not copied


def experts_of_numbers(data: bytes, number: str, num_layers: int, num_chosen: int) -> ExpertArray:
    """Raises: ValueError when it is no whole number of tokens."""
    if number not in _NUMBERS:
        raise ValueError(f"its type is {number}, and not one of {', '.join(_NUMBERS)}")
    dtype = np.dtype(number).newbyteorder("<")
    token_bytes = dtype.itemsize * num_layers * num_chosen
    if token_bytes == 0 or len(data) % token_bytes:
        raise ValueError(f"its {len(data)} bytes are no whole number of tokens of {token_bytes} bytes")
    return narrowed(np.frombuffer(data, dtype=dtype).reshape(-1, num_layers, num_chosen))


def narrowed(array: NDArray[Any]) -> ExpertArray:
    """The same numbers as uint8, or uint16 where one is larger. Raises: ValueError for any other number."""
    if array.dtype.kind not in "iu":
        raise ValueError(f"its type is {array.dtype}, and not an integer")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    least, most = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if least < 0 or most > np.iinfo(np.uint16).max:
        raise ValueError(f"it has expert {least if least < 0 else most}, which no model has")
    return np.ascontiguousarray(array, dtype=np.uint8 if most <= np.iinfo(np.uint8).max else np.uint16)


def cuts(sampling: SamplingParams) -> bool:
    """Whether top-k or top-p takes ids away before a token is drawn."""
    if sampling.temperature == 0:
        return False  # nothing is drawn
    return sampling.top_p not in (None, 1.0) or sampling.top_k not in (None, 0, -1)


def mask_from_json(raw: msgspec.Raw) -> SamplingMask | None:
    """A list of ids for each token, without a Python object for each id: a long reply has a million. None for null.

    Raises: ValueError for anything else.
    """
    text = bytes(raw)
    if text == bytes(NO_IDS):
        return None
    try:
        sets = simdjson.Parser().parse(text)
        if not isinstance(sets, simdjson.Array):
            raise TypeError("it is no list")
        lists = [one for one in sets if isinstance(one, simdjson.Array)]
        if len(lists) != len(sets) or text.count(b"[") != 1 + len(lists):  # the parser would flatten deeper lists
            raise TypeError("it is no list of lists of ids")
        counts = np.fromiter(map(len, lists), np.int32, len(lists))
        ids = np.frombuffer(sets.as_buffer(of_type="i"), np.int64) if counts.any() else np.empty(0, np.int64)
    except (TypeError, RuntimeError) as error:  # the last for numbers that are no integers of 64 bits
        raise ValueError(f"no sampling mask: {error}") from error
    if len(ids) != counts.sum() or (ids < 0).any() or (ids > LARGEST_ID).any():
        raise ValueError("no sampling mask: it holds other values than ids")
    return SamplingMask(counts, ids.astype(np.int32))


def sglang_mask(raw: msgspec.Raw, values: Sequence[float | None] | None) -> tuple[SamplingMask | None, list[float]]:
    """The mask, and the log-probs [T] among its ids: the others that SGLang reports are of the whole vocabulary.

    Raises: ValueError where one comes without the other.
    """
    mask = mask_from_json(raw)
    if mask is None:
        return None, []
    num_values = 0 if values is None else len(values)
    if values is None or num_values != len(mask.counts):
        raise ValueError(f"{len(mask.counts)} sampling masks, and {num_values} log-probs of them")
    return mask, [np.nan if value is None else value for value in values]
