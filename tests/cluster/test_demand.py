"""`gangline up --cluster --max-nodes` on a Ray cluster whose own autoscaler starts and ends the machines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from cluster.conftest import RayMachines, Service, Start
from support.requirements import need_module
from support.service.cli_process import wait_for

WITHIN_S = 60.0
"""In which nodes follow the sessions, on a machine that has nothing else to do."""
MOST = 4


@pytest.fixture(scope="module")
def ray_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayMachines]:
    """None, and at most four, besides the head."""
    need_module("ray", "pip install 'gangline[cluster]'")
    machines = RayMachines(tmp_path_factory.mktemp("ray") / "ray.log", MOST)
    yield machines
    machines.close()


class Gates:
    """Sessions end when theirs is open."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.command = f"until [ -e {folder}/all -o -e {folder}/$GANGLINE_SESSION_ID ]; do sleep 1; done"

    def open(self, *session_ids: str) -> None:
        for name in session_ids:
            (self._folder / name).touch()

    def open_all(self) -> None:
        self.open("all")


@pytest.fixture
def gates(tmp_path: Path) -> Generator[Gates]:
    made = Gates(tmp_path / "gates")
    yield made
    made.open_all()


def seconds_until(condition: Callable[[], object]) -> float:
    began = time.monotonic()
    wait_for(condition)
    return round(time.monotonic() - began, 1)


def test_nodes_follow_the_sessions_up_and_down_and_none_is_lost(
    start: Start, ray_machines: RayMachines, gates: Gates
) -> None:
    service = Service(start("--min-nodes", 0, "--max-nodes", MOST, "--run-slots", 50, "--ready-slots", 0))

    def machines() -> int:
        return len(ray_machines.ask("alive"))

    def running() -> dict[str, list[str]]:
        """node id -> sessions."""
        found: dict[str, list[str]] = {}
        for one in service.sessions():
            if one["stage"] == "run":
                found.setdefault(one["node_id"], []).append(one["session_id"])
        return found

    assert (service.nodes(), machines()) == ({}, 0)
    service.submit(gates.command, 200)
    took = {"200: nodes": seconds_until(lambda: len(service.nodes()) == MOST)}
    took["200: all run"] = seconds_until(lambda: sum(map(len, running().values())) == 200)
    assert machines() == MOST

    kept = {node_id: sessions[:5] for node_id, sessions in running().items()}
    gates.open(*(name for node_id, sessions in running().items() for name in sessions if name not in kept[node_id]))
    wait_for(lambda: [one["state"] for one in service.sessions()].count("ended") == 180)
    draining = lambda: [node_id for node_id, one in service.nodes().items() if one["draining"]]  # noqa: E731
    took["20: draining"] = seconds_until(lambda: len(draining()) == MOST - 1)
    assert running() == kept, "a node that drains ends none of its sessions"
    assert machines() == MOST
    gates.open(*(name for node_id in draining() for name in kept[node_id]))
    took["20: nodes"] = seconds_until(lambda: len(service.nodes()) == 1)
    took["20: machines"] = seconds_until(lambda: machines() == 1)
    assert len(running()) == 1

    gates.open_all()
    took["0: nodes"] = seconds_until(lambda: not service.nodes())
    took["0: machines"] = seconds_until(lambda: machines() == 0)
    print(json.dumps(took))
    ended = service.sessions()
    assert {(one["outcome"], one["attempt"]) for one in ended} == {("completed", 1)}
    assert service.ends() == {f"t.{number}": 1 for number in range(200)}
    assert max(took.values()) < WITHIN_S, took
    assert service.up.end()[0] == 0
    wait_for(ray_machines.is_empty)


def test_a_drain_that_takes_too_long_gives_its_sessions_back(
    start: Start, ray_machines: RayMachines, gates: Gates
) -> None:
    options = ("--max-nodes", 2, "--run-slots", 2, "--ready-slots", 0, "--shrink-after", 1, "--drain-timeout", 1)
    service = Service(start(*options, "--postrun-workers", 1, "--init-workers", 1))
    assert len(service.nodes()) == 1
    service.submit(gates.command, 4)
    wait_for(lambda: [one["stage"] for one in service.sessions()].count("run") == 4)
    of_nodes = {one["node_id"]: one["session_id"] for one in service.sessions()}
    assert len(of_nodes) == 2
    gates.open(*of_nodes.values())
    wait_for(lambda: len(service.nodes()) == 1)
    wait_for(lambda: [one["stage"] for one in service.sessions()].count("run") == 2)
    assert sorted(one["attempt"] for one in service.sessions()) == [1, 1, 1, 2]
    gates.open_all()
    assert {one["outcome"] for one in service.wait_for_end()} == {"completed"}
    assert "cluster.drain_timed_out" in (service.up.data / "logs" / "cluster.log").read_text()
    assert service.up.end()[0] == 0
    wait_for(ray_machines.is_empty)
