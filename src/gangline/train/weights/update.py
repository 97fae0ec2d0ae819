"""Pushes new weights to the engines of a running service, over HTTP and through a folder shared by trainer and engines.

Order, by cost: the weights are written first, while sampling continues. Then all gates close at once, calls in flight
end (`drain`) or are kept (`keep`), the engines pause and load, the gates receive the version, and everything resumes.
Each phase is timed.

Laws
- After any failure engines are resumed and gates reopened; if the trainer died, the gates' leases expire and reopen
  them.
- A token is recorded with the version of the weights that sampled it, or without a version. The known versions of an
  engine's weights are reported to its nodes also when an update fails.
- An incomplete update is an error that lists each engine's version; pushing again repairs it.

Weights are stored on the disk shared by trainer and engines: one folder per update, complete or absent.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from gangline.domain.errors import EngineError, EngineIncapable, InvalidRequest, WeightsNotLoaded
from gangline.machine.durable import making
from gangline.train.runs.records import UpdateProfile
from gangline.train.weights.fleet import Failed, Fleet, FleetEngine, Mode, Roster, open_fleet

_log = logging.getLogger("gangline.train")

Save = Callable[[Path], None]
"""Writes a Hugging Face folder of safetensors into an empty folder. Blocking; called in a thread."""

_NAME = re.compile(r"v\d+(\.\d+)?")


class WeightFolders:
    """keep_last: number of folders to keep when newer ones are written; at least 1."""

    def __init__(self, root: Path, keep_last: int) -> None:
        if keep_last < 1:
            raise ValueError("at least the last weights must be kept: engines read them.")
        self._root = root.resolve()
        self._keep_last = keep_last

    def write(self, save: Callable[[Path], None], version: int) -> Path:
        """A new folder with the files that `save` writes; writing the same version again does not change the first
        folder. Blocking.

        Raises: DiskFull; InvalidRequest if there are no safetensors: vLLM 0.32 accepts such a folder, and dies at its
            next call.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._free(version)
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with making(partial):
            partial.mkdir()
            save(partial)
            if not any(partial.glob("*.safetensors")):
                raise InvalidRequest(f"`save` wrote no *.safetensors into {partial}: engines load nothing else.")
        return partial.rename(path)

    def prune(self, reading: Collection[Path]) -> None:
        """Remove all folders except the newest, and those that an engine may still be `reading`. Blocking."""
        found = [path for path in self._root.iterdir() if _NAME.fullmatch(path.name)]
        found.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in found[: -self._keep_last]:
            if path not in reading:
                shutil.rmtree(path, ignore_errors=True)

    def _free(self, version: int) -> Path:
        names = itertools.chain([f"v{version}"], (f"v{version}.{number}" for number in itertools.count(2)))
        return next(path for name in names if not (path := self._root / name).exists())


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class LostEngine(msgspec.Struct, frozen=True):
    """An engine that does not have the expected weights."""

    url: str
    version: int | None
    """Version of its weights; None if unknown."""


class WeightUpdater(Protocol):
    """The operations that a trainer needs to update its policy's weights."""

    async def push(self, save: Save, version: int) -> UpdateProfile:
        """Serve the weights that `save` writes as policy version `version`.

        Raises: WeightsNotLoaded, which another push repairs; InvalidRequest if the version would decrease.
        """
        ...


