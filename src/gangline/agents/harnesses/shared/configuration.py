"""Writes configuration files for agent programs into the session's HOME."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gangline.domain.sandbox import Sandbox


async def write_json(runtime: Sandbox, path: str, value: Mapping[str, Any]) -> None:
    await runtime.upload(path, json.dumps(value, indent=2).encode())


async def write_skills(runtime: Sandbox, folder: str, skills: Mapping[str, Mapping[str, str]]) -> None:
    """Writes each skill to a folder of its name, which all programs with skills expect."""
    for name, files in skills.items():
        for path, content in files.items():
            await runtime.upload(f"{folder}/{name}/{path}", content.encode())
