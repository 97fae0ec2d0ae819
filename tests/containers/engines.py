"""Container engines of the tests' own: a Docker daemon started by hand, podman with its own folders; removed after.

The daemon lives in a network namespace of its own, so that it touches no rule of this machine's network. The variables
that it, and the nodes and keepers of tests, are told by are the operator's (`GANGLINE_DOCKER` and podman's own).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from containers.base_image import write_root

__all__ = ["IMAGE", "docker_engine", "podman_engine"]

IMAGE = "localhost/gangline-test-base:1"
_START_S = 60.0
_PODMAN = """
[containers]
default_ulimits = {ulimits}
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/graph"
runroot = "{folder}/run"
"""


@contextmanager
def _folder(name: str) -> Generator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"gangline-{name}-"))
    try:
        yield folder
    finally:
        subprocess.run(["rm", "-rf", "--", folder], check=True)


@contextmanager
def docker_engine() -> Generator[dict[str, str]]:
    """Variables by which it is found. Needs root."""
    with _folder("docker") as folder:
        (folder / "daemon.json").write_text(json.dumps({"iptables": False, "ip-forward": False}))
        paths = {"data-root": "data", "exec-root": "exec", "pidfile": "pid", "config-file": "daemon.json"}
        options = [f"--{name}={folder / path}" for name, path in paths.items()]
        with (folder / "log").open("wb") as log:
            daemon = subprocess.Popen(
                ["unshare", "--net", "dockerd", *options, f"--host=unix://{folder}/socket"],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        docker = ["docker", "--host", f"unix://{folder}/socket"]
        try:
            _until_answering([*docker, "info"], daemon, folder / "log")
            _import(docker, folder)
            yield {"GANGLINE_DOCKER": " ".join(docker)}
        finally:
            daemon.terminate()
            daemon.wait()


def _until_answering(argv: list[str], daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while subprocess.run(argv, capture_output=True, check=False).returncode != 0:
        assert daemon.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


@contextmanager
def podman_engine() -> Generator[dict[str, str]]:
    """Variables by which it is found. As root, or as whoever we are."""
    with _folder("podman") as folder:
        ulimits = '["nofile=1024:1024", "nproc=4096:4096"]' if os.geteuid() == 0 else "[]"
        (folder / "containers.conf").write_text(_PODMAN.format(ulimits=ulimits))
        (folder / "storage.conf").write_text(_STORAGE.format(folder=folder))
        (folder / "xdg").mkdir(mode=0o700)
        env = {
            "CONTAINERS_CONF": f"{folder}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
            "XDG_RUNTIME_DIR": f"{folder}/xdg",
        }
        whole = {**os.environ, **env}
        try:
            _import(["podman"], folder, whole)
            yield env
        finally:
            for words in (["rm", "--all", "--force", "--time", "0"], ["rmi", "--all", "--force"]):
                subprocess.run(["podman", *words], env=whole, capture_output=True, check=True)
            _end_pause(folder, whole)


def _end_pause(folder: Path, env: dict[str, str]) -> None:
    """The process that keeps an ordinary user's namespace; what is left in the folder belongs to users of that."""
    if os.geteuid() != 0:
        subprocess.run(["podman", "unshare", "rm", "-rf", folder / "graph", folder / "run"], env=env, check=True)
        for file in (folder / "xdg").rglob("pause.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def _import(command: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
    given = os.environ.get("GANGLINE_TEST_BASE")
    archive = Path(given) if given else folder / "base.tar"
    if not given:
        write_root(archive)
    change = ["--change", "ENV FROM_IMAGE=1", "--change", "ENV PATH=/opt/image/bin:/usr/bin:/bin"]
    subprocess.run([*command, "import", *change, archive, IMAGE], check=True, capture_output=True, env=env)
    if not given:
        archive.unlink()


def installed(*programs: str) -> bool:
    return all(shutil.which(program) for program in programs)
