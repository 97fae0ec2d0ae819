"""Experts that a mixture-of-experts model chose for tokens: the evidence of a call, and the array of a row."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

ExpertArray = NDArray[np.unsignedinteger[Any]]
"""[tokens, layers, chosen] expert numbers, in the order in which the engine reported them."""

ExpertNumber = Literal["uint8", "uint16"]
"""uint8 if the engine's highest number is at most 255, else uint16; little-endian."""


class ExpertsMissing(ValueError):
    """The experts of some token of a row are unknown; the message has the token and the reason."""


class ExpertEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a call's context whose experts its record contains. Earlier positions are in its parent's."""

    start: int = 0
    """Index of the first token into the prompt, then the sampled ids."""
    num_tokens: int = 0
    """Consecutive tokens; the context's last one has no experts, since no layer has seen it."""
    num_layers: int = 0
    num_chosen: int = 0
    """Experts that a layer chooses for a token."""
    number: ExpertNumber = "uint8"
    digest: str = ""
    """SHA-256 of the bytes, in hexadecimal."""
    refused: str | None = None
    """Why some experts of the context are unknown; no bytes are stored then."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_known(self) -> int:
        """Leading positions of the context whose experts this record and its ancestors contain."""
        return self.end if self.refused is None else 0

    def array(self, data: bytes) -> ExpertArray:
        """Returns [num_tokens, num_layers, num_chosen]. Raises: ValueError when `data` has another length."""
        found: ExpertArray = np.frombuffer(data, dtype=np.dtype(self.number).newbyteorder("<"))
        return found.reshape(self.num_tokens, self.num_layers, self.num_chosen)


class RowExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of a row's tokens: the whole prompt, then the response without its last token."""

    num_tokens: int = 0
    num_layers: int = 0
    num_chosen: int = 0
    number: ExpertNumber = "uint8"
    data: bytes = b""
    missing: str | None = None
    """Why they are unknown; everything else is empty then."""

    @classmethod
    def of(cls, array: ExpertArray) -> RowExperts:
        """array: [tokens, layers, chosen], uint8 or uint16."""
        number: ExpertNumber = "uint8" if array.dtype.itemsize == 1 else "uint16"
        sizes = dict(zip(("num_tokens", "num_layers", "num_chosen"), array.shape, strict=True))
        return cls(number=number, data=array.astype(f"<u{array.dtype.itemsize}", copy=False).tobytes(), **sizes)

    def array(self) -> ExpertArray:
        """Returns [num_tokens, num_layers, num_chosen]. Raises: ExpertsMissing."""
        if self.missing is not None:
            raise ExpertsMissing(self.missing)
        found: ExpertArray = np.frombuffer(self.data, dtype=np.dtype(self.number).newbyteorder("<"))
        return found.reshape(self.num_tokens, self.num_layers, self.num_chosen)
