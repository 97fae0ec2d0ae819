"""Apptainer for real: `make test-apptainer` brings it, and an image; elsewhere these tests are skipped."""

from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture(autouse=True, scope="session")
def _needs_apptainer() -> None:
    if shutil.which("apptainer") is None or not os.environ.get("GANGLINE_TEST_IMAGE"):
        pytest.skip("apptainer is not installed, or GANGLINE_TEST_IMAGE names no image: run make test-apptainer")