class ServiceWeights:
    """Implements `WeightUpdater` for the engines of a service.

    folder: also accessible to the engines, under the same path or as `seen_as`. token: the control token of the nodes.
    mode: `drain` waits for calls in flight; `keep` pauses them, and their last tokens come from the new weights.
    lease_s: how long gates stay closed after the trainer died; renewed while loading takes longer. patience_s: time
    limit of draining. keep_last: number of weight folders to keep. lost_after_s: nodes without a heartbeat at the
    server for this long are skipped.
    """

    def __init__(
        self,
        service: Roster,
        folder: Path,
        *,
        token: str | None = None,
        mode: Mode = "drain",
        lease_s: float = 60.0,
        patience_s: float = 1800.0,
        keep_last: int = 2,
        lost_after_s: float = 60.0,
        seen_as: Path | None = None,
    ) -> None:
        self._service = service
        self._folders = WeightFolders(folder, keep_last)
        self._token = token
        self._mode: Mode = mode
        self._lease_s = lease_s
        self._patience_s = patience_s
        self._lost_after_s = lost_after_s
        self._seen_as = seen_as
        self._written: tuple[int, Path] | None = None
        """Version and folder of the last weights written."""
        self._reading: dict[str, Path] = {}
        """URL of an engine -> folder of a load request that never completed."""
        self._lock = asyncio.Lock()

    async def push(self, save: Save, version: int) -> UpdateProfile:
        """See `WeightUpdater`. Also raises the errors of `save`, and ServerUnavailable."""
        async with self._lock:
            began = time.monotonic()
            path = await self._write(save, version)
            transfer_s = time.monotonic() - began
            async with self._fleet() as fleet:
                return await self._change(fleet, path, version, transfer_s)

    async def lost(self, version: int) -> list[LostEngine]:
        """Engines without `version`, because they were restarted or added since. Unreachable engines are not listed:
        their node waits for them and checks their version when they return.

        The version is read from the engine. For an engine that does not report versions, its node knows whether it was
        down.

        Raises: ServerUnavailable; EngineUnavailable if no engine is healthy.
        """
        async with self._fleet() as fleet:
            return [LostEngine(engine.url, has) for engine, has in await _lost(fleet, version)]

    async def ensure(self, version: int, save: Save) -> UpdateProfile | None:
        """Load `version` into engines that lost it, and report it to nodes that do not know it; None if nothing was
        lost. Reuses weights of that version pushed by this object; otherwise `save` writes them. Raises: as `push`.
        """
        async with self._lock:
            async with self._fleet() as fleet:
                if await _to_mend(fleet, version) is None:
                    return None
            began = time.monotonic()
            known = self._written
            path = known[1] if known is not None and known[0] == version else await self._write(save, version)
            transfer_s = time.monotonic() - began
            async with self._fleet() as fleet:
                part = await _to_mend(fleet, version)
                return None if part is None else await self._change(part, path, version, transfer_s)

    async def latest_version(self) -> int | None:
        """The highest version that a node or an engine knows. A restarted trainer continues from it."""
        async with self._fleet() as fleet:
            reported = [await engine.version() for engine in fleet.engines]
        return max(
            (one for one in (*reported, *(node.version for node in fleet.nodes)) if one is not None), default=None
        )

    def _fleet(self) -> AbstractAsyncContextManager[Fleet]:
        return open_fleet(self._service, self._token, self._lost_after_s)

    async def _write(self, save: Save, version: int) -> Path:
        path = await asyncio.to_thread(self._folders.write, save, version)
        self._written = (version, path)
        return path

    async def _change(self, fleet: Fleet, path: Path, version: int, transfer_s: float) -> UpdateProfile:
        """Raises: WeightsNotLoaded, InvalidRequest, EngineIncapable, a node's error."""
        self._check(fleet, version)
        times = [time.monotonic()]
        done = asyncio.Event()
        renewing = asyncio.create_task(fleet.renew_leases(self._mode, self._lease_s, done))
        failed: list[Failed] = []
        try:
            for step in (self._close, self._drain, self._load):
                failed += [] if failed else await step(fleet, path, version)
                times.append(time.monotonic())
        finally:
            done.set()
            await renewing
            # Always runs, however far the update came, and also after cancellation.
            failed += [*await fleet.tell_version(version), *await fleet.open()]
        times.append(time.monotonic())
        if failed:
            raise _not_loaded(fleet, version, failed)
        pause_s, drain_s, load_s, resume_s = (after - before for before, after in itertools.pairwise(times))
        profile = UpdateProfile(
            version=version,
            transfer_s=transfer_s,
            pause_s=pause_s,
            drain_s=drain_s,
            load_s=load_s,
            resume_s=resume_s,
            total_s=transfer_s + times[-1] - times[0],
            num_engines=len(fleet.engines),
            num_nodes=len(fleet.nodes),
            num_bytes=await asyncio.to_thread(num_bytes, path),
            folder=str(path),
        )
        await asyncio.to_thread(self._folders.prune, set(self._reading.values()))
        await fleet.report(profile.phases)
        phases = ",".join(f"{phase}:{seconds:.3f}" for phase, seconds in profile.phases.items())
        _log.info(
            "weights.updated version=%d engines=%d took_s=%.3f phases_s=%s",
            *(version, len(fleet.engines), profile.total_s, phases),
        )
        return profile

    def _check(self, fleet: Fleet, version: int) -> None:
        """Raises: InvalidRequest, EngineIncapable, before anything is changed."""
        latest = max((node.version for node in fleet.nodes if node.version is not None), default=0)
        if version < latest:
            raise InvalidRequest(
                f"policy version {version} would go back: a node has {latest} already. Number on from "
                "`latest_version()`.",
                param="version",
            )
        others = [engine.url for engine in fleet.engines if not engine.weights.keeps_calls]
        if self._mode == "keep" and others:
            raise EngineIncapable(
                f"engine {others[0]} gives one version for a whole reply, so calls in flight cannot be kept over an "
                "update: use mode `drain`."
            )

    # The steps while the gates are closed. Each returns its failures.

    async def _close(self, fleet: Fleet, _path: Path, _version: int) -> list[Failed]:
        return await fleet.close_gates(self._mode, self._lease_s)

    async def _drain(self, fleet: Fleet, _path: Path, _version: int) -> list[Failed]:
        if self._mode == "keep":
            return []
        try:
            async with asyncio.timeout(self._patience_s):
                return await fleet.drain(self._lease_s)
        except TimeoutError:
            late = WeightsNotLoaded(
                f"calls in flight did not end within {self._patience_s:g} s: wait longer (`patience_s`), or use mode "
                "`keep`."
            )
            return [(node.name, late) for node in fleet.nodes if not node.gate.is_drained]

    async def _load(self, fleet: Fleet, path: Path, version: int) -> list[Failed]:
        self._reading |= {engine.url: path for engine in fleet.engines}
        seen = path if self._seen_as is None else self._seen_as / path.name
        failed = await fleet.load(str(seen), version)
        for engine in fleet.engines:
            if engine.has != "loading":
                del self._reading[engine.url]
        return failed


