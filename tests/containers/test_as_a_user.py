"""The same tests of podman and of the sandbox once more, as an ordinary user."""

from __future__ import annotations

from pathlib import Path

import pytest

from containers.conftest import ENGINES
from containers.engines import installed
from support.node.ordinary_user import ordinary_user, run_tests_as_a_user
from support.requirements import need


@pytest.mark.timeout(1200)
def test_an_ordinary_users_podman_passes_the_same_tests() -> None:
    need("podman" in ENGINES and installed("podman", "newuidmap"), "apt-get install -y podman uidmap")
    with ordinary_user() as home:
        tests = sorted(Path(__file__).parent.glob("test_container*.py"))
        run_tests_as_a_user(home, tests, GANGLINE_TEST_CONTAINERS="podman")


@pytest.mark.timeout(1200)
def test_an_ordinary_users_sandbox_passes_the_same_tests() -> None:
    need(installed("bwrap"), "apt-get install -y bubblewrap")
    with ordinary_user() as home:
        tests = Path(__file__).parents[1] / "integration" / "test_runtime_conformance.py"
        run_tests_as_a_user(
            home, [tests, Path(__file__).with_name("test_sandbox_images.py"), "-k", "sandbox and not in_an_image"]
        )
