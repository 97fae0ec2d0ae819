"""Structs that several threads may decode at once.

msgspec builds a struct's decoder on first use, and a process in which two threads build the same one crashes (seen with
0.22). Types that threads decode are therefore warmed up when their module is imported.
"""

from __future__ import annotations

from typing import Any

import msgspec


def warm_decoder(*kinds: Any) -> None:
    """Prepare the decoders of these types and all types inside them. Call it below their definitions."""
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)
