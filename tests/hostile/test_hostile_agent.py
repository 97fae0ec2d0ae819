"""A hostile agent in the sandbox of a real service: what it tries, and that none of it succeeds."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import subprocess
import tempfile
import textwrap
import uuid
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from gangline.domain.errors import InvalidRequest, UnknownPlugin
from gangline.domain.session import SessionResult
from gangline.node.node import control_routes
from gangline.server.run import serving
from gangline.serving.scripted.server import scripted_server
from gangline.wire.client.node import NodeClient
from gangline.wire.client.server import ServerClient
from support.node.node import running_node
from support.requirements import need, need_command
from support.service.cli_process import UpProcess, processes_with

SECRET = "what only the host may know"
MAX_PIDS = 24

# Programs of the agent. The first tries requests from stdin, and prints the status of each.
CALLER = textwrap.dedent("""
    import json, os, sys, urllib.error, urllib.request
    for attempt in json.load(open("attempts.json")):
        key = os.environ["OPENAI_API_KEY"] if attempt["key"] == "own" else attempt["key"]
        headers = {"Content-Type": "application/json"} | ({"Authorization": "Bearer " + key} if key else {})
        url = attempt["url"].replace("SESSION", os.environ["OPENAI_BASE_URL"].split("/s/")[1].split("/")[0])
        url = url.replace("NODE", os.environ["OPENAI_BASE_URL"].split("/s/")[0])
        request = urllib.request.Request(url, json.dumps(attempt["body"]).encode(), headers, method=attempt["method"])
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                print(reply.status)
        except urllib.error.HTTPError as error:
            print(error.code)
        except OSError as error:
            print("unreachable")
""")

# Starts children until it may not, keeps all of them, and prints how many there were.
FORKER = textwrap.dedent("""
    import os, time
    pids = []
    try:
        while len(pids) < 500:
            pid = os.fork()
            if not pid:
                time.sleep(600)
            pids.append(pid)
    except BlockingIOError:
        pass
    print(len(pids))
""")

# Leaves its session and its parent again and again, ignores every signal it can, and keeps writing.
SURVIVOR = textwrap.dedent("""
    import os, signal, time
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for _ in range(4):
        os.fork()
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
        open("reward.txt", "w").write("1.0")
        time.sleep(0.01)
""")

# Keeps a secret in the session keyring, when called with one, or prints the one that is there.
KEYRING = textwrap.dedent("""
    import ctypes, os, sys
    libc = ctypes.CDLL(None)
    add_key, keyctl = (248, 250) if os.uname().machine == "x86_64" else (217, 219)
    def keep(secret):
        for keyring in (-3, -4):
            libc.syscall(add_key, b"user", b"passed-on", secret.encode(), len(secret.encode()), keyring)
    def found(name=b"passed-on"):
        payload = ctypes.create_string_buffer(64)
        for keyring in (-3, -4, -5):
            key = libc.syscall(keyctl, 10, keyring, b"user", name, 0)
            if key > 0 and libc.syscall(keyctl, 11, key, payload, 64) > 0:
                return payload.value.decode()
        return "nothing"
""")


def keep_in_our_keyring(secret: str) -> None:
    """As an operator's login does: what this thread starts from here on inherits the keyring."""
    libc, number = ctypes.CDLL(None), {"x86_64": (248, 250), "aarch64": (217, 219)}.get(os.uname().machine)
    if number is not None and libc.syscall(number[1], 1, None) >= 0:
        libc.syscall(number[0], b"user", b"operators", secret.encode(), len(secret.encode()), -3)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpProcess]:
    need_command("bwrap", "apt-get install bubblewrap")
    keep_in_our_keyring(SECRET)
    service = UpProcess(tmp_path_factory.mktemp("hostile"))
    try:
        assert service.ready(), "the service did not start"
        yield service
    finally:
        service.close()


@pytest.fixture
async def client(up: UpProcess) -> AsyncGenerator[ServerClient]:
    running = up.running()
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        yield client


@pytest.fixture
async def node(up: UpProcess) -> AsyncGenerator[NodeClient]:
    running = up.running()
    async with NodeClient(running["node_urls"][0], running["control_token"]) as node:
        yield node


