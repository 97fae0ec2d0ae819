"""What graders remember for the node's other sessions, such as answers of models: the oldest unused ones go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping

__all__ = ["Verdicts"]

_MAX_BYTES = 16 << 20


class Verdicts(MutableMapping[bytes, bytes]):
    """Question's digest -> answer, up to `max_bytes` of both together."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._room = max_bytes

    def __getitem__(self, key: bytes) -> bytes:
        value = self._kept[key]
        self._kept.move_to_end(key)
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.pop(key, None)
        self._kept[key] = value
        self._room -= len(key) + len(value)
        while self._room < 0:
            del self[next(iter(self._kept))]

    def __delitem__(self, key: bytes) -> None:
        self._room += len(key) + len(self._kept.pop(key))

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
