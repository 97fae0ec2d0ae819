"""Runtime `apptainer` keeps the contract, with Apptainer itself: over the host's programs, and over an image."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gangline.runtimes.apptainer.runtime import ApptainerRuntime
from gangline.testing.adoption_conformance import AdoptionCheck, adoption_checks, run_adoption_check
from gangline.testing.runtime_conformance import Check, checks, run_check

CHECKS = checks(isolated=True)
OF_THE_HOST = {"the_agent_is_not_root_and_not_process_one", "the_host_is_read_only_and_its_processes_invisible"}
"""They look at the host's own /etc and /usr: an ordinary user's image is the agent's own, in its overlay."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_apptainer_over_the_host(check: Check, tmp_path: Path) -> None:
    await run_check(check, ApptainerRuntime(), tmp_path, isolated=True)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_apptainer_over_an_image(check: Check, tmp_path: Path) -> None:
    if os.geteuid() != 0 and check.__name__ in OF_THE_HOST:
        pytest.skip("an ordinary user's image is the agent's own")
    image = os.environ["GANGLINE_TEST_IMAGE"]
    await run_check(check, ApptainerRuntime(), tmp_path, isolated=True, image=image)


@pytest.mark.parametrize("check", adoption_checks(), ids=lambda check: check.__name__)
async def test_apptainer_outlives_its_node(check: AdoptionCheck, tmp_path: Path) -> None:
    await run_adoption_check(check, "apptainer", tmp_path)