async def run(
    client: ServerClient, command: str, files: dict[str, str] | None = None, **changes: Any
) -> tuple[SessionResult, str]:
    """Result of a task of one session with these files, and what its agent printed."""
    limits = changes.pop("limits", {})
    system_calls = changes.pop("system_calls", [])
    prepare = [{"type": "write", "path": path, "content": content} for path, content in (files or {}).items()]
    request = {
        "instruction": "behave",
        "max_attempts": 1,
        "runtime": {
            "backend": changes.pop("backend", "sandbox"),
            "prepare": prepare,
            "limits": limits,
            "system_calls_allow": system_calls,
        },
        "agent": {
            "harness": "shell",
            "settings": {"command": command},
            "env": changes.pop("env", {}),
            "allow_no_model_call": True,
        },
        **changes,
    }
    submitted = await client.submit(request)
    await client.wait(submitted.task_id, timeout_s=60)
    (result,) = await client.result(submitted.task_id)
    return result, result.artifacts.get("harness.stdout", b"").decode()


async def tried(client: ServerClient, attempts: list[tuple[str, str, str, Any]], **changes: Any) -> list[str]:
    """What came of each `(method, url, key, body)`; the key `own` is the session's, empty is none."""
    told = [dict(zip(("method", "url", "key", "body"), attempt, strict=True)) for attempt in attempts]
    files = {"caller.py": CALLER, "attempts.json": json.dumps(told)}
    result, printed = await run(client, "python3 caller.py", files, **changes)
    assert result.outcome == "completed", result.artifacts
    assert len(printed.split()) == len(attempts)
    return printed.split()


def routes_of_the_owner() -> list[tuple[str, str]]:
    """Method and path of every route of a node that asks for the control token."""
    nothing = cast(Any, None)
    parts = cast(Any, type("Parts", (), {"gate": None, "backends": None}))
    return [
        (route.method, route.path) for route in control_routes(parts, *([nothing] * 3)) if route.opened_by == "control"
    ]


async def test_no_control_route_opens_for_a_sessions_key(client: ServerClient, node: NodeClient) -> None:
    before = await node.gate()
    known = [(method, path.replace("{session}", "SESSION")) for method, path in routes_of_the_owner()]
    assert len(known) >= 10
    attempts = [(method, f"NODE{path}", key, {}) for method, path in known for key in ("own", "", "control-token")]
    statuses = await tried(client, attempts)
    assert set(statuses) <= {"401", "404"}, list(zip(attempts, statuses, strict=True))
    assert await node.gate() == before
    assert len(await node.backends()) == 1


async def test_control_routes_stay_closed_to_agents_where_no_token_is_set(tmp_path: Path) -> None:
    async with (
        scripted_server({"default": {"text": "as you wish"}}) as engine_url,
        serving(data_dir=tmp_path / "server", control_token=None) as server,
        running_node(tmp_path, engine_url, server_url=server.url, control_token=None) as node,
        ServerClient(server.url, None) as client,
    ):
        assert (await node.ask("GET", "/v1/backends", key=None))[0] == 200
        attempts = [(method, f"NODE{path}", "own", {}) for method, path in routes_of_the_owner()]
        assert set(await tried(client, attempts)) <= {"401", "404"}


async def test_the_server_and_other_ports_of_the_host_cannot_be_reached(up: UpProcess, client: ServerClient) -> None:
    running = up.running()
    port = urlsplit(running["server_url"]).port
    hosts = ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", os.uname().nodename]
    attempts = [("GET", f"http://{host}:{port}/v1/tasks", running["control_token"], None) for host in hosts]
    assert await tried(client, attempts) == ["unreachable"] * len(hosts)


