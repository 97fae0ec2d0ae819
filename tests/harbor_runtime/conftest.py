"""Harbor's own Docker environment, on an engine of the tests' own.

GANGLINE_HARBOR_PYTHON names a Python that has Harbor.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from containers.engines import docker_engine, installed
from support.requirements import need

_CLOSED = """
services:
  main:
    network_mode: none
    stop_grace_period: 0s
"""
"""Harbor closes a network by a container whose image is on a registry. The first process of its containers has no ear
for SIGTERM."""


def _succeeds(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def harbor_environment(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, str]]:
    """Variables by which the runtime finds Harbor, and Harbor finds Docker; they are set."""
    python = os.environ.get("GANGLINE_HARBOR_PYTHON", "")
    has_harbor = python and _succeeds(python, "-c", "import harbor.environments.docker.docker")
    need(has_harbor, "GANGLINE_HARBOR_PYTHON names no Python with Harbor: run make test-harbor")
    need(installed("docker", "dockerd", "dpkg-query", "unshare"), "docker is missing: apt-get install -y docker.io")
    need(_succeeds("docker", "compose", "version"), "docker has no plug-in `compose`: run make test-harbor")
    need(os.geteuid() == 0, "a Docker daemon needs root")
    with docker_engine() as env, pytest.MonkeyPatch.context() as patch:
        closed = tmp_path_factory.mktemp("harbor") / "closed.yaml"
        closed.write_text(_CLOSED)
        variables = {
            "DOCKER_HOST": env["GANGLINE_DOCKER"].split()[-1],
            "GANGLINE_HARBOR_OPTIONS": json.dumps({"extra_docker_compose": [str(closed)]}),
            "GANGLINE_HARBOR_NETWORK": "closed",
        }
        for name, value in variables.items():
            patch.setenv(name, value)
        yield {**variables, "GANGLINE_HARBOR_PYTHON": str(Path(python).absolute())}


def containers() -> list[str]:
    """Names of those that the engine has."""
    argv = ["docker", "ps", "--all", "--format", "{{.Names}}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
