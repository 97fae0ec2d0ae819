"""The sandbox in a node's keeper keeps the contract, outlives its node by the grace, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from gangline.domain.errors import RuntimeUnavailable
from gangline.domain.sandbox import Runtime
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.testing.adoption_conformance import AdoptionCheck, adoption_checks, in_keeper, run_adoption_check
from gangline.testing.runtime_conformance import Check, checks, run_check


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _sandbox_works() -> None:
    try:
        await BubblewrapRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Runtime]:
    """One keeper for all checks, as a node has one for all its sandboxes."""
    async with in_keeper("sandbox", tmp_path_factory.mktemp("keeper")) as runtime:
        yield runtime


@pytest.mark.parametrize("check", adoption_checks(), ids=lambda check: check.__name__)
async def test_adoption(check: AdoptionCheck, tmp_path: Path) -> None:
    await run_adoption_check(check, "sandbox", tmp_path)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", checks(isolated=True), ids=lambda check: check.__name__)
async def test_a_sandbox_in_the_keeper(check: Check, kept: Runtime, tmp_path: Path) -> None:
    await run_check(check, kept, tmp_path, isolated=True)
