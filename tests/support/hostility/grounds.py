"""The place of the attacks: the sandbox that they share, its neighbour, and the secrets planted on the host."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import secrets
import signal
import subprocess
import sys
import unittest
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.domain.sandbox import Runtime, Sandbox
from gangline.testing.runtime_conformance.bench import Bench, promised, proxies
from support.hostility import kit, victim
from support.hostility.attack import Attack, Program, Verdict, program_source, verdicts_of

__all__ = ["Broken", "Grounds", "attacked_grounds"]

_PATIENCE_S = 60.0
_INSIDE_S = 20.0
_MAX_SWEEPS = 500
_LOOKS = 8
_VICTIM = Path(victim.__file__)
SECRET_VARIABLE = "GANGLINE_HOSTILITY_SECRET"


class Broken(Exception):
    """The attack itself failed, so that nothing is known."""


class Grounds:
    """Made by `attacked_grounds`."""

    def __init__(self, bench: Bench, folder: Path, attacks: Sequence[Attack]) -> None:
        self.bench = bench
        self.folder = folder
        """Private to this process; the runtime's own folders are elsewhere."""
        self.secret = secrets.token_hex(16)
        self.mark = f"hostile-{secrets.token_hex(8)}"
        """In the arguments of every process that an attack leaves behind."""
        self.host: dict[str, Any] = {}
        self.other: dict[str, Any] = {}
        """The facts that the victim on the host, and the one in the other sandbox, reported about themselves."""
        self.handle: Sandbox
        self.neighbour: Sandbox
        self._victim: subprocess.Popen[str] | None = None
        self.leaked = -1
        """A file of the node's with the secret, that it forgot to close before it started a command."""
        self._attacks = attacks
        self._verdicts: dict[str, Verdict] = {}

    # What attacks use.

    async def attacked(self, attack: Attack) -> Verdict:
        """Run one attack. Raises: unittest.SkipTest where the runtime says that it does not defend this."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                if attack.program is not None:
                    return await self._judged(attack)
                assert attack.run is not None
                evidence = await attack.run(self)
        except Broken as broken:
            return Verdict("broken", str(broken))
        except kit.Absent as absent:
            return Verdict("absent", str(absent))
        except TimeoutError:
            return Verdict("breached", f"the node was held up for {_PATIENCE_S:g} s")
        return Verdict("held") if evidence is None else Verdict("breached", evidence)

    async def run_inside(
        self,
        program: Program,
        handle: Sandbox | None = None,
        *,
        timeout_s: float = _INSIDE_S,
        **more: Any,
    ) -> str | None:
        """Evidence of a program that runs in the shared sandbox, or in that of `handle`."""
        handle = handle or self.handle
        name = program.__name__
        told = await self._run({name: (program, self._given(handle, **more))}, handle, timeout_s)
        verdict = told.get(name) or Verdict("broken", "the program said nothing")
        if verdict.outcome == "broken":
            raise Broken(verdict.told)
        if verdict.outcome == "absent":
            raise kit.Absent(verdict.told)
        return verdict.told if verdict.outcome == "breached" else None

    async def _judged(self, attack: Attack) -> Verdict:
        """The verdict on a program. All of one place run by one command, the first time that one is asked for."""
        if attack.name not in self._verdicts:
            handle = self.handle if attack.place == "shared" else await self._listed()
            programs = {
                each.name: (each.program, self._given(handle, victim=self._victim_of(each)))
                for each in self._attacks
                if each.program is not None and each.place == attack.place
            }
            self._verdicts |= await self._run(programs, handle, _PATIENCE_S)
        return self._verdicts[attack.name]

    async def _listed(self) -> Sandbox:
        """A sandbox with a network list, on which the victim is not. Raises: unittest.SkipTest."""
        try:
            handle = await self.bench.start(network="list", allow=(f"localhost:{self.host['tcp']}",))
        except InvalidRequest as error:
            raise unittest.SkipTest(f"does not apply: {error.message}") from error
        promised(handle, "network")
        return handle

    def _victim_of(self, attack: Attack) -> dict[str, Any]:
        return self.host if attack.victim == "host" else self.other

    def _given(self, handle: Sandbox, **more: Any) -> dict[str, Any]:
        places = {"proxy_url": handle.proxy_url, "workdir": handle.workdir, "home": handle.home}
        return {"secret": self.secret, "victim": self.host, "mark": self.mark, **places, **more}

    async def _run(
        self, programs: Mapping[str, tuple[Program, dict[str, Any]]], handle: Sandbox, timeout_s: float
    ) -> dict[str, Verdict]:
        source = program_source(programs)
        result = await handle.exec(["python3", "-I", "-B", "-"], stdin=source.encode(), timeout_s=timeout_s)
        verdicts = verdicts_of(result)
        if result.signal is not None and len(programs) == 1:
            return dict.fromkeys(programs, Verdict("held", f"everything was ended by signal {result.signal}"))
        if len(verdicts) < len(programs):
            missing = f"no verdict: {result}"
            return {name: verdicts.get(name, Verdict("broken", missing)) for name in programs}
        return verdicts

    @contextlib.asynccontextmanager
    async def sandbox(self, **spec: Any) -> AsyncGenerator[Sandbox]:
        """One more sandbox, for an attack that leaves nothing whole."""
        handle = await self.bench.start(**spec)
        try:
            yield handle
        finally:
            await handle.stop()

    def promised(self, handle: Sandbox, limit: str) -> str:
        """Raises: unittest.SkipTest when the runtime says that it does not enforce it."""
        return promised(handle, limit)

    async def ask_victim(self, line: str) -> bytes:
        """Query the victim on the host: `signals` returns the number that it received, `memory` the content of its
        memory."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.host["tcp"])
        writer.write(line.encode() + b"\n")
        try:
            return await reader.read()
        finally:
            writer.close()

    def survivors(self, mark: str | None = None) -> list[int]:
        """Processes of this machine that carry the mark: seen from outside, where no namespace hides any.

        By threads: a process whose first thread has ended shows no arguments itself, and a zombie none at all.
        """
        wanted = (mark or self.mark).encode()
        found: list[int] = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                tasks = os.listdir(f"/proc/{pid}/task")
                if any(wanted in Path(f"/proc/{pid}/task/{task}/cmdline").read_bytes() for task in tasks):
                    found.append(int(pid))
        return found

    async def outlived(self, mark: str) -> str | None:
        """Evidence of processes with that mark. Several looks: a process that keeps forking is hard to see."""
        try:
            for _ in range(_LOOKS):
                if left := await asyncio.to_thread(self.survivors, mark):
                    return f"processes {left} live on"
            return None
        finally:
            await asyncio.to_thread(self.end_survivors)

    def end_survivors(self, mark: str | None = None) -> None:
        """Stopped first, so that none can fork while we look for the next.

        One look may miss a process that keeps forking, which would then live on for ever: several find nothing.
        """
        num_empty = 0
        for _ in range(_MAX_SWEEPS):
            left = self.survivors(mark)
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            num_empty = 0 if left else num_empty + 1
            if num_empty == _LOOKS:
                return
        raise Broken(f"processes {self.survivors(mark)} could not be ended")

    # How it is made.

    async def open(self) -> None:
        os.environ[SECRET_VARIABLE] = self.secret
        self.host = await asyncio.to_thread(self._start_victim)
        self.leaked = os.open(self.folder / self.host["name"] / "secret", os.O_RDONLY)
        os.set_inheritable(self.leaked, True)
        self.host["keys"] = kit.planted_keys(self.host["name"], self.secret)
        self.handle = await self.bench.start()
        if self.bench.isolated:
            self.neighbour = await self.bench.start()
            await self._start_neighbour()

    def _start_victim(self) -> dict[str, Any]:
        env = {**os.environ, SECRET_VARIABLE: self.secret}
        self._victim = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_VICTIM), self.secret],
            cwd=self.folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._victim.stdout is not None
        return {"secret": self.secret, **json.loads(self._victim.stdout.readline())}

    async def _start_neighbour(self) -> None:
        secret = secrets.token_hex(16)
        await self.neighbour.upload("victim.py", inspect.getsource(victim).encode())
        await self.neighbour.upload("plant.py", f"{inspect.getsource(kit)}\n{_PLANT}".encode())
        command = (
            f"mkfifo hold; python3 -c 'import time; time.sleep(3000)' {secret} > hold 2> errors < /dev/null & "
            f"{SECRET_VARIABLE}={secret} setsid python3 -B plant.py {secret} > told 2> errors < hold & "
            "until grep -q pid told; do sleep 0.02; kill -0 $! || exit 3; done"
        )
        result = await self.neighbour.exec(command, timeout_s=_INSIDE_S)
        assert result.ok, f"the other sandbox's victim did not start: {result}"
        lines = (await self.neighbour.download("told")).splitlines()
        self.other = {"secret": secret, "keys": json.loads(lines[0]), **json.loads(lines[1])}

    async def close(self) -> None:
        os.environ.pop(SECRET_VARIABLE, None)
        if self._victim is not None:
            await asyncio.to_thread(self._victim.communicate)
            os.close(self.leaked)
            kit.remove_keys(self.host["keys"])
        self.end_survivors()
        await self.bench.stop_all()
        if self.other:  # a runtime that leaves it behind has been told so by the attacks
            await asyncio.to_thread(self.end_survivors, self.other["secret"])


_PLANT = """
import victim
print(json.dumps(planted_keys(f"gangline-{sys.argv[1][:12]}", sys.argv[1], for_everyone=True)), flush=True)
victim.main(sys.argv[1])
"""


@contextlib.asynccontextmanager
async def attacked_grounds(
    runtime: Runtime, root: Path, attacks: Sequence[Attack], *, isolated: bool = True, image: str | None = None
) -> AsyncGenerator[Grounds]:
    """Plant the targets, and start the sandboxes. `root`: an empty folder that only this user may enter."""
    folder, sandboxes = root / "host", root / "sandboxes"
    folder.mkdir(mode=0o700)
    sandboxes.mkdir()
    async with proxies() as proxy:
        grounds = Grounds(Bench(runtime, sandboxes, proxy, isolated=isolated, image=image), folder, attacks)
        try:
            await grounds.open()
            yield grounds
        finally:
            await grounds.close()
