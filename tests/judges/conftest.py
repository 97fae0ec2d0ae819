"""Long tests against other systems, a target of `make` each: no lane of CI has the time for them."""

from __future__ import annotations

from peers.conftest import docker

__all__ = ["docker"]
