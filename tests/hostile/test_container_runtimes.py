"""Docker and podman withstand every attack that the sandbox withstands."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from containers.engines import IMAGE
from gangline.settings.plugins import make_runtime
from support.hostility import Attack, Grounds, assert_held, attacked_grounds, attacks

NOT_FOR_ORDINARY_USERS = {"makes_empty_files_in_memory_without_end", "keeps_removed_files_mapped"}
"""What a container holds in memory is not seen by an ordinary user's node: docs/threat-model.md."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def containers(container_runtime: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Grounds]:
    root = tmp_path_factory.mktemp(container_runtime)
    runtime = make_runtime(container_runtime)
    async with attacked_grounds(runtime, root, attacks(isolated=True), image=IMAGE) as grounds:
        yield grounds


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("attack", attacks(isolated=True), ids=lambda attack: attack.name)
async def test_a_container_withstands(attack: Attack, containers: Grounds) -> None:
    if os.geteuid() != 0 and attack.name in NOT_FOR_ORDINARY_USERS:
        pytest.skip("does not apply: not defended on a node of an ordinary user")
    assert_held(await containers.attacked(attack))
