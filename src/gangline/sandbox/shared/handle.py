"""Constant properties of a sandbox."""

from __future__ import annotations

import msgspec

__all__ = ["SandboxFacts"]


class SandboxFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Constant properties of a sandbox: see `Sandbox`."""

    runtime_id: str
    workdir: str
    home: str
    grader_home: str | None
    proxy_url: str | None