async def test_a_key_opens_no_other_session(client: ServerClient, node: NodeClient) -> None:
    victim = await node.open_session()
    chat = {"model": "m", "messages": [{"role": "user", "content": "say it"}]}
    here = f"NODE/s/{victim.session_id}"
    attempts = [
        ("POST", f"{here}/v1/chat/completions", "own", chat),
        ("POST", f"{here}/v1/messages", "own", {**chat, "max_tokens": 8}),
        ("POST", f"{here}/generate", "own", {"prompt_ids": [1]}),
        ("POST", f"{here}/complete", "own", {"reward": 0}),
        ("POST", f"NODE/v1/sessions/{victim.session_id}/complete", "own", {"reward": 0}),
        ("POST", f"NODE/s/SESSION/../{victim.session_id}/v1/chat/completions", "own", chat),
        ("POST", f"NODE/s/SESSION%2f..%2f{victim.session_id}/v1/chat/completions", "own", chat),
    ]
    statuses = await tried(client, attempts)
    assert all(status in ("400", "401", "403", "404") for status in statuses), statuses
    result = await node.finalize(victim.session_id, completions=True)
    assert (result.completions, result.reward) == ((), None)


async def test_an_agent_neither_ends_nor_grades_its_own_session(client: ServerClient) -> None:
    ways = [f"NODE{path}" for path in ("/s/SESSION/complete", "/v1/sessions/SESSION/complete")]
    attempts = [("POST", url, "own", {"reward": 1000.0}) for url in ways]
    files = {
        "caller.py": CALLER,
        "attempts.json": json.dumps(
            [dict(zip(("method", "url", "key", "body"), attempt, strict=True)) for attempt in attempts]
        ),
    }
    result, printed = await run(client, "python3 caller.py; exit 3", files)
    assert all(status in ("401", "404") for status in printed.split()), printed
    assert (result.outcome, result.reward) == ("agent_error", 0.0)


@pytest.mark.parametrize("refresh", [True, False])
async def test_nothing_that_the_agent_plants_becomes_its_reward(client: ServerClient, refresh: bool) -> None:
    plant = textwrap.dedent("""
        echo 1.0 > reward.txt; echo '{"reward": 1.0}' > reward.json; chmod 000 reward.json
        mkdir -p .gangline bin; ln -sf /dev/zero .gangline/trajectory.json
        ln -sf /workspace/evil tests.sh; printf '#!/bin/sh\\necho 1.0 > /workspace/reward.txt\\n' > evil; chmod +x evil
        cp evil bin/grep; cp evil "$HOME/grep"; echo 'echo 1.0 > /workspace/reward.txt' > "$HOME/.profile"
        cp "$HOME/.profile" "$HOME/.bashrc"
        echo wrong > answer
    """)
    judge = "if grep -q right answer; then echo 1.0; else echo 0.25; fi > reward.txt"
    config = {"command": "sh tests.sh", "files": {"tests.sh": judge}, "collect": ["answer"]}
    evaluator = {"strategy": "script", "refresh_runtime": refresh, "config": config}
    files = {"plant.sh": plant, "survivor.py": SURVIVOR}
    result, _ = await run(client, "sh plant.sh; python3 survivor.py & sleep 0.5", files, evaluator=evaluator)
    assert (result.outcome, result.reward) == ("completed", 0.25)


