"""An agent of one tenant attacks a session of another that runs at the same time on the same node.

Every attack is also made where its wall is missing, by agents without isolation or with the right key, and succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import textwrap
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gangline.domain.errors import NotFound
from gangline.wire.client.server import ServerClient
from hostile.test_hostile_agent import routes_of_the_owner, run, tried
from support.requirements import need_command
from support.service.cli_process import UpProcess, processes_with

PREFIX = "secret-of-beta-"
ENDED_SECRET = PREFIX + secrets.token_hex(16)
"""In an ended task."""

# Holds its secret wherever a process can, answers with it at every kind of socket, and notes signals.
VICTIM = textwrap.dedent("""
    import os, pathlib, signal, socket, sys, threading, time
    mark, port, secret = sys.argv[1], int(sys.argv[2]), os.environ["BETAS_SECRET"]
    signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("signalled").write_text(secret))
    for path in ("secret.txt", f"/tmp/{mark}", f"/dev/shm/{mark}"):
        pathlib.Path(path).write_text(secret)
    def answer(family, address):
        listener = socket.socket(family)
        listener.bind(address)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(secret.encode())
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, "\\0" + mark), (socket.AF_UNIX, f"/tmp/{mark}.sock"),
    ):
        threading.Thread(target=answer, args=(family, address), daemon=True).start()
    pathlib.Path("ready").touch()
    while not os.path.exists("done"):
        time.sleep(0.1)
    for path in (f"/tmp/{mark}", f"/tmp/{mark}.sock", f"/dev/shm/{mark}"):
        os.remove(path)
""")

# Prints what each of its attacks found. It is told all but the secret and the keys: names, places, ids and ports.
ATTACKER = textwrap.dedent("""
    import contextlib, glob, json, os, re, signal, socket, time, urllib.request
    told = json.load(open("told.json"))
    mark = told["mark"]

    def content(path):
        with contextlib.suppress(OSError):
            with open(path, "rb") as file:
                return file.read(1 << 20).decode(errors="replace")
        return ""

    def said(family, address):
        with contextlib.suppress(OSError), socket.socket(family) as client:
            client.settimeout(5)
            client.connect(address)
            return client.recv(100).decode(errors="replace")
        return ""

    def others(name):
        return [content(path) for path in glob.glob(f"/proc/[0-9]*/{name}")]

    def reads_the_data_folder_of_the_node():
        return [content(os.path.join(at, name)) for at, _, names in os.walk(told["data"]) for name in names]

    def reads_the_results_on_the_server():
        folder = f"{told['data']}/server/results/{told['ended']}"
        return [content(path) for path in glob.glob(f"{folder}/**", recursive=True)]

    def reads_the_control_token():
        return ["reached"] if content(f"{told['data']}/control_token") else []

    def reads_the_workspace_through_proc():
        return others("cwd/secret.txt") + others("root/workspace/secret.txt")

    def reads_the_environment_of_others():
        return others("environ")

    def reads_shared_folders():
        folders = ("/tmp", "/var/tmp", "/dev/shm", "/run", os.environ.get("TMPDIR", "/tmp"))
        below = ("", "*/", "*/*/")  # all of a busy machine's /tmp would take minutes
        return [content(path) for at in folders for under in below for path in glob.glob(f"{at}/{under}{mark}")]

    def reads_folders_of_others_through_proc():
        return others(f"root/tmp/{mark}") + others(f"root/dev/shm/{mark}")

    def asks_an_abstract_socket():
        return [said(socket.AF_UNIX, "\\0" + mark)]

    def asks_a_socket_in_tmp():
        return [said(socket.AF_UNIX, f"/tmp/{mark}.sock")]

    def asks_a_loopback_port():
        hosts = ("127.0.0.1", "localhost", "0.0.0.0", os.uname().nodename)
        return [said(socket.AF_INET, (host, told["port"])) for host in hosts]

    def signals_it():
        pids = [path.split("/")[2] for path in glob.glob("/proc/[0-9]*/cmdline") if f"\\0{mark}\\0" in content(path)]
        for pid in {*map(int, pids), told["pid"]}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGUSR1)
        return []

    def calls_the_model_as_it():
        keys = {os.environ["OPENAI_API_KEY"], told["token"], told["session"], mark}
        for environ in others("environ"):
            keys |= set(re.findall(r"OPENAI_API_KEY=([^\\0]+)", environ))
        node = os.environ["OPENAI_BASE_URL"].split("/s/")[0]
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "as beta"}]}).encode()
        answers = []
        for key in keys:
            headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
            url = f"{node}/s/{told['session']}/v1/chat/completions"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10)
                answers.append("reached")
        return answers

    kinds = ("reads", "asks", "signals", "calls")
    attacks = [each for name, each in list(globals().items()) if name.split("_")[0] in kinds]
    found = {each.__name__: re.findall(r"secret-of-beta-[0-9a-f]+|reached", " ".join(each())) for each in attacks}
    print(json.dumps({name: sorted(set(one)) for name, one in found.items()}))
