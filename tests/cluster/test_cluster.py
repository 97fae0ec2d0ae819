"""`gangline up --cluster` on a real Ray cluster of several machines, over PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from cluster.conftest import HEAD, OTHER, RayMachines, Service, Start
from support.service.cli_process import UpProcess, gangline, processes_with, wait_for, wait_until_gone

NUM_SESSIONS = 20
"""As many as two nodes lease, of which each runs two."""
NUM_RUNNING = 4
ONCE = {f"t.{number}": 1 for number in range(NUM_SESSIONS)}


def submit(service: Service, gate: Path, task_id: str = "t") -> None:
    """Sessions that end when the gate is there. Returns when both nodes run all that they can."""
    service.submit(f"until [ -e {gate} ]; do sleep 0.1; done", NUM_SESSIONS, task_id)
    wait_for(lambda: [one["stage"] for one in service.sessions(task_id)].count("run") == NUM_RUNNING)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.fixture
def gate(tmp_path: Path) -> Generator[Path]:
    """Opened at the end whatever happened, so that no agent waits for it for ever."""
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


def assert_nothing_is_left(up: UpProcess, machines: RayMachines, gate: Path) -> None:
    assert processes_with(str(up.data)) == {}
    assert processes_with(str(gate)) == {}
    assert [*up.data.glob("nodes/*/runtimes/*")] == []
    wait_for(machines.is_empty)


def test_sessions_run_on_both_machines_and_ctrl_c_under_load_leaves_nothing(
    start: Start, ray_machines: RayMachines, gate: Path
) -> None:
    service = Service(start("--run-slots", 2))
    nodes = service.wait_for_nodes(2)
    assert sorted(nodes.values()) == [HEAD, OTHER]
    submit(service, gate)
    gate.touch()
    assert {one["node_id"] for one in service.wait_for_end()} == set(nodes)
    assert service.ends() == ONCE
    shown = gangline("gate", "show", "--data", service.up.data, "--json")
    assert len(json.loads(shown.stdout)) == 2
    gate.unlink()
    submit(service, gate, "u")
    assert len(processes_with(str(gate))) >= NUM_RUNNING
    assert service.up.end(signal.SIGINT)[0] == 0
    assert_nothing_is_left(service.up, ray_machines, gate)


def test_kill_9_of_up_leaves_nothing_in_the_cluster(start: Start, ray_machines: RayMachines, gate: Path) -> None:
    service = Service(start("--run-slots", 2))
    service.wait_for_nodes(2)
    submit(service, gate)
    service.up.process.kill()
    wait_for(ray_machines.is_empty)
    wait_for(lambda: not processes_with(str(service.up.data)) and not processes_with(str(gate)))


def test_sessions_of_a_machine_that_is_lost_end_elsewhere_each_once(
    start: Start, ray_machines: RayMachines, gate: Path
) -> None:
    service = Service(start("--run-slots", 2, "--nodes", 2))
    nodes = service.wait_for_nodes(2)
    submit(service, gate)
    (lost,) = [node_id for node_id, host in nodes.items() if host == OTHER]
    ray_machines.ask("kill", host=OTHER)
    try:
        wait_for(lambda: service.hosts().get(lost) == HEAD)
        gate.touch()
        ended = service.wait_for_end()
        assert {one["outcome"] for one in ended} == {"completed"}
        assert service.ends() == ONCE
        assert service.up.end()[0] == 0
        assert_nothing_is_left(service.up, ray_machines, gate)
    finally:
        ray_machines.add()


@pytest.mark.parametrize("killed", ["actor", "node"])
def test_a_killed_process_is_started_again_as_the_same_node_and_sessions_end_once(
    killed: str, start: Start, ray_machines: RayMachines, gate: Path
) -> None:
    service = Service(start("--run-slots", 2))
    nodes = service.wait_for_nodes(2)
    submit(service, gate)
    node_id = next(iter(nodes))
    before = service.process_of(node_id)
    assert before is not None
    os.kill(before if killed == "node" else parent_of(before), signal.SIGKILL)
    assert wait_until_gone(before)
    wait_for(lambda: service.process_of(node_id))
    gate.touch()
    ended = service.wait_for_end()
    assert {one["outcome"] for one in ended} == {"completed"}
    assert service.ends() == ONCE
    wait_for(lambda: service.hosts() == nodes)
    if killed == "actor":  # what it ran was given back, and an agent that had started used an attempt
        assert {one["attempt"] for one in ended} <= {1, 2}
    assert service.up.end()[0] == 0
    assert_nothing_is_left(service.up, ray_machines, gate)


def test_a_node_without_room_waits_for_a_machine_that_joins(start: Start, ray_machines: RayMachines) -> None:
    service = Service(start("--nodes", 4))
    service.wait_for_nodes(3)
    ray_machines.add("127.0.0.4")
    try:
        assert "127.0.0.4" in service.wait_for_nodes(4).values()
        assert service.up.end()[0] == 0
        wait_for(ray_machines.is_empty)
    finally:
        ray_machines.ask("kill", host="127.0.0.4")
        ray_machines.ask("settle")


def test_there_is_a_node_on_each_machine_that_joins_until_it_leaves(start: Start, ray_machines: RayMachines) -> None:
    service = Service(start("--node-cpus", 0.5))
    nodes = service.wait_for_nodes(2)
    ray_machines.add("127.0.0.4")
    try:
        joined = service.wait_for_nodes(3)
        assert joined.items() > nodes.items()
        assert sorted(joined.values()) == [HEAD, OTHER, "127.0.0.4"]
    finally:
        ray_machines.ask("kill", host="127.0.0.4")
    assert service.wait_for_nodes(2) == nodes
    (here,) = [node_id for node_id, host in nodes.items() if host == OTHER]
    service.drain(here)
    wait_for(lambda: list(service.hosts().values()) == [HEAD])
    wait_for(lambda: "cluster.node_drained" in (service.up.data / "logs" / "cluster.log").read_text())
    assert service.up.end()[0] == 0
    wait_for(ray_machines.is_empty)


def test_a_cluster_that_does_not_answer_ends_up_with_what_to_do(start: Start) -> None:
    up = start("--ray-address", "127.0.0.1:9")
    code, errors = up.outcome()
    assert code == 3
    assert "no Ray cluster answers at 127.0.0.1:9" in errors
    assert "ray start --head" in errors
    assert "Traceback" not in errors
    assert processes_with(str(up.data)) == {}


REFUSED = {
    "two sizes": ({"--nodes": "2", "--max-nodes": "3"}, 2, "give one of them"),
    "bounds the wrong way round": ({"--min-nodes": "4", "--max-nodes": "3"}, 2, "--min-nodes 4 is above"),
    "nothing that Ray could count": ({"--node-cpus": "0", "--max-nodes": "3"}, 2, "--node-resources"),
    "ray client": ({"--ray-address": "ray://127.0.0.1:9"}, 2, "HOST:PORT"),
    "a server that others cannot reach": ({"--server": "http://127.0.0.1:9"}, 2, "--host"),
    "no machine is as large": ({"--node-cpus": "99"}, 1, "--node-cpus"),
    "an engine that is down": ({}, 3, "http://127.0.0.1:9"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_what_to_do(case: str, ray_machines: RayMachines, tmp_path: Path) -> None:
    changes, expected, words = REFUSED[case]
    given = {"--ray-address": ray_machines.address, "--server": "http://server.test:9", "--data": str(tmp_path)}
    options = [text for option in (given | changes).items() for text in option]
    key = {"GANGLINE_TOKEN": "the-servers-control-token"}
    done = gangline("cluster", *options, "--", "--engine", "http://127.0.0.1:9", "--engine-wait", "0.1", env=key)
    assert done.returncode == expected, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    wait_for(ray_machines.is_empty)


def test_a_started_engine_is_refused_in_a_cluster(tmp_path: Path) -> None:
    done = gangline("up", "--cluster", "--data", tmp_path, "--engine", "embedded:smollm2")
    assert done.returncode == 2
    assert "--engine URL" in done.stderr


def test_a_machine_of_up_that_leaves_the_cluster_is_noticed_and_nodes_are_placed_anew(
    start: Start, ray_machines: RayMachines
) -> None:
    """The last one: the cluster continues without its head's machine."""
    service = Service(start())
    service.wait_for_nodes(2)
    driver = service.up.running()["pids"]["cluster"]
    ray_machines.ask("kill_raylet_of_head")
    wait_for(lambda: service.up.running()["pids"]["cluster"] != driver)
    wait_for(lambda: set(service.hosts().values()) == {OTHER})
    code, errors = service.up.end()
    assert code == 0
    assert "Ray does not run on this machine any more" in (service.up.data / "logs" / "cluster.log").read_text()
    assert "child=cluster" in errors
