"""Registries for the engines of tests: Debian's docker-registry, and one that answers as registries do in trouble.

A Docker daemon of the tests is in a network namespace of its own, so its registries are there too.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from containers.engines import installed
from support.requirements import need
from support.service.cli_process import wait_for

__all__ = ["Registry", "moody_registry", "registry"]

_CONFIG = """
version: 0.1
log: {{level: info, fields: {{service: registry}}}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""
_UNSAFE = """
[[registry]]
location = "127.0.0.1:{port}"
insecure = true
"""
_MOODY = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
TROUBLES = {
    "busy": (429, "TOOMANYREQUESTS", "You have reached your unauthenticated pull rate limit."),
    "gone": (404, "MANIFEST_UNKNOWN", "manifest unknown"),
    "denied": (403, "DENIED", "requested access to the resource is denied"),
    "closed": (401, "UNAUTHORIZED", "authentication required"),
    "broken": (500, "UNKNOWN", "unknown error"),
    "away": (503, "UNAVAILABLE", "service unavailable"),
}
class Moody(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        print(self.command, self.path, flush=True)
        kind = (self.path.split("/") + [""] * 3)[2]
        if kind == "slow":
            threading.Event().wait()
        if kind == "cut":
            self.close_connection = True
            return self.connection.close()
        status, code, message = TROUBLES.get(kind, (200, "", ""))
        body = json.dumps({"errors": [{"code": code, "message": message}]} if code else {}).encode()
        self.send_response(status)
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
    do_HEAD = do_GET
    def log_message(self, *_): pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Moody).serve_forever()
"""


class Registry:
    """A registry at `address`, as the engine reaches it."""

    def __init__(self, runtime: str, argv: Sequence[str], port: int, log: Path) -> None:
        self.address = f"127.0.0.1:{port}"
        self.entering = _entering(runtime)
        """Start of a command line in the engine's network."""
        self._argv = argv
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*self.entering, *self._argv], stdout=log, stderr=log)
        wait_for(self._answers)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        host, port = self.address.split(":")
        dial = f"import socket; socket.create_connection(('{host}', {port}), 5).close()"
        return subprocess.run([*self.entering, sys.executable, "-c", dial], capture_output=True).returncode == 0

    def layers_sent(self, name: str) -> list[str]:
        """Digest of each blob of an image that a client took, in order."""
        return re.findall(rf'"GET /v2/{name}/blobs/(sha256:[0-9a-f]{{64}}) HTTP/[\d.]+" 200', self._log.read_text())

    def num_asked(self, name: str) -> int:
        """Requests for manifests of an image."""
        return len(re.findall(rf"(?:GET|HEAD) /v2/{name}/manifests/", self._log.read_text()))


def _entering(runtime: str) -> list[str]:
    """Start of a command line in the network of the engine of tests."""
    if runtime != "docker":
        return []
    (host,) = (word for word in shlex.split(os.environ["GANGLINE_DOCKER"]) if word.startswith("unix://"))
    pid = Path(host.removeprefix("unix://")).with_name("pid").read_text().strip()
    entering = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    subprocess.run([*entering, "ip", "link", "set", "lo", "up"], check=True)
    return entering


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _running(runtime: str, make: Callable[[Path, int], list[str]]) -> Generator[Registry]:
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="gangline-registry-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        before = os.environ.get("CONTAINERS_REGISTRIES_CONF")  # another registry's, in tests with both
        known = "unqualified-search-registries = []\n" if before is None else Path(before).read_text()
        (folder / "registries.conf").write_text(known + _UNSAFE.format(port=port))
        patch.setenv("CONTAINERS_REGISTRIES_CONF", str(folder / "registries.conf"))
        (folder / "log").touch()
        started = Registry(runtime, make(folder, port), port, folder / "log")
        try:
            started.start()
            yield started
        finally:
            started.stop()


@contextmanager
def registry(runtime: str) -> Generator[Registry]:
    """An empty registry for the engine of a runtime."""
    need(installed("docker-registry"), "docker-registry is missing: apt-get install -y docker-registry")

    def make(folder: Path, port: int) -> list[str]:
        (folder / "config.yml").write_text(_CONFIG.format(folder=folder, port=port))
        return ["docker-registry", "serve", str(folder / "config.yml")]

    with _running(runtime, make) as started:
        yield started


@contextmanager
def moody_registry(runtime: str) -> Generator[Registry]:
    """Its images `busy`, `gone`, `denied`, `closed`, `broken`, `away`, `cut` and `slow` are answered in these ways."""

    def make(_: Path, port: int) -> list[str]:
        return [sys.executable, "-c", _MOODY, str(port)]

    with _running(runtime, make) as started:
        yield started