""")
ATTACKS = [line.split("(")[0][4:] for line in ATTACKER.splitlines() if line.startswith("def ") and "_" in line]


@dataclass
class Tenants:
    up: UpProcess
    alpha: ServerClient
    beta: ServerClient
    token: str
    """Of alpha."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Tenants]:
    need_command("bwrap", "apt-get install bubblewrap")
    up = UpProcess(tmp_path_factory.mktemp("tenants"))
    try:
        assert up.ready(), "the service did not start"
        running = up.running()
        url = running["server_url"]
        async with ServerClient(url, running["control_token"]) as admin:
            tokens = [(await admin.create_token(role="submit", tenant=tenant)).token for tenant in ("alpha", "beta")]
        async with ServerClient(url, tokens[0]) as alpha, ServerClient(url, tokens[1]) as beta:
            yield Tenants(up, alpha, beta, tokens[0])
    finally:
        up.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ended(tenants: Tenants) -> str:
    """An ended task of beta, with a model call from which it can be forked."""
    task = f"beta-{secrets.token_hex(8)}"
    told = {"task_id": task, "instruction": ENDED_SECRET, "agent": {"harness": "native"}, "max_attempts": 1}
    await tenants.beta.submit(told)
    await tenants.beta.wait(task, timeout_s=60)
    await tenants.beta.annotate(f"{task}.0", note=ENDED_SECRET)
    return task


@dataclass
class Victim:
    session_id: str
    mark: str
    port: int
    secret: str
    pid: int
    """On the host."""

    @property
    def workspace(self) -> Path:
        return Path(f"/proc/{self.pid}/cwd")

    @property
    def key(self) -> str:
        variables = Path(f"/proc/{self.pid}/environ").read_bytes().decode().split("\0")
        return next(one.partition("=")[2] for one in variables if one.startswith("OPENAI_API_KEY="))


@contextlib.asynccontextmanager
async def victim_of_beta(tenants: Tenants, runtime: str) -> AsyncGenerator[Victim]:
    """A session of beta that runs until the end of the block."""
    mark, secret = f"beta-{secrets.token_hex(8)}", PREFIX + secrets.token_hex(16)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = asyncio.create_task(
        run(
            tenants.beta,
            f"exec python3 victim.py {mark} {port}",
            {"victim.py": VICTIM},
            backend=runtime,
            env={"BETAS_SECRET": secret},
            task_id=mark,
        )
    )
    pid = await asyncio.wait_for(_ready(mark), 60)
    victim = Victim(f"{mark}.0", mark, port, secret, pid)
    try:
        yield victim
    finally:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it was cancelled
            (victim.workspace / "done").touch()
        await running


async def _ready(mark: str) -> int:
    while True:
        for pid, line in processes_with(mark).items():
            if line.startswith(f"python3 victim.py {mark} ") and Path(f"/proc/{pid}/cwd/ready").exists():
                return pid
        await asyncio.sleep(0.1)


