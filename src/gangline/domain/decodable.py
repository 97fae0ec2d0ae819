"""Structs that several threads may decode at once.

msgspec learns how to decode a struct when one is first decoded, and a process in which two threads make it learn the
same one crashes (seen with 0.22). Types that threads decode are therefore warmed up when their module is imported.
"""

from __future__ import annotations

from typing import Any

import msgspec


def warm_decoder(*kinds: Any) -> None:
    """Prepare the decoders of these types, and of all types inside. Call it below their definitions."""
    for kind in kinds:
        msgspec.msgpack.Decoder(kind)
