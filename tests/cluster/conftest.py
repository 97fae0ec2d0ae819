"""A Ray cluster of two machines, an engine, PostgreSQL, and `gangline up --cluster` over them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.requirements import need_module
from support.service.cli_process import COMMAND, UpProcess, clean_environment
from support.store.postgres import Cluster

HEAD = "127.0.0.2"
OTHER = "127.0.0.3"

Start = Callable[..., UpProcess]


class RayMachines:
    """The cluster in `support/service/ray_cluster.py`; the head has room for two nodes, another for one."""

    def __init__(self, log: Path) -> None:
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).parents[1] / "support" / "service" / "ray_cluster.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=clean_environment(RAY_USAGE_STATS_ENABLED="0"),
            )
        self.address: str = self._answer()

    def ask(self, what: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **fields}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def add(self, host: str = OTHER) -> None:
        self.ask("add", host=host, cpus=1)

    def is_empty(self) -> bool:
        """Whether nothing runs in it, and nothing is held."""
        return self.ask("free") and {state for state, _ in self.ask("actors")} <= {"DEAD"}

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ray_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayMachines]:
    """Two; a test that takes one away puts it back. Gone before another module starts its own cluster."""
    need_module("ray", "pip install 'gangline[cluster]'")
    machines = RayMachines(tmp_path_factory.mktemp("ray") / "ray.log")
    machines.add()
    yield machines
    machines.close()


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "script.json").write_text(json.dumps({"default": {"text": "as you wish"}}))
    what = ("--scripted", folder / "script.json", "--tokenizer", "tiny", "--port", "0", "--json")
    with (folder / "log").open("w") as errors:
        engine = subprocess.Popen(
            [*COMMAND, "engine", *map(str, what)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=clean_environment(),
        )
    assert engine.stdout is not None
    yield json.loads(engine.stdout.readline())["engine_url"]
    engine.terminate()
    engine.communicate(timeout=60)


@pytest.fixture
def start(ray_machines: RayMachines, postgres: Cluster, engine_url: str, tmp_path: Path) -> Generator[Start]:
    """Start an `up` on the cluster with options; all are ended afterwards."""
    started: list[UpProcess] = []

    def go(*options: object) -> UpProcess:
        where = ("--cluster", "--ray-address", ray_machines.address, "--database", postgres.new_database())
        started.append(UpProcess(tmp_path / f"up{len(started)}", *where, "--engine", engine_url, *options))
        return started[-1]

    yield go
    for one in started:
        one.close()
