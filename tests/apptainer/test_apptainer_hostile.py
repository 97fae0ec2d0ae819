"""Apptainer itself withstands every attack that the sandbox withstands: over the host's programs, and over an image."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from gangline.sandbox.apptainer.runtime import ApptainerRuntime
from gangline.settings.machine import Settings
from hostile.test_sandbox import NOT_FOR_ORDINARY_USERS
from support.hostility import Attack, Grounds, assert_held, attacked_grounds, attacks

pytestmark = pytest.mark.skipif(
    Settings.from_environ().apptainer_fakeroot,
    reason="not defended: the agent is root of its container, and docs/guides/runtimes.md says so",
)
NOT_DEFENDED = {
    "host": NOT_FOR_ORDINARY_USERS | {"sees_keys_in_the_kernels_list_of_the_host", "writes_into_folders_of_the_system"},
    "image": NOT_FOR_ORDINARY_USERS
    | {
        "changes_modes_and_times_of_programs",
        "keeps_removed_files_open",
        "puts_modules_where_others_import_them",
        "reads_private_files_of_the_system",
        "reads_the_home_of_root",
        "reads_the_passwords_of_the_machine",
        "sees_keys_in_the_kernels_list_of_the_host",
        "writes_into_folders_of_the_system",
        "writes_programs_that_others_run",
    },
}
"""On a node of an ordinary user, whose container's files are all the agent's own: docs/threat-model.md."""


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
async def test_apptainer_withstands(attack: Attack, sandboxes: Grounds, request: pytest.FixtureRequest) -> None:
    over = request.node.callspec.params["sandboxes"]
    if os.geteuid() != 0 and attack.name in NOT_DEFENDED[over]:
        pytest.skip("does not apply: not defended on a node of an ordinary user")
    assert_held(await sandboxes.attacked(attack))
