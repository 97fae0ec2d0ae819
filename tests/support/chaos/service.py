"""The service of a chaos run: engine, server and nodes, each a process that may be killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from gangline.node.node import reap
from gangline.sandbox.shared.leftovers import LABEL, marked
from gangline.store.journal.log import AttemptOpened, Journal
from support.chaos.faults import NODES, Fault
from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment, processes_with

__all__ = ["TOKEN", "ChaosService", "Harness", "Program", "harnesses", "kill_harness"]

TOKEN = "control-secret"
_SESSION = b"GANGLINE_SESSION_ID="
_SIZES = {"--run-slots": 6, "--ready-slots": 4, "--init-workers": 2, "--postrun-workers": 2}


def _lasting_port() -> int:
    """A free port that no outgoing connection is given, so that it is free again when its program comes back."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(lowest_given // 2, lowest_given)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Program:
    """`gangline engine`, `server` or `node`: one life after the other, on one port and one folder."""

    def __init__(self, name: str, *arguments: object, folder: Path) -> None:
        """name: `engine`, `server`, or `node-...`. Its log and temporary files are in `folder`."""
        self.name = name
        self.url = ""
        self.num_kills = 0
        self.log_path = folder / f"{name}.log"
        self._kind = name.partition("-")[0]
        self._arguments = [str(argument) for argument in arguments]
        self._temporary = folder / "tmp"
        self._port = _lasting_port()
        self._process: Process | None = None
        self._is_struck = False
        """Dead by a fault, and not started again yet."""
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Until it is ready."""
        await self._launch()
        assert await self._is_ready(), f"{self.name} did not start: {self.log_tail()}"

    async def _launch(self) -> None:
        self._temporary.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(*COMMAND, self._kind, *self._arguments, "--port", str(self._port), "--json"),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=log,
                env=clean_environment(GANGLINE_TOKEN=TOKEN, TMPDIR=str(self._temporary)),
            )

    async def _is_ready(self) -> bool:
        """False when it died before."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 2 * GIVE_UP_S)
        if not line:
            return False
        told = json.loads(line)
        assert f"{self._kind}_url" in told, f"{self.name} did not start: {told}"
        self.url = told[f"{self._kind}_url"]
        return True

    async def suffer(self, fault: Fault) -> None:
        """Be killed, lie dead for a while, live again; the next fault waits for that."""
        async with self._lock:
            self._is_struck = True
            await self._killed()
            await asyncio.sleep(fault.lasts_s)
            if fault.again_s is not None:
                await self._launch()
                await asyncio.sleep(fault.again_s)
                await self._killed()
            await self.start()
            self._is_struck = False

    async def die(self) -> None:
        """For good."""
        async with self._lock:
            await self._killed()

    async def _killed(self) -> None:
        assert self._process is not None
        self.assert_alive()
        self._process.kill()
        self.num_kills += 1
        await self._process.wait()

    def assert_lives(self) -> None:
        """Unless a fault has it dead."""
        if not self._is_struck:
            self.assert_alive()

    def assert_alive(self) -> None:
        assert self._process is not None
        code = self._process.returncode
        assert code is None, f"{self.name} ended by itself, exit code {code}: {self.log_tail()}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def end(self) -> int:
        """An orderly stop; its exit code."""
        process = self._process
        if process is None:
            return 0
        if process.returncode is None:
            process.terminate()
        return await asyncio.wait_for(process.wait(), GIVE_UP_S)

    def is_listening(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-3000:]