async def found_by_alpha(
    tenants: Tenants, ended: str, runtime: str, victims: str
) -> tuple[Victim, dict[str, list[str]]]:
    """What each attack of alpha's agent found of beta's session."""
    async with victim_of_beta(tenants, victims) as victim:
        told = {
            "data": str(tenants.up.data),
            "ended": ended,
            "mark": victim.mark,
            "port": victim.port,
            "pid": victim.pid,
            "session": victim.session_id,
            "token": tenants.token,
        }
        files = {"attacker.py": ATTACKER, "told.json": json.dumps(told)}
        result, printed = await run(tenants.alpha, "python3 attacker.py", files, backend=runtime)
        assert result.outcome == "completed", result.artifacts
        found = json.loads(printed)
        found["signals_it"] += [path.read_text() for path in (victim.workspace / "signalled",) if path.exists()]
        return victim, found


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sandbox", "process"])
async def found_by_a_sandbox(tenants: Tenants, ended: str, request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Against a session in a sandbox too, and against one without isolation, whose processes are the host's."""
    return (await found_by_alpha(tenants, ended, "sandbox", request.param))[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found_without_walls(tenants: Tenants, ended: str) -> tuple[Victim, dict[str, list[str]]]:
    return await found_by_alpha(tenants, ended, "process", "process")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_sandbox_finds_nothing_of_another_tenant(attack: str, found_by_a_sandbox: dict[str, list[str]]) -> None:
    assert found_by_a_sandbox[attack] == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("attack", ATTACKS)
async def test_the_attack_succeeds_between_agents_without_isolation(
    attack: str, found_without_walls: tuple[Victim, dict[str, list[str]]]
) -> None:
    victim, found = found_without_walls
    assert set(found[attack]) & {victim.secret, ENDED_SECRET, "reached"}


@pytest.mark.asyncio(loop_scope="module")
async def test_no_key_of_a_tenant_opens_the_node_or_a_session_of_another(tenants: Tenants) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "as beta"}]}
    async with victim_of_beta(tenants, "sandbox") as victim:
        session, running = victim.session_id, tenants.up.running()
        control, node_url = running["control_token"], running["node_urls"][0]
        keys = ("own", "", tenants.token, session, victim.mark, "control-token", f"{control[:-1]}x")
        routes = [
            (method, f"{door}{path.replace('{session}', session)}", {})
            for door in ("NODE", node_url)
            for method, path in routes_of_the_owner()
        ]
        calls = [
            ("POST", f"NODE{at}/{way}", chat)
            for at in (f"/s/{session}", f"/s/SESSION/../{session}", f"/s/SESSION%2f..%2f{session}")
            for way in ("v1/chat/completions", "v1/messages", "generate", "complete")
        ]
        attempts = [(method, url, key, body) for method, url, body in [*routes, *calls] for key in keys]
        for runtime, others in (("sandbox", {"unreachable"}), ("process", set[str]())):
            statuses = await tried(tenants.alpha, attempts, backend=runtime)
            assert set(statuses) <= {"400", "401", "403", "404"} | others, list(zip(attempts, statuses, strict=True))
        right = [("GET", f"{node_url}/v1/backends", control, {}), (*calls[0][:2], victim.key, chat)]
        assert await tried(tenants.alpha, right, backend="process") == ["200", "200"]


async def of_events(client: ServerClient, task_id: str | None) -> str:
    """The events of all time of one task, or of all that the client may see."""
    events = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2):
            async for event in client.events(after=0, task_id=task_id):
                events.append(event)
    return str(events)


async def of_a_task_that_forks(client: ServerClient, task_id: str) -> str:
    view = await client.submit(
        {
            "instruction": "fork",
            "agent": {"harness": "native"},
            "fork": {"session_id": f"{task_id}.0", "attempt": 1, "turn": 1},
        }
    )
    return f"{view} of {task_id}"


