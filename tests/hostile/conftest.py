"""The engines of containers are those that their own tests start."""

from __future__ import annotations

from containers.conftest import container_runtime

__all__ = ["container_runtime"]
