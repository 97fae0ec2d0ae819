"""An afternoon of an operator, by the commands of the guides: one server for two groups, two nodes, tokens, quotas, a
node taken out, a back-up, and a restore after the database was lost."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment, gangline_here, wait_for
from support.store.postgres import Cluster

TALK = """curl -sSf -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \\
  -d '{"model": "m", "messages": [{"role": "user", "content": "hello"}]}' "$OPENAI_BASE_URL/chat/completions" """
OPERATIONS = Path(__file__).parents[2] / "docs" / "guides" / "operations.md"


class Serving:
    """A command that serves, and what it printed when it was ready."""

    def __init__(self, *words: object, **env: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, *map(str, words), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**env),
        )
        assert self._process.stdout is not None
        self._first = self._process.stdout.readline()

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
    """Someone with a token, who knows the server's URL and is on another machine."""

    def __init__(self, url: str, token: str, folder: Path) -> None:
        self.url = url
        self.token = token
        self.folder = folder

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        data = str(self.folder / "nothing")
        return gangline_here(
            *words, env={"GANGLINE_TOKEN": self.token, "GANGLINE_SERVER": self.url, "GANGLINE_DATA": data}
        )

    def ask(self, *words: object) -> Any:
        done = self.run(*words, "--json")
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def with_token(self, token: str) -> Caller:
        return Caller(self.url, token, self.folder)

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
        self.database = database
        self._stack = stack
        script = folder / "script.json"
        script.write_text('{"default": {"text": "as you wish"}}')
        self.engine = self.start("engine", "--scripted", script, "--tokenizer", "tiny", "--port", 0)
        self.server = self.start_server(0)

    def start(self, *words: object, **env: str) -> Serving:
        serving = Serving(*words, **env)
        self._stack.callback(serving.end)
        return serving

    def start_server(self, port: int | None) -> Serving:
        where = ("--data", self.folder / "data", "--database", self.database, "--results", self.folder / "results")
        return self.start("server", *where, "--port", port)

    def start_node(self, name: str, token: str) -> Serving:
        where = ("--server", self.server.url, "--engine", self.engine.url, "--data", self.folder / name)
        return self.start("node", "--id", name, *where, "--port", 0, GANGLINE_TOKEN=token)


@contextmanager
def site_of(folder: Path, database: str) -> Generator[Site]:
    with ExitStack() as stack:
        yield Site(folder, database, stack)


def words_of(program: str, url: str, copy: Path) -> list[str]:
    """The command that the guide prints, with this URL and file."""
    found = re.search(rf"{program} --[^`#\n]*", OPERATIONS.read_text())
    assert found is not None
    return found[0].replace("postgresql://...", url).replace("copy.dump", str(copy)).split()


def test_an_afternoon_of_an_operator(tmp_path: Path, postgres: Cluster) -> None:
    with site_of(tmp_path, postgres.new_database()) as site:
        admin = Caller(site.server.url, (tmp_path / "data" / "control_token").read_text(), tmp_path)
        ann, ben = (new_caller(admin, tmp_path, "submit", tenant) for tenant in ("vision", "speech"))
        keys = [new_caller(admin, tmp_path, "node") for _ in range(2)]
        n1 = site.start_node("n1", keys[0].token)
        assert n1.url
        each_tenant_sees_its_own_tasks_alone(ann, ben)
        quotas_hold(admin, ann, ben, tmp_path)
        tokens_are_rotated_and_revoked(admin, ann)
        a_node_is_taken_out(site, n1, keys, ann)
        a_lost_database_is_restored(site, postgres, admin, ann, ben)


def new_caller(admin: Caller, folder: Path, role: str, tenant: str = "default") -> Caller:
    words = ("--role", role, "--tenant", tenant, "--days", 90, "--note", f"a {role}'s")
    return Caller(admin.url, admin.ask("tokens", "create", *words)["token"], folder)


def id_of(admin: Caller, **wanted: str) -> str:
    """Of the only token with these fields."""
    (found,) = [one for one in admin.ask("tokens", "list") if wanted.items() <= one.items()]
    return found["token_id"]


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


