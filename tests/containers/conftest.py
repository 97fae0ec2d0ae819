"""Engines for the session, and the runtimes that they give.

GANGLINE_TEST_CONTAINERS names those that are tested (`docker,podman`).
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import pytest

from containers.engines import docker_engine, installed, podman_engine
from support.requirements import need

ENGINES = os.environ.get("GANGLINE_TEST_CONTAINERS", "docker,podman").split(",")
_INSTALL = "run, as root: apt-get install -y docker.io podman uidmap runc"


@pytest.fixture(scope="session", params=ENGINES)
def container_runtime(request: pytest.FixtureRequest) -> Generator[str]:
    """Name of a runtime whose engine runs."""
    with engine_running(request.param):
        yield request.param


@contextmanager
def engine_running(name: str) -> Generator[None]:
    """The engine of a runtime, for the block."""
    need(installed("dpkg-query", "unshare"), "dpkg-query and unshare make and start what is tested")
    if name == "docker":
        need(installed("docker", "dockerd"), f"docker is missing: {_INSTALL}")
        need(os.geteuid() == 0, "a Docker daemon needs root")
    else:
        need(installed("podman", "runc"), f"podman is missing: {_INSTALL}")
    with ExitStack() as stack:
        env = stack.enter_context(docker_engine() if name == "docker" else podman_engine())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for variable, value in env.items():
            patch.setenv(variable, value)
        yield