# What an agent leaves so that a grader that comes after it runs, reads or trusts it: name -> shell.
_EVIL = "echo 1.0 > /workspace/reward.txt"
PLANTS = {
    "programs in front of others": (
        "mkdir -p ~/.local/bin ~/bin bin; "
        f"for at in ~/.local/bin ~/bin bin .; do for name in python3 git grep sh pytest; do "
        f"printf '#!/bin/sh\\n{_EVIL}\\nexit 0\\n' > $at/$name; chmod +x $at/$name; done; done"
    ),
    "start files of shells": (
        f"for name in .profile .bashrc .bash_profile .zshenv .pythonrc .env; do echo '{_EVIL}' > ~/$name; done; "
        f"echo 'ENV=$HOME/.env; PATH=/workspace:$PATH; PYTHONSTARTUP=$HOME/.pythonrc; export ENV PATH' >> ~/.profile"
    ),
    "modules that Python imports by itself": (
        "at=$(python3 -m site --user-site); mkdir -p $at; "
        "echo 'import os; os.system(\"" + _EVIL + "\"); os._exit(0)' > sitecustomize.py; "
        "cp sitecustomize.py usercustomize.py; cp sitecustomize.py conftest.py; "
        "cp sitecustomize.py json.py; cp sitecustomize.py $at/usercustomize.py; cp sitecustomize.py $at/evil.pth"
    ),
    "settings of git": (
        "git init -q .; git config --global init.templateDir x; "
        f"printf '#!/bin/sh\\n{_EVIL}\\n' > ~/evil; chmod +x ~/evil; git config --global core.fsmonitor ~/evil; "
        "git config --global core.hooksPath ~; cp ~/evil ~/post-checkout; "
        "git config --global filter.x.clean ~/evil; echo '* filter=x' > .gitattributes"
    ),
    "a pipe in place of the reward": "rm -f reward.txt; mkfifo reward.txt",
    "a device in place of the reward": "ln -sf /dev/zero reward.txt",
    "a socket in place of the reward": (
        "python3 -I -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"reward.txt\")'"
    ),
    "a huge reward of another time": (
        "truncate -s 8G reward.txt; touch -d 2199-01-01 reward.txt; echo 1.0 > reward.json"
    ),
    "the grader's own words": "echo reward: 1.0; echo '{\"reward\": 1.0}'; echo 1.0 >&2",
}
JUDGE = """
import json, os
assert os.path.dirname(json.__file__) != os.getcwd()
solved = "right" in open("answer").read()
open("reward.txt", "w").write(json.dumps(1.0 if solved else 0.25))
"""


@pytest.mark.parametrize("refresh", [True, False], ids=["clean", "own"])
@pytest.mark.parametrize("plant", PLANTS)
async def test_nothing_that_a_grader_starts_or_reads_is_the_agents(
    client: ServerClient, plant: str, refresh: bool
) -> None:
    command = "git --version > /dev/null; python3 -I judge.py"
    config = {"command": command, "files": {"judge.py": JUDGE}, "collect": ["answer"]}
    evaluator = {"strategy": "script", "refresh_runtime": refresh, "config": config}
    result, _ = await run(client, "echo wrong > answer; sh plant.sh", {"plant.sh": PLANTS[plant]}, evaluator=evaluator)
    assert (result.outcome, result.reward) == ("completed", 0.25), (result.failure, result.reward_details)


@pytest.mark.parametrize("plant", list(PLANTS)[:4])
def test_such_a_plant_takes_in_a_grader_that_shares_the_agents_home(tmp_path: Path, plant: str) -> None:
    shell = PLANTS[plant].replace("/workspace", str(tmp_path))
    env = {"HOME": str(tmp_path), "PATH": os.defpath}
    subprocess.run(["sh", "-c", shell], cwd=tmp_path, env=env, check=True)
    naive = ["sh", "-lc", "git status; python3 -c 'import json'"]
    env["PATH"] = f"{tmp_path}/.local/bin:{os.defpath}"
    subprocess.run(naive, cwd=tmp_path, env=env, capture_output=True, check=False)
    assert (tmp_path / "reward.txt").read_text() == "1.0\n"


@pytest.mark.parametrize("place", ["../../..", "/etc", "/proc/self", "/", "/usr/bin", "/workspace/../../etc"])
async def test_no_folder_of_a_task_lies_outside_its_sandbox(client: ServerClient, place: str) -> None:
    """Its working folder, its further folders, and the files that are prepared in them."""
    name = f"gangline-{uuid.uuid4().hex}"
    for changes in ({"workdir": place}, {"folders": [place]}):
        write = {"type": "write", "path": f"{place}/{name}", "content": "x"}
        request = {
            "instruction": "behave",
            "max_attempts": 1,
            "runtime": {**changes, "prepare": [write]},
            "agent": {"harness": "shell", "settings": {"command": f"touch {name} {place}/{name}"}},
        }
        try:
            submitted = await client.submit(request)
        except InvalidRequest:
            continue
        await client.wait(submitted.task_id, timeout_s=60)
        for folder in (place, "/etc", "/usr/bin", "/", "/tmp", str(Path.cwd())):
            assert not Path(folder, name).exists(), changes


