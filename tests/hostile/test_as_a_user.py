"""The sandbox and podman withstand the same attacks where the node is an ordinary user."""

from __future__ import annotations

from pathlib import Path

import pytest

from containers.engines import installed
from support.node.ordinary_user import ordinary_user, run_tests_as_a_user
from support.requirements import need


@pytest.mark.timeout(1200)
def test_the_runtimes_of_an_ordinary_user_withstand_the_same() -> None:
    need(installed("podman", "newuidmap"), "apt-get install -y podman uidmap")
    with ordinary_user() as home:
        here = Path(__file__).parent
        tests = [here / "test_sandbox.py", here / "test_container_runtimes.py"]
        run_tests_as_a_user(home, tests, GANGLINE_TEST_CONTAINERS="podman")
        run_tests_as_a_user(home, [here / "test_images.py", "-k", "sandbox"], GANGLINE_TEST_CONTAINERS="podman")
