"""Token ids out of JSON, without a Python object for each: a 20k-token prompt is most of what an engine answers."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import numpy as np

from gangline.domain.errors import EngineUnavailable
from gangline.domain.tokens import TokenIds, token_ids

__all__ = ["NO_IDS", "ids_from_json"]

NO_IDS = msgspec.Raw(b"null")
"""What a field of ids is where the engine leaves it out."""

_LARGEST = np.iinfo(np.int32).max


def ids_from_json(raw: msgspec.Raw) -> TokenIds | None:
    """A JSON list of ids -> [T]; None for null. Raises: EngineUnavailable for anything else."""
    text = bytes(raw)
    if text == b"null":
        return None
    # NumPy reads the digits in one pass; whatever is not a plain list of numbers goes the strict way.
    if text[:1] == b"[" and len(text) > 2:
        with suppress(ValueError):
            ids = np.fromstring(text[1:-1].decode(), dtype=np.int64, sep=",")
            if len(ids) == text.count(b",") + 1 and ids.max() <= _LARGEST:
                return ids.astype(np.int32)
    try:
        return token_ids(msgspec.json.decode(text, type=list[int]))
    except (msgspec.MsgspecError, OverflowError) as error:
        start = text[:80].decode("utf-8", "replace")
        raise EngineUnavailable(f"the engine answered what are no token ids: {error}; got {start!r}") from error
