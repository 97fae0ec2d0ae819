"""The runtimes of this package that need no engine withstand every attack that they promise to."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.sandbox import Runtime
from gangline.settings.plugins import make_runtime
from support.hostility import Attack, Grounds, assert_held, attacked_grounds, attacks
from support.requirements import need

NOT_FOR_ORDINARY_USERS = {
    "sets_limits_of_its_supervisor",
    "makes_empty_files_in_memory_without_end",
    "keeps_removed_files_mapped",
}
"""An ordinary user's agents are that user, and what they hold in memory is not seen by it: docs/threat-model.md."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Grounds]:
    async with attacked_grounds(
        await _ready("sandbox"), tmp_path_factory.mktemp("sandbox"), attacks(isolated=True)
    ) as grounds:
        yield grounds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Grounds]:
    runtime, root = await _ready("process"), tmp_path_factory.mktemp("process")
    async with attacked_grounds(runtime, root, attacks(isolated=False), isolated=False) as grounds:
        yield grounds


async def _ready(name: str) -> Runtime:
    runtime = make_runtime(name)
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        need(False, error.message)
    return runtime


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("attack", attacks(isolated=True), ids=lambda attack: attack.name)
async def test_the_sandbox_withstands(attack: Attack, sandboxes: Grounds) -> None:
    if os.geteuid() != 0 and attack.name in NOT_FOR_ORDINARY_USERS:
        pytest.skip("does not apply: not defended on a node of an ordinary user")
    assert_held(await sandboxes.attacked(attack))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("attack", attacks(isolated=False), ids=lambda attack: attack.name)
async def test_processes_without_isolation_withstand(attack: Attack, processes: Grounds) -> None:
    assert_held(await processes.attacked(attack))