def quotas_hold(admin: Caller, ann: Caller, ben: Caller, folder: Path) -> None:
    go = folder / "quotas"
    admin.ask("tenants", "set", "vision", "weight=2", "max_running=1", "max_queued=3", "max_tokens_per_day=5e8")
    assert ann.submit("held", f"until test -e {go}; do sleep 0.05; done", "--samples", 3).returncode == 0
    wait_for(lambda: "max_running" in ann.run("status").stdout)
    refused = ann.submit("more", TALK, "--samples", 2)
    assert refused.returncode != 0
    assert "max_queued" in refused.stderr
    assert ben.submit("beside", TALK, "--wait").returncode == 0, "another tenant goes ahead"
    (vision,) = ann.ask("tenants", "list")
    assert (vision["name"], vision["num_running"], vision["num_queued"]) == ("vision", 1, 2)
    assert vision["sampled_tokens_today"] > 0
    assert {one["name"] for one in admin.ask("tenants", "list")} == {"vision", "speech"}
    go.touch()
    admin.ask("tenants", "set", "vision", "max_running=", "max_queued=")
    assert ann.submit("held", f"until test -e {go}; do sleep 0.05; done", "--samples", 3, "--wait").returncode == 0


def tokens_are_rotated_and_revoked(admin: Caller, ann: Caller) -> None:
    token_id = id_of(admin, tenant="vision")
    old = ann.token
    ann.token = admin.ask("tokens", "rotate", token_id, "--grace", 3600)["token"]
    assert ann.may()
    assert ann.with_token(old).may(), "the old secret has an hour"
    older, ann.token = ann.token, admin.ask("tokens", "rotate", token_id)["token"]
    assert ann.may()
    assert not ann.with_token(older).may()
    lent = new_caller(admin, ann.folder, "read", "vision")
    assert lent.may()
    admin.ask("tokens", "revoke", id_of(admin, role="read"))
    refused = lent.run("status")
    assert refused.returncode == 6, refused.stderr


def a_node_is_taken_out(site: Site, node: Serving, keys: list[Caller], ann: Caller) -> None:
    """Once another has come; its session ends first."""
    go = site.folder / "drain"
    assert ann.submit("last", f"until test -e {go}; do sleep 0.05; done").returncode == 0
    wait_for(lambda: ann.nodes_of("last") == {"n1"})
    assert site.start_node("n2", keys[1].token).url
    refused = keys[1].run("drain", "--node", node.url)
    assert refused.returncode == 6, "a node answers to its own token alone"
    assert keys[0].run("drain", "--node", node.url).returncode == 0
    go.touch()
    assert node.outcome() == 0
    assert ann.submit("next", TALK, "--samples", 3, "--wait").returncode == 0
    assert ann.nodes_of("next") == {"n2"}
    assert [one["outcome"] for one in ann.ask("list", "sessions", "--task", "last")["sessions"]] == ["completed"]


def a_lost_database_is_restored(site: Site, postgres: Cluster, admin: Caller, ann: Caller, ben: Caller) -> None:
    """And what else was on the server's machine."""
    copy, results, data = site.folder / "copy.dump", site.folder / "results", site.folder / "data"
    subprocess.run(words_of("pg_dump", site.database, copy), check=True)
    shutil.copytree(results, site.folder / "copied")
    shutil.copy2(data / "control_token", site.folder)
    before, token_id = ann.tasks(), id_of(admin, tenant="speech")
    admin.ask("tokens", "revoke", token_id)
    assert ann.submit("late", TALK, "--wait").returncode == 0
    assert site.server.end() == 0
    port = urlsplit(site.server.url).port
    shutil.rmtree(results)
    shutil.rmtree(data)
    data.mkdir()
    shutil.copy2(site.folder / "control_token", data)
    shutil.copytree(site.folder / "copied", results)
    site.database = postgres.new_database()
    subprocess.run(words_of("pg_restore", site.database, copy), check=True)
    site.server = site.start_server(port)
    assert site.server.url == admin.url
    assert ann.tasks() == before
    assert ann.run("show", "images.0").returncode == 0, "results are there"
    assert ann.submit("late", TALK, "--wait").returncode == 0
    assert ann.nodes_of("late") == {"n2"}, "the node came back by itself"
    assert ben.tasks() == {"sounds", "beside"}, "his token is as it was"
    admin.ask("tokens", "revoke", token_id)
    assert not ben.may()
    (vision,) = ann.ask("tenants", "list")
    assert (vision["weight"], vision["max_tokens_per_day"]) == (2, 5e8)