class ChaosService:
    def __init__(
        self,
        folder: Path,
        script: dict[str, Any],
        *,
        database_url: str | None = None,
        nodes: Sequence[str] = NODES,
        sizes: Mapping[str, int] = _SIZES,
    ) -> None:
        """database_url: None is SQLite in the data folder. sizes: options of every node."""
        self.data = folder / "data"
        self.owners: set[str] = set()
        """Labels of what the nodes start, as far as they have been seen."""
        self._temporary = folder / "tmp"
        script_path = folder / "script.json"
        script_path.write_text(json.dumps(script))
        scripted = ("--scripted", script_path, "--tokenizer", "tiny")
        self.engine = Program("engine", *scripted, folder=folder)
        database = () if database_url is None else ("--database", database_url)
        self.server = Program("server", "--data", self.data, *database, folder=folder)
        self._folder = folder
        self._nodes = nodes
        self._sizes = sizes
        self._num_lost = 0
        self.programs: dict[str, Program] = {"engine": self.engine, "server": self.server}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            await asyncio.gather(self.engine.start(), self.server.start())
            self.programs |= {name: self._node(name) for name in self._nodes}
            await asyncio.gather(*(self.programs[name].start() for name in self._nodes))
            yield
        finally:
            await self.stop()

    def _node(self, name: str) -> Program:
        where = ("--data", self.data, "--server", self.server.url, "--engine", self.engine.url)
        sizes = (text for option in self._sizes.items() for text in option)
        return Program(name, "--id", name, *where, *sizes, folder=self._folder)

    async def lose(self, node_id: str) -> None:
        """Take away a node with all that it started, and its disk. One of the next free number comes for it."""
        await self.programs.pop(node_id).die()
        await reap(self.data, node_id)
        await asyncio.to_thread(shutil.rmtree, self.data / "nodes" / node_id)
        self._num_lost += 1
        name = f"node-{len(self._nodes) + self._num_lost - 1}"
        self.programs[name] = self._node(name)
        await self.programs[name].start()

    async def stop(self) -> list[int]:
        """Nodes first, the engine last; their exit codes. Idempotent."""
        return [await self.programs[name].end() for name in reversed(self.programs)]

    def look(self) -> None:
        """Learn under which labels the nodes start processes; where there are sandboxes, that can be seen."""
        self.owners |= {mark.owner for _, mark in marked(self.data / "nodes")}

    async def leftovers(self, mark: str) -> dict[str, list[str]]:
        """What there is still of it once it has stopped, by kind; `mark` is in the environment of every harness."""
        nodes = self._folders()
        labels = [f"{LABEL}={owner}/" for owner in self.owners]
        alive = {pid: line for text in (mark, str(self._folder), *labels) for pid, line in processes_with(text).items()}
        return {
            "processes": [f"{pid} {line}" for pid, line in alive.items()],
            "ports": [program.name for program in self.programs.values() if program.is_listening()],
            **self.sandboxes(),
            "undelivered": self.undelivered(),
            "half-written": [str(path) for path in (self.data / "server" / "results" / ".incoming").iterdir()],
            "temporary": [str(path) for path in self._temporary.iterdir()],
            "unclosed": [str(opened) for node in nodes for opened in await _unclosed(node / "journal")],
            "sockets": [str(path) for path in self._folder.rglob("*") if path.is_socket()],
        }

    def undelivered(self) -> list[str]:
        """Results that nodes keep until the server has them."""
        return [str(path) for node in self._folders() for path in (node / "outgoing").glob("*.*")]

    def sandboxes(self) -> dict[str, list[str]]:
        """What there is of sandboxes but their processes, by kind."""
        return {
            "groups": [group for owner in self.owners for group in _groups(owner)],
            "mounts": [path for path in _mounts() if str(self._folder) in path],
            "sandboxes": [str(path) for node in self._folders() for path in (node / "runtimes").iterdir()],
        }

    def _folders(self) -> list[Path]:
        return [self.data / "nodes" / name for name in self._nodes]


async def _unclosed(folder: Path) -> list[AttemptOpened]:
    journal = await asyncio.to_thread(Journal.open, folder)
    try:
        return journal.unclosed()
    finally:
        await journal.close()


def _groups(owner: str) -> Iterator[str]:
    for folder, names, _files in os.walk("/sys/fs/cgroup"):
        yield from (f"{folder}/{name}" for name in names if f"@{owner}@" in name)


def _mounts() -> Iterator[str]:
    """Lines of the mount tables of all processes."""
    for table in Path("/proc").glob("[0-9]*/mountinfo"):
        with suppress(OSError):
            yield from table.read_text().splitlines()


class Harness(NamedTuple):
    """A running agent program."""

    session_id: str
    pid: int


def harnesses(mark: str) -> list[Harness]:
    """Those that run, by session; `mark` is in their environment."""
    found: list[Harness] = []
    for pid in processes_with(mark):
        with suppress(OSError):
            variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
            names = [text.removeprefix(_SESSION) for text in variables if text.startswith(_SESSION)]
            found += [Harness(name.decode(), pid) for name in names]
    return sorted(found)


def kill_harness(harness: Harness) -> bool:
    """`kill -9`. False when it had ended by itself."""
    try:
        descriptor = os.pidfd_open(harness.pid)
    except ProcessLookupError:
        return False
    try:
        if harness.session_id.encode() not in Path("/proc", str(harness.pid), "environ").read_bytes():
            return False  # another process has its number now
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        return False
    finally:
        os.close(descriptor)
    return True
