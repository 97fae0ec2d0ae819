"""Apptainer itself withstands every attack that the sandbox withstands: over the host's programs, and over an image."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from gangline.runtimes.apptainer.runtime import ApptainerRuntime
from gangline.testing.hostility import Attack, Grounds, assert_held, attacked_grounds, attacks


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["host", "image"])
async def sandboxes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Grounds]:
    image = os.environ.get("GANGLINE_TEST_IMAGE") if request.param == "image" else None
    root = tmp_path_factory.mktemp(request.param)
    async with attacked_grounds(ApptainerRuntime(), root, attacks(isolated=True), image=image) as grounds:
        yield grounds


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("attack", attacks(isolated=True), ids=lambda attack: attack.name)
async def test_apptainer_withstands(attack: Attack, sandboxes: Grounds) -> None:
    assert_held(await sandboxes.attacked(attack))
