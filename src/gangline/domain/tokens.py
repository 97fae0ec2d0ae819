"""Arrays of tokens, and the encoding of records that contain them.

Records are msgspec structs whose token fields are NumPy arrays. In MessagePack an array is one extension value (its
code gives the dtype, its bytes are little-endian), so 100k ids cost 400 kB and no parsing. In JSON it is a list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
"""[T] token ids."""
Logprobs = NDArray[np.float32]
"""[T] natural-log probabilities; 0.0 where masked."""
LossMask = NDArray[np.int8]
"""[T] 1 where sampled, else 0."""
Versions = NDArray[np.int32]
"""[T] policy version of each token; -1 where masked. Has the same type as `TokenIds`."""

_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<i4"), 2: np.dtype("<f4"), 3: np.dtype("i1")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

T = TypeVar("T")


def token_ids(values: Iterable[int] = ()) -> TokenIds:
    return np.fromiter(values, dtype=np.int32)


def logprobs(values: Iterable[float] = ()) -> Logprobs:
    return np.fromiter(values, dtype=np.float32)


def common_prefix_len(a: TokenIds, b: TokenIds) -> int:
    """Returns how many leading elements `a` and `b` share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(np.argmax(differs)) if n else 0
    return n if n == 0 or not differs[first] else first


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        return msgspec.msgpack.Ext(_CODES[array.dtype.newbyteorder("<")], array.tobytes())
    raise NotImplementedError(f"cannot encode {type(value)!r}")


def _encode_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return cast("NDArray[Any]", value).tolist()
    raise NotImplementedError(f"cannot encode {type(value)!r}")


def _decode_ext(code: int, data: memoryview) -> Any:
    if code not in _DTYPES:
        raise msgspec.ValidationError(f"unknown array extension {code}")
    return np.frombuffer(data, dtype=_DTYPES[code])


def _decode_array(kind: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return cast("NDArray[Any]", value)
    raise msgspec.ValidationError(f"expected a token array, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode_msgpack(record: Any) -> bytes:
    return _encoder.encode(record)


def encode_json(record: Any) -> bytes:
    return msgspec.json.encode(record, enc_hook=_encode_list)


def decode_msgpack(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Raises: msgspec.ValidationError, msgspec.DecodeError. Arrays are read-only views of `data`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array, ext_hook=_decode_ext)