async def _lost(fleet: Fleet, version: int) -> list[tuple[FleetEngine, int | None]]:
    """The engines that lost `version`, each with its current version."""
    found = await asyncio.gather(*(_version_of(engine) for engine in fleet.engines))
    return [
        (engine, has) for engine, (answers, has) in zip(fleet.engines, found, strict=True) if answers and has != version
    ]


async def _version_of(engine: FleetEngine) -> tuple[bool, int | None]:
    """Whether it answers, and its version."""
    try:
        return True, await engine.version()
    except EngineError as error:
        _log.warning("weights.engine_silent url=%s error=%s", engine.url, error)
        return False, None


async def _to_mend(fleet: Fleet, version: int) -> Fleet | None:
    """Engines without the version and their nodes, and nodes that do not know it."""
    lost = [engine for engine, _ in await _lost(fleet, version)]
    unsure = [place.node for engine in fleet.engines for place in engine.places if not place.is_known]
    part = fleet.part(lost, [*unsure, *(node for node in fleet.nodes if node.version != version)])
    return part if part.nodes else None


def _not_loaded(fleet: Fleet, version: int, failed: list[Failed]) -> WeightsNotLoaded:
    reasons = "; ".join(f"{name}: {error.message}" for name, error in failed)
    new = ", ".join(engine.url for engine in fleet.engines if engine.has == "new")
    if not new:
        broken = ", ".join(engine.url for engine in fleet.engines if engine.has == "loading")
        state = f"nobody knows the weights of {broken}" if broken else "all engines keep the weights that they had"
    elif all(engine.has == "new" for engine in fleet.engines):
        state = "all engines have the new weights, and not all of the service continues with them"
    else:
        state = f"the weights are mixed: only {new} has the new ones"
    return WeightsNotLoaded(f"policy version {version} was not loaded everywhere; {state}. Push it again. {reasons}")