READS: dict[str, Callable[[ServerClient, str], Awaitable[Any]]] = {
    "task": lambda client, task: client.task(task),
    "results": lambda client, task: client.result(task, partial=True),
    "references": lambda client, task: client.references(task, partial=True),
    "session": lambda client, task: client.session(f"{task}.0"),
    "result": lambda client, task: client.session_result(f"{task}.0"),
    "forks": lambda client, task: client.forks(f"{task}.0"),
    "events of the task": lambda client, task: of_events(client, task),
    "all events": lambda client, _: of_events(client, None),
    "all tasks": lambda client, _: client.tasks(),
    "all sessions": lambda client, _: client.sessions(),
    "all annotations": lambda client, _: client.annotations(),
}
CHANGES: dict[str, Callable[[ServerClient, str], Awaitable[Any]]] = {
    "annotate": lambda client, task: client.annotate(f"{task}.0", note="of another"),
    "regrade": lambda client, task: client.regrade(f"{task}.0"),
    "fork": lambda client, task: client.fork(f"{task}.0", 1, task_id=f"{task}-fork"),
    "submit a fork": of_a_task_that_forks,
    "cancel the session": lambda client, task: client.cancel_session(f"{task}.0"),
    "cancel the task": lambda client, task: client.cancel(task),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("way", [*READS, *CHANGES])
async def test_nothing_of_another_tenant_is_read_or_changed_over_http(way: str, tenants: Tenants, ended: str) -> None:
    ask = (READS | CHANGES)[way]
    try:
        seen = str(await ask(tenants.alpha, ended))
    except NotFound:
        pass
    else:
        assert way.startswith("all ")
        assert ended not in seen
    assert ended in str(await ask(tenants.beta, ended))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("way", ["cancel the session", "cancel the task"])
async def test_no_running_session_of_another_tenant_is_ended(way: str, tenants: Tenants) -> None:
    async with victim_of_beta(tenants, "sandbox") as victim:
        with pytest.raises(NotFound):
            await CHANGES[way](tenants.alpha, victim.mark)
        assert (await tenants.beta.session(victim.session_id)).state in ("leased", "running")
        await CHANGES[way](tenants.beta, victim.mark)
        await tenants.beta.wait(victim.mark, timeout_s=60)
        assert (await tenants.beta.session_result(victim.session_id)).outcome == "cancelled"


def environment_at(folder: Path, *, home: Path | None = None, link: Path | None = None) -> Path:
    """A folder that passes for a Python environment, whose installation is that around `home` or `link`."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    if link is None:
        (folder / "bin/python3").touch()
    else:
        (folder / "bin/python3").symlink_to(link / "bin/python3")
    if home is not None:
        (folder / "pyvenv.cfg").write_text(f"home = {home}/bin\n")
    return folder


NAMED: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "image": lambda found, _: {"image": str(found)},
    "python": lambda found, _: {"python": str(environment_at(found))},
    "the home of a python": lambda found, own: {"python": str(environment_at(own, home=found))},
    "the link of a python": lambda found, own: {"python": str(environment_at(own, link=environment_at(found)))},
    "mounts": lambda found, _: {"mounts": {"/found": str(found)}},
    "workdir": lambda found, _: {"workdir": str(found)},
    "folders": lambda found, _: {"folders": [str(found)]},
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("way", NAMED)
async def test_a_task_that_names_anothers_workspace_does_not_see_it(way: str, tenants: Tenants, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    async with victim_of_beta(tenants, "sandbox") as victim:
        mark = f"{victim.mark}.0.1.agent"
        (workspace,) = (path.parent for path in tenants.up.data.rglob("secret.txt") if mark in str(path))
        seen = await seen_by_alpha(tenants, NAMED[way](workspace, tmp_path / "own"), workspace)
    assert victim.secret not in seen


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("way", [way for way in NAMED if "python" in way])
async def test_a_task_sees_a_python_that_it_names_elsewhere(way: str, tenants: Tenants, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    found = tmp_path / "found"
    found.mkdir()
    (found / "secret.txt").write_text(PREFIX)
    assert PREFIX in await seen_by_alpha(tenants, NAMED[way](found, tmp_path / "own"), found)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_task_does_not_take_the_machine_for_its_image(tenants: Tenants) -> None:
    around = [str(folder) for folder in tenants.up.data.parents]
    assert around[-1] == "/"
    for image in (around[0], "/", "/tmp/.."):
        command = {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True}
        told = {"instruction": "look", "max_attempts": 1, "runtime": {"image": image}, "agent": command}
        submitted = await tenants.alpha.submit(told)
        await tenants.alpha.wait(submitted.task_id, timeout_s=60)
        (session,) = (await tenants.alpha.task(submitted.task_id)).sessions
        assert session.failure is not None
        assert "has a data folder in it" in session.failure.message


async def seen_by_alpha(tenants: Tenants, named: dict[str, Any], found: Path) -> str:
    command = f"cat {found}/secret.txt /secret.txt /found/secret.txt; true"
    submitted = await tenants.alpha.submit(
        {
            "instruction": "look",
            "max_attempts": 1,
            "runtime": named,
            "agent": {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True},
        }
    )
    await tenants.alpha.wait(submitted.task_id, timeout_s=60)
    (result,) = await tenants.alpha.result(submitted.task_id)
    return result.artifacts.get("harness.stdout", b"").decode()