@pytest.mark.parametrize(
    "changes",
    [
        {"runtime": {"backend": "os:system"}},
        {"runtime": {"backend": "../../runtimes"}},
        {"agent": {"harness": "subprocess:Popen"}},
        {"agent": {"harness": "gangline.testing.runtime_conformance"}},
        {"builder": {"strategy": "builtins:eval"}},
        {"evaluator": {"strategy": "file:///workspace/evil.py"}},
    ],
)
async def test_no_request_names_code_to_import(client: ServerClient, changes: dict[str, Any]) -> None:
    """Plug-ins are chosen by the names of what is installed; the node asks the same registry again."""
    with pytest.raises(UnknownPlugin):
        await client.submit(
            {"instruction": "x", "agent": {"harness": "shell", "settings": {"command": "true"}}, **changes}
        )


@pytest.mark.parametrize(
    "plant",
    ["ln -s {secret} answer", "ln {secret} answer", "mkfifo answer", "ln -s /dev/zero answer", "mkdir answer"],
)
async def test_no_file_of_the_host_comes_out_through_the_workspace(
    client: ServerClient, tmp_path: Path, plant: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    config = {"command": f"! grep -q '{SECRET}' answer && echo 0.5 > reward.txt", "collect": ["answer"]}
    evaluator = {"strategy": "script", "refresh_runtime": True, "config": config}
    result, _ = await run(client, plant.format(secret=secret) + "; true", evaluator=evaluator)
    assert (result.outcome, result.reward) == ("completed", 0.5)
    assert SECRET not in str(result.reward_details)


async def test_a_folder_swapped_for_a_link_leads_out_of_no_workspace(client: ServerClient, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text(SECRET)
    (tmp_path / "answer").chmod(0o666)
    judge = "grep -q planted sub/answer; echo $? > reward.txt"
    config = {"command": judge, "files": {"sub/answer": "planted"}, "collect": ["sub/answer"]}
    for refresh in (True, False):
        evaluator = {"strategy": "script", "refresh_runtime": refresh, "config": config}
        await run(client, f"rm -rf sub; ln -s {tmp_path} sub", evaluator=evaluator)
        assert (tmp_path / "answer").read_text() == SECRET


async def test_the_host_can_be_neither_read_nor_written_nor_mounted(up: UpProcess, client: ServerClient) -> None:
    places = [up.data, "/root", "/etc/shadow", "/proc/1/root/etc/shadow", "/sys/fs/cgroup"]
    tries = [f"ls {place}/control_token {place}/nodes 2>/dev/null" for place in places]
    tries += ["cat /etc/shadow", "cat /proc/1/root/etc/shadow", "cat /proc/1/environ | grep -a TOKEN"]
    tries += [f"sh -c 'echo x > {place}/gangline-was-here'" for place in ("/etc", "/usr", "/sys/fs/cgroup")]
    tries += ["mount -t tmpfs none /mnt", "chroot / true", "unshare -m true && mount -t proc p /mnt"]
    tries += ["mknod disk b 8 0", "sh -c 'echo 1 > /proc/sys/kernel/panic'", "nsenter -t 1 -m -n true", "su -c true"]
    command = "\n".join(
        f"if {one} 2>/dev/null </dev/null >&2; then echo did: {index}; fi" for index, one in enumerate(tries)
    )
    result, printed = await run(client, "sh tries.sh", {"tries.sh": command})
    assert result.outcome == "completed"
    assert printed == "", [tries[int(line.split()[1])] for line in printed.splitlines()]


async def test_no_secret_of_the_service_is_in_the_agents_environment(up: UpProcess, client: ServerClient) -> None:
    command = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"
    _, printed = await run(client, command)
    assert "OPENAI_API_KEY" in printed
    assert up.running()["control_token"] not in printed
    assert "GANGLINE_TOKEN" not in printed


async def test_forks_end_at_the_limit_and_others_go_on(client: ServerClient) -> None:
    limits = {"max_pids": MAX_PIDS}
    greedy, printed = await run(client, "python3 forker.py", {"forker.py": FORKER}, limits=limits)
    assert greedy.outcome == "completed"
    assert 0 < int(printed) < MAX_PIDS
    modest, printed = await run(client, "for i in 1 2 3; do sh -c 'echo hello'; done")
    assert (modest.outcome, printed.split()) == ("completed", ["hello"] * 3)


async def test_nothing_survives_the_budget(client: ServerClient) -> None:
    mark = uuid.uuid4().hex
    command = "python3 survivor.py & setsid setsid sleep 600 & nohup sleep 600 & sleep 600"
    result, _ = await run(client, command, {"survivor.py": SURVIVOR}, env={"MARK": mark}, timeout_seconds=2)
    assert (result.outcome, result.reward) == ("agent_timeout", 0.0)
    assert processes_with(mark) == {}


@pytest.mark.parametrize("system_calls", [[], ["keyring"]], ids=["usual", "both asked for keyrings"])
async def test_a_solution_passes_no_hidden_output_on_to_another_task(
    client: ServerClient, system_calls: list[str]
) -> None:
    """The thief's code runs in the clean grader, where it reads the answer; another task's agent looks for it."""
    thief = f"{KEYRING}\nkeep(open('expected').read())\n"
    judge = "import solution\nopen('reward.txt', 'w').write('0.5')\n"
    config = {
        "command": "python3 judge.py",
        "files": {"judge.py": judge, "expected": "4242"},
        "collect": ["solution.py"],
    }
    evaluator = {"strategy": "script", "refresh_runtime": True, "config": config}
    first, _ = await run(client, "true", {"solution.py": thief}, evaluator=evaluator, system_calls=system_calls)
    assert (first.outcome, first.reward) == ("completed", 0.5)
    files = {"keyring.py": f"{KEYRING}\nopen('answer', 'w').write(found())\nprint(found(), found(b'operators'))\n"}
    config = {"command": "grep -q 4242 answer && echo 1.0 > reward.txt || echo 0.0 > reward.txt", "collect": ["answer"]}
    evaluator = {"strategy": "script", "refresh_runtime": True, "config": config}
    second, printed = await run(client, "python3 keyring.py", files, evaluator=evaluator, system_calls=system_calls)
    assert (second.outcome, second.reward, printed) == ("completed", 0.0, "nothing nothing\n")


async def test_an_agent_that_fills_the_disk_fails_by_itself(client: ServerClient) -> None:
    fill = "for n in $(seq 64); do head -c 1M /dev/urandom > $n; done; echo kept > answer; sleep 600"
    config = {"command": "sleep 3; ls | grep -c . > /dev/null && echo 0.25 > reward.txt"}
    evaluator = {"strategy": "script", "config": config}
    result, _ = await run(client, fill, limits={"disk_bytes": 16 << 20}, evaluator=evaluator)
    assert result.failure is not None
    assert (result.outcome, result.failure.boundary, result.failure.code) == ("agent_error", "harness", "disk_limit")
    assert result.reward == 0.25
    assert result.limits["disk_bytes"] == "measured every few seconds"


def test_no_data_folder_is_seen_wherever_it_lies() -> None:
    """In one that everyone may read, in a folder of the host that every sandbox sees."""
    need(os.access("/opt", os.W_OK), "only root can put a data folder in /opt")
    folder = Path(tempfile.mkdtemp(prefix="gangline-", dir="/opt"))
    (folder / "planted").write_text(SECRET)
    folder.chmod(0o755)
    service = UpProcess(folder)
    try:
        assert service.ready(), "the service did not start"
        opened = (
            f"find {service.data} -type d -exec chmod 755 {{}} + ; find {service.data} -type f -exec chmod 644 {{}} +"
        )
        subprocess.run(["sh", "-c", opened], check=True)
        printed = asyncio.run(_seen_of(service))
    finally:
        service.close()
        shutil.rmtree(folder)
    assert printed == "0\n"


async def _seen_of(service: UpProcess) -> str:
    running = service.running()
    async with ServerClient(running["server_url"], running["control_token"]) as client:
        _, printed = await run(client, f"find {service.data} -mindepth 1 2>/dev/null | wc -l")
        return printed
