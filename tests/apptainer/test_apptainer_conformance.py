"""Runtime `apptainer` keeps the contract, with Apptainer itself: over the host's programs, and over an image."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gangline.sandbox.apptainer.runtime import ApptainerRuntime
from gangline.settings.machine import Settings
from gangline.testing.adoption_conformance import AdoptionCheck, adoption_checks, run_adoption_check
from gangline.testing.runtime_conformance import Check, checks, run_check

CHECKS = checks(isolated=True)
OF_THE_HOST = {"the_agent_is_not_root_and_not_process_one", "the_host_is_read_only_and_its_processes_invisible"}
"""They look at the host's own /etc and /usr: an ordinary user's image is the agent's own, in its overlay."""

NOT_UNDER_FAKEROOT = {
    "file_systems_in_memory_have_a_size",
    "the_agent_has_no_privileges_and_gets_none",
    "the_agent_is_not_root_and_not_process_one",
}
"""There the agent is meant to be root of its container, which may write the container's /dev."""


@pytest.fixture
def _suits_fakeroot(check: Check) -> None:
    if Settings.from_environ().apptainer_fakeroot and check.__name__ in NOT_UNDER_FAKEROOT:
        pytest.skip("the agent is root of its container")


@pytest.mark.usefixtures("_suits_fakeroot")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_apptainer_over_the_host(check: Check, tmp_path: Path) -> None:
    await run_check(check, ApptainerRuntime(), tmp_path, isolated=True)


@pytest.mark.usefixtures("_suits_fakeroot")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_apptainer_over_an_image(check: Check, tmp_path: Path) -> None:
    if os.geteuid() != 0 and check.__name__ in OF_THE_HOST:
        pytest.skip("an ordinary user's image is the agent's own")
    image = os.environ["GANGLINE_TEST_IMAGE"]
    await run_check(check, ApptainerRuntime(), tmp_path, isolated=True, image=image)


@pytest.mark.parametrize("check", adoption_checks(), ids=lambda check: check.__name__)
async def test_apptainer_outlives_its_node(check: AdoptionCheck, tmp_path: Path) -> None:
    await run_adoption_check(check, "apptainer", tmp_path)
