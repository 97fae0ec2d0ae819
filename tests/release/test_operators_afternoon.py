"""An afternoon of an operator by the commands of the guides alone: the wheel is installed, a service of the last schema
upgraded, tokens and quotas given to two groups, a node taken out, a service restored whose database was lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gangline.store.sql.schema import SCHEMA_VERSION
from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment, wait_for
from support.store.postgres import Cluster

TALK = """curl -sSf -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\
  -d '{"model": "m", "messages": [{"role": "user", "content": "hello"}]}' "$OPENAI_BASE_URL/chat/completions" """
ROOT = Path(__file__).parents[2]
OLD_TOKEN = "the-control-token"


class Guides:
    """The commands of the guides: of each page in its order, the last one as often as it is asked for."""

    def __init__(self) -> None:
        self._at = Counter[str]()

    def command(self, page: str, begins: str, places: Mapping[str, object] | None = None) -> str:
        """places: what a reader puts in the place of a name."""
        text = (ROOT / "docs" / "guides" / f"{page}.md").read_text()
        at = text.find(begins, self._at[page])
        assert at >= 0, f"{page}.md does not say `{begins}`, or not there"
        self._at[page] = at
        found = re.split("[`#\n]", text[at:], maxsplit=1)[0].strip()
        for name, value in (places or {}).items():
            assert name in found, found
            found = found.replace(name, str(value))
        return found


class Machine:
    """Where the operator works: a folder, and the programs that are installed there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in clean_environment().items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._environ = {**kept, "PATH": f"{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}"}

    def enter(self, environment: Path) -> None:
        self._environ["PATH"] = f"{environment / 'bin'}:{self._environ['PATH']}"

    def run(self, command: str | list[str], **environ: str) -> subprocess.CompletedProcess[str]:
        """A line for a shell, or the words of a command."""
        words = ["bash", "-euc", command] if isinstance(command, str) else command
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self._environ | environ,
            capture_output=True,
            text=True,
            timeout=GIVE_UP_S,
            check=False,
        )

    def do(self, command: str, **environ: str) -> str:
        """What it prints, and it succeeds."""
        done = self.run(command, **environ)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def serve(self, command: str, **environ: str) -> Serving:
        return Serving(
            subprocess.Popen(
                ["bash", "-euc", f"exec {command}"],
                cwd=self.folder,
                env=self._environ | environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )


class Serving:
    """A command that serves, and what it printed when it was ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self._first = process.stdout.readline()

    @property
    def url(self) -> str:
        assert self._first, self._process.communicate(timeout=GIVE_UP_S)[1]
        (url,) = [value for name, value in json.loads(self._first).items() if name.endswith("_url")]
        return url

    def outcome(self) -> int:
        """Its exit code, waiting for it."""
        self._process.communicate(timeout=GIVE_UP_S)
        return self._process.returncode

    def end(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self.outcome()
        finally:
            self._process.kill()


class Caller:
    """Someone with a token, who knows the server's URL and has no data of it."""

    def __init__(self, machine: Machine, url: str, token: str) -> None:
        self._machine = machine
        self.url = url
        self.token = token

    @property
    def environ(self) -> dict[str, str]:
        data = str(self._machine.folder / "nothing")
        return {"GANGLINE_TOKEN": self.token, "GANGLINE_SERVER": self.url, "GANGLINE_DATA": data}

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self._machine.run(["gangline", *map(str, words)], **self.environ)

    def told(self, command: str) -> Any:
        """The answer to a command of a guide."""
        return json.loads(self._machine.do(f"{command} --json", **self.environ))

    def ask(self, *words: object) -> Any:
        done = self.run(*words, "--json")
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def with_token(self, token: str) -> Caller:
        return Caller(self._machine, self.url, token)

    def may(self) -> bool:
        """Whether its token opens anything."""
        return self.run("status").returncode == 0

    def submit(self, task_id: str, command: str = TALK, *options: object) -> subprocess.CompletedProcess[str]:
        task = ("--task-id", task_id, "--instruction", "x", "--harness", "shell", "--command", command)
        return self.run("submit", *task, "--runtime", "process", "--allow-no-model-call", *options)

    def tasks(self) -> set[str]:
        return {one["task_id"] for one in self.ask("list", "tasks")["tasks"]}

    def nodes_of(self, task_id: str) -> set[str]:
        return {one["node_id"] for one in self.ask("list", "sessions", "--task", task_id)["sessions"]}


class Site:
    """What runs on the operator's machines."""

    def __init__(self, folder: Path, database: str, stack: ExitStack) -> None:
        self.folder = folder
        self.machine = Machine(folder)
        self.guides = Guides()
        self.database = database
        self._stack = stack
        (folder / "script.json").write_text('{"default": {"text": "as you wish"}}')
        engine = (*COMMAND, "engine", "--scripted", "script.json", "--tokenizer", "tiny", "--port", "0", "--json")
        self.engine = self.start(" ".join(engine))
        self.server = self.engine

    def start(self, command: str, **environ: str) -> Serving:
        serving = self.machine.serve(command, **environ)
        self._stack.callback(serving.end)
        return serving

    def start_server(self, port: int | None = 0) -> None:
        places = {"postgresql://gangline@db.example/gangline": self.database, "/shared/results": "site/results"}
        command = self.guides.command("storage", "gangline server --database", places)
        self.server = self.start(f"{command} --data site --port {port} --json")

    def start_node(self, name: str, token: str) -> Serving:
        places = {"http://server:8700": self.server.url, "http://gpu-1:8000": self.engine.url}
        command = self.guides.command("nodes", "gangline node --server", places)
        return self.start(f"{command} --id {name} --data {name} --port 0 --json", GANGLINE_TOKEN=token)

    def copy_database(self, name: str) -> None:
        places = {"postgresql://...": self.database, "copy.dump": name}
        self.machine.do(self.guides.command("operations", "pg_dump", places))

    def new_caller(self, admin: Caller, role: str, tenant: str = "default") -> Caller:
        places = {"submit": role, "vision": tenant}
        new = admin.told(self.guides.command("tenants", "gangline tokens create", places))
        return Caller(self.machine, admin.url, new["token"])

    def of_token(self, admin: Caller, do: str, token_id: str) -> Any:
        return admin.told(self.guides.command("tenants", f"gangline tokens {do}", {"TOKEN_ID": token_id}))

    def id_of(self, admin: Caller, **wanted: str) -> str:
        """Of the only token with these fields."""
        (found,) = [one for one in admin.ask("tokens", "list") if wanted.items() <= one.items()]
        return found["token_id"]


@contextmanager
def site_of(folder: Path, database: str) -> Generator[Site]:
    with ExitStack() as stack:
        yield Site(folder, database, stack)


def test_an_afternoon_of_an_operator(tmp_path: Path, wheel: Path, postgres: Cluster) -> None:
    with site_of(tmp_path, postgres.new_database()) as site:
        the_wheel_is_installed(site, wheel)
        admin = an_older_service_is_upgraded(site)
        ann, ben = (site.new_caller(admin, "submit", tenant) for tenant in ("vision", "speech"))
        keys = [site.new_caller(admin, "node") for _ in range(2)]
        n1 = site.start_node("node-1", keys[0].token)
        assert n1.url
        what_was_open_ends_after_the_upgrade(admin)
        each_tenant_sees_its_own_tasks_alone(ann, ben)
        tokens_are_rotated_and_revoked(site, admin, ann)
        quotas_hold(site, admin, ann, ben)
        a_node_is_taken_out(site, n1, keys, admin, ann)
        a_lost_database_is_restored(site, postgres, admin, ann, ben)


def the_wheel_is_installed(site: Site, wheel: Path) -> None:
    (site.folder / "dist").symlink_to(wheel.parent)
    steps = [site.guides.command("installation", begins) for begins in ("python3 -m venv", "pip install 'dist/")]
    site.machine.do("\n".join(steps))
    site.machine.enter(site.folder / ".venv")
    assert site.machine.do("command -v gangline").strip() == str(site.folder / ".venv" / "bin" / "gangline")


def an_older_service_is_upgraded(site: Site) -> Caller:
    """One that has ended a session, has one in its queue, and was cut off while it ran a third. Returns its admin."""
    (old,) = (ROOT / "tests" / "data" / "upgrade" / "postgresql").glob(f"{SCHEMA_VERSION - 1}-*.tar.xz")
    with tarfile.open(old) as files:
        files.extractall(site.folder, filter="data")
    site.machine.do(f"psql --quiet --set ON_ERROR_STOP=1 --file database.sql {site.database}")
    look = site.guides.command("operations", "gangline doctor --data", {"DATA": "site"})
    found = site.machine.run(f"{look} --json", GANGLINE_DATABASE=site.database).stdout
    (data_folder,) = [check for check in json.loads(found)["checks"] if check["name"] == "data folder"]
    assert data_folder["state"] != "missing", data_folder
    site.copy_database("before.dump")
    site.start_server()
    admin = Caller(site.machine, site.server.url, OLD_TOKEN)
    assert admin.tasks() == {"ended", "open", "queued"}
    assert "as you wish" in admin.run("show", "ended.0").stdout
    return admin


def what_was_open_ends_after_the_upgrade(admin: Caller) -> None:
    for task_id in ("open", "queued"):
        wait_for(lambda task_id=task_id: admin.ask("status", task_id)["status"] == "ended")
        (session,) = admin.ask("list", "sessions", "--task", task_id)["sessions"]
        assert (session["outcome"], session["node_id"]) == ("completed", "node-1")
        assert "as you wish" in admin.run("show", f"{task_id}.0").stdout


def each_tenant_sees_its_own_tasks_alone(ann: Caller, ben: Caller) -> None:
    for caller, task_id in ((ann, "images"), (ben, "sounds")):
        done = caller.submit(task_id, TALK, "--wait")
        assert done.returncode == 0, done.stderr
        assert caller.tasks() == {task_id}
        shown = caller.run("status")
        assert task_id in shown.stdout
        assert "gangline node" not in shown.stdout, "a tenant need not start a node"
    assert "images" not in ben.run("status").stdout
    for words in (("status", "images"), ("show", "images.0"), ("cancel", "images")):
        refused = ben.run(*words)
        assert refused.returncode != 0
        assert "images" in refused.stderr
    assert ann.submit("sounds").returncode != 0, "ids are of the whole server"


def quotas_hold(site: Site, admin: Caller, ann: Caller, ben: Caller) -> None:
    go = site.folder / "quotas"
    admin.told(
        site.guides.command("tenants", "gangline tenants set", {"max_running=200": "max_running=1 max_queued=3"})
    )
    assert ann.submit("held", f"until test -e {go}; do sleep 0.05; done", "--samples", 3).returncode == 0
    wait_for(lambda: "max_running" in ann.run("status").stdout)
    refused = ann.submit("more", TALK, "--samples", 2)
    assert refused.returncode != 0
    assert "max_queued" in refused.stderr
    assert ben.submit("beside", TALK, "--wait").returncode == 0, "another tenant goes ahead"
    (vision,) = ann.told(site.guides.command("tenants", "gangline tenants list"))
    assert (vision["name"], vision["num_running"], vision["num_queued"]) == ("vision", 1, 2)
    assert vision["sampled_tokens_today"] > 0
    assert {one["name"] for one in admin.ask("tenants", "list")} == {"default", "vision", "speech"}
    go.touch()
    admin.ask("tenants", "set", "vision", "max_running=", "max_queued=")
    assert ann.submit("held", f"until test -e {go}; do sleep 0.05; done", "--samples", 3, "--wait").returncode == 0
    command = site.guides.command("tenants", "gangline usage --by tenant")
    used = {one["name"]: one for one in admin.told(command)}
    assert {name: one["num_sessions"] for name, one in used.items()} == {"default": 3, "vision": 4, "speech": 2}
    assert all(one["cost"] > 0 for one in used.values())
    assert ann.told(command) == [used["vision"]], "a tenant sees its own"
    assert {one["name"] for one in admin.ask("usage", "--since", "2020-01-01")} == set(used)
    assert admin.ask("usage", "--until", "2020-01-01") == admin.ask("usage", "--since", "2100-01-01") == []


def tokens_are_rotated_and_revoked(site: Site, admin: Caller, ann: Caller) -> None:
    lent = site.new_caller(admin, "read", "vision")
    assert lent.may()
    token_id, old = site.id_of(admin, tenant="vision", role="submit"), ann.token
    ann.token = site.of_token(admin, "rotate", token_id)["token"]
    assert ann.may()
    assert ann.with_token(old).may(), "the old secret has an hour"
    older, ann.token = ann.token, admin.ask("tokens", "rotate", token_id)["token"]
    assert ann.may()
    assert not ann.with_token(older).may()
    site.of_token(admin, "revoke", site.id_of(admin, role="read"))
    refused = lent.run("status")
    assert refused.returncode == 6, refused.stderr


def a_node_is_taken_out(site: Site, node: Serving, keys: list[Caller], admin: Caller, ann: Caller) -> None:
    """Once another has come; its session ends first."""
    go = site.folder / "drain"
    assert ann.submit("last", f"until test -e {go}; do sleep 0.05; done").returncode == 0
    wait_for(lambda: ann.nodes_of("last") == {"node-1"})
    assert site.start_node("node-2", keys[1].token).url
    drain = site.guides.command("nodes", "gangline drain --node", {"http://node-7:8701": node.url})
    refused = site.machine.run(drain, **keys[1].environ)
    assert refused.returncode == 6, "a node answers to its own token alone"
    site.machine.do(drain, **keys[0].environ)
    go.touch()
    assert node.outcome() == 0
    assert [one["node_id"] for one in admin.ask("status")["status"]["nodes"]] == ["node-2"], "it has left"
    assert ann.submit("next", TALK, "--samples", 3, "--wait").returncode == 0
    assert ann.nodes_of("next") == {"node-2"}
    assert [one["outcome"] for one in ann.ask("list", "sessions", "--task", "last")["sessions"]] == ["completed"]


def a_lost_database_is_restored(site: Site, postgres: Cluster, admin: Caller, ann: Caller, ben: Caller) -> None:
    """And what else was on the server's machine."""
    site.copy_database("copy.dump")
    (site.folder / "copied").mkdir()
    places = {"DATA": "site", "RESULTS": "site/results", "COPY": "copied"}
    site.machine.do(site.guides.command("operations", "cp --archive", places))
    before, token_id = ann.tasks(), site.id_of(admin, tenant="speech")
    admin.ask("tokens", "revoke", token_id)
    assert ann.submit("late", TALK, "--wait").returncode == 0
    assert site.server.end() == 0
    port = urlsplit(site.server.url).port
    shutil.rmtree(site.folder / "site")
    shutil.copytree(site.folder / "copied", site.folder / "site")
    site.database = postgres.new_database()
    site.machine.do(site.guides.command("operations", "pg_restore", {"postgresql://...": site.database}))
    site.start_server(port)
    assert site.server.url == admin.url
    assert ann.tasks() == before
    assert ann.run("show", "images.0").returncode == 0, "results are there"
    assert "as you wish" in admin.run("show", "ended.0").stdout, "the oldest too"
    assert ann.submit("late", TALK, "--wait").returncode == 0
    assert ann.nodes_of("late") == {"node-2"}, "the node came back by itself"
    assert ben.tasks() == {"sounds", "beside"}, "his token is as it was"
    admin.ask("tokens", "revoke", token_id)
    assert not ben.may()
    (vision,) = ann.ask("tenants", "list")
    assert (vision["weight"], vision["max_tokens_per_day"]) == (2, 5e8)
