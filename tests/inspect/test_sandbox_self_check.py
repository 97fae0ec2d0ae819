"""Inspect's own checks of a sandbox environment, on ours, which is found as Inspect finds it: by its name.

One of them needs root inside: it makes a user. Nobody is root in our sandboxes, so it ends with the error that Inspect
has for that, and is an expected failure in the way that Inspect's checks ask for, as it is for its own sandbox `local`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from inspect_ai.util import SandboxUserUnsupportedError
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

NEEDS_ROOT = "test_exec_as_user"


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncGenerator[Any]:
    if getattr(request.node, "originalname", None) == NEEDS_ROOT:
        request.applymarker(pytest.mark.xfail(raises=SandboxUserUnsupportedError, strict=True, reason="nobody is root"))
    kind = registry_find_sandboxenv("gangline")
    environments = await kind.sample_init("self_check", None, {})
    yield environments["default"]
    await kind.sample_cleanup("self_check", None, environments, False)


async def test_its_users_are_its_own_and_the_grader(sandbox_env: Any) -> None:
    own = (await sandbox_env.exec(["id", "-u"])).stdout.strip()
    for name in ("agent", own):
        assert (await sandbox_env.exec(["id", "-u"], user=name)).stdout.strip() == own
    if os.geteuid() == 0:
        assert (await sandbox_env.exec(["id", "-un"], user="grader")).stdout.strip() == "grader"
    with pytest.raises(SandboxUserUnsupportedError, match="'root'"):
        await sandbox_env.exec(["id"], user="root")
