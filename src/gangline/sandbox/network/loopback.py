"""A loopback address of its own for each sandbox that shares the host's network, so that their ports do not collide.

The kernel knows the addresses in use: each is held by an abstract Unix socket of its name, which all processes of the
machine see, and which is free again when its holder is gone for any reason.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from gangline.domain.errors import RuntimeFailed

_TRIES = 1000


class LoopbackAddress:
    """Held from its making until `release`, or the end of this process."""

    def __init__(self, seed: str) -> None:
        """`seed`: with the same one the same address is tried first. Raises: RuntimeFailed when none is free."""
        chooser = random.Random(seed)
        self._held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for _try in range(_TRIES):
            # 127.0.x.x is where the host's own services are, and 127.255.255.255 is a broadcast address.
            address = f"127.{chooser.randint(1, 254)}.{chooser.randint(0, 255)}.{chooser.randint(1, 254)}"
            with suppress(OSError):
                self._held.bind(f"\0gangline-loopback-{address}")
                self.address = address
                return
        self._held.close()
        raise RuntimeFailed("no loopback address is free for a sandbox.")

    def release(self) -> None:
        """Idempotent."""
        self._held.close()
