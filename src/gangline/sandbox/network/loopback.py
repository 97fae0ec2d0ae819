"""A separate loopback address for each sandbox on the host's network, so that their ports do not collide.

The kernel knows the addresses in use: an abstract Unix socket of that name, visible to all processes of the machine,
holds each. It is released when its holder ends for any reason.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress

from gangline.domain.errors import RuntimeFailed

_TRIES = 1000


class LoopbackAddress:
    """Held from construction until `release`, or the end of this process."""

    def __init__(self, seed: str) -> None:
        """`seed`: the same seed tries the same address first. Raises: RuntimeFailed when all are in use."""
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
