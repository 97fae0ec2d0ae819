"""The sandbox in a node's keeper keeps the contract, outlives its node by the grace, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.runtimes.bubblewrap.runtime import SandboxRuntime
from gangline.testing.adoption_conformance import AdoptionCheck, adoption_checks, in_keeper, run_adoption_check
from gangline.testing.runtime_conformance import Check, checks, run_check


@pytest.fixture(autouse=True)
async def _sandbox_works() -> None:
    try:
        await SandboxRuntime().check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)


@pytest.mark.parametrize("check", adoption_checks(), ids=lambda check: check.__name__)
async def test_adoption(check: AdoptionCheck, tmp_path: Path) -> None:
    await run_adoption_check(check, "sandbox", tmp_path)


@pytest.mark.parametrize("check", checks(isolated=True), ids=lambda check: check.__name__)
async def test_a_sandbox_in_the_keeper(check: Check, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    async with in_keeper("sandbox", tmp_path / "keeper") as runtime:
        await run_check(check, runtime, tmp_path / "root", isolated=True)
