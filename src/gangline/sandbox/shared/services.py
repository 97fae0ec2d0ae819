"""The answer of runtimes that start no services."""

from __future__ import annotations

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import RuntimeSpec

__all__ = ["refuse_services"]


def refuse_services(spec: RuntimeSpec, runtime: str) -> None:
    """Raises: InvalidRequest where the specification has services."""
    if spec.services:
        raise InvalidRequest(
            f"runtime `{runtime}` starts no services ({', '.join(spec.services)}): use `docker` or `podman`."
        )
