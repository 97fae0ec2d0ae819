"""Sampling masks: the ids that top-k and top-p kept when a token was drawn, as evidence of a call and as mask of a row.

A trainer that replays them computes a token's log-prob among the same ids that the engine drew it from.
"""

from __future__ import annotations

import hashlib
import itertools

import msgspec
import numpy as np
from numpy.typing import NDArray

from gangline.domain.tokens import TokenIds

_NUMBER = np.dtype("<i4")


class SamplingMask(msgspec.Struct, frozen=True, eq=False):
    """Kept ids of consecutive tokens, in the engine's order."""

    counts: NDArray[np.int32]
    """[T]: how many ids were kept; 0 if nothing was cut away or nothing was drawn."""
    ids: TokenIds
    """[sum(counts)]"""

    @classmethod
    def of_data(cls, data: bytes, num_tokens: int) -> SamplingMask:
        """Raises: ValueError when `data` does not contain as many numbers as its counts require."""
        numbers = np.frombuffer(data, _NUMBER).astype(np.int32)
        counts, ids = numbers[:num_tokens], numbers[num_tokens:]
        if len(counts) != num_tokens or (counts < 0).any() or int(counts.sum()) != len(ids):
            raise ValueError(f"{len(data)} bytes are not a sampling mask of {num_tokens} tokens")
        return cls(counts, ids)

    def data(self) -> bytes:
        """Returns counts, then ids: int32, little-endian."""
        return np.concatenate([self.counts, self.ids]).astype(_NUMBER).tobytes()

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[T + 1]: the ids of token t are `ids[offsets[t]:offsets[t + 1]]`."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def first(self, num_tokens: int) -> SamplingMask:
        """Returns the mask of the first tokens."""
        counts = self.counts[:num_tokens]
        return SamplingMask(counts, self.ids[: int(counts.sum())])

    def only(self, wanted: NDArray[np.bool_]) -> SamplingMask:
        """Returns the mask of the wanted tokens [T]; the others keep no ids."""
        return SamplingMask(np.where(wanted, self.counts, 0).astype(np.int32), self.ids[np.repeat(wanted, self.counts)])

    def sets(self) -> list[list[int]]:
        offsets = self.offsets.tolist()
        return [self.ids[start:end].tolist() for start, end in itertools.pairwise(offsets)]


class MaskEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The kept ids in a call's record, for each of its sampled tokens."""

    num_tokens: int = 0
    num_ids: int = 0
    """Kept ids of all tokens together."""
    digest: str = ""
    """SHA-256 of the bytes, in hexadecimal."""
    refused: str | None = None
    """Why they are unknown; no bytes are stored then."""

    @classmethod
    def of(cls, mask: SamplingMask, data: bytes) -> MaskEvidence:
        """data: the mask's."""
        return cls(num_tokens=len(mask.counts), num_ids=len(mask.ids), digest=hashlib.sha256(data).hexdigest())

    def mask(self, data: bytes) -> SamplingMask:
        """Raises: ValueError when the bytes do not match this certificate, or it certifies none."""
        if self.refused is not None:
            raise ValueError(self.refused)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise ValueError("the record holds another sampling mask than its certificate says")
        return SamplingMask.of_data(data, self.num_tokens)


class RowMask(msgspec.Struct, frozen=True, kw_only=True):
    """Kept ids of a row's response tokens."""

    num_tokens: int = 0
    """Tokens of the whole response. A token that was not sampled keeps 0 ids."""
    data: bytes = b""
    """See `SamplingMask.data`."""
    missing: str | None = None
    """Why they are unknown; everything else is empty then."""

    def mask(self) -> SamplingMask:
        """Raises: ValueError."""
        if self.missing is not None:
            raise ValueError(self.missing)
        return SamplingMask.of_data(self.data, self.num_tokens)
