"""An engine of the tests' own, for Harbor's Docker environment and for ours."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from containers.engines import docker_engine, installed
from support.requirements import need


@pytest.fixture(scope="session")
def docker() -> Generator[None]:
    """Its variables are set."""
    need(installed("docker", "dockerd", "dpkg-query", "unshare"), "docker is missing: apt-get install -y docker.io")
    need(os.geteuid() == 0, "a Docker daemon needs root")
    with docker_engine() as env, pytest.MonkeyPatch.context() as patch:
        for variable, value in env.items():
            patch.setenv(variable, value)
        yield
