"""The engines of the policy or of one role, added, removed and cleared while sessions run. Each session sticks to one.

Laws
- A session is assigned once, to the backend with the fewest sessions, backends on this machine first. It keeps that
  backend so that its prefix stays cached. It moves only when the backend dies or is removed, and the move is recorded.
- All backends serve one model with one tokenizer: a different one is refused when added, and a backend that recovers
  with a different one stays out.
- A backend is dead when a health check says so, not when a call fails: one bad request must not empty the pool.
- Setting a policy version applies it to the backends that are healthy then. A backend that is added or recovers later
  has the weights it was started with: its replies say so (`weights_known`) until a version is set again.
- With an `Admission`, sessions are assigned by it instead, and calls of those without a place wait.
- Without a healthy backend calls wait for a bounded time, so that an engine can be restarted under a running session.

Source: "ProRL Agent" (arXiv 2603.18815), 3.4 (an engine runs on this machine if all addresses behind its URL do) and
3.3.2 (least assigned first, on this machine first).
"""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from itertools import count
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from gangline.domain.errors import EngineError, EngineUnavailable, GanglineError, NotFound
from gangline.domain.node_views import BackendState, BackendView, PlacesView
from gangline.models.engines.contract import Engine, EngineCapabilities
from gangline.node.backends.admission import Admission
from gangline.node.backends.clients import EngineClients, Identity, refuse_difference
from gangline.node.backends.engine import Assignment, Backend, BackendSpec, PooledEngine, Rank, Slots
from gangline.node.backends.gate import GateMeter
from gangline.node.backends.health import HealthChecks
from gangline.node.backends.places import Places
from gangline.settings.machine import read_secret

log = logging.getLogger("gangline.backends")

_PAGE_EVERY_S = 14.0
"""An engine's metrics page takes it some milliseconds, for each node that reads it."""


class LeastAssigned:
    """Keys ordered by number of assignments, in a min-heap whose entries are renewed, not moved.

    An update costs O(log n). Outdated entries are dropped when they reach the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, str]] = []
        self._ranks: dict[str, Rank] = {}

    def put(self, key: str, rank: Rank) -> None:
        """Insert, or renew."""
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def drop(self, key: str) -> None:
        self._ranks.pop(key, None)

    def least(self) -> str | None:
        """None when empty."""
        while self._heap:
            rank, key = self._heap[0]
            if self._ranks.get(key) == rank:
                return key
            heapq.heappop(self._heap)
        return None


class Placement:
    """Chooses among the backends that were `offered`, and counts the sessions of each."""

    def __init__(self, backends: Mapping[str, Backend], *, affinity_slack: int) -> None:
        """`backends`: the pool's, by id. For the other arguments see `BackendPool`."""
        self._backends = backends
        self._affinity_slack = affinity_slack
        self._near, self._far = LeastAssigned(), LeastAssigned()
        self._of_task: dict[str, Counter[str]] = {}
        """task id -> backend id -> sessions"""

    def offer(self, backend: Backend) -> None:
        """Make the backend available. Idempotent, like `withdraw`."""
        self._heap(backend).put(backend.backend_id, backend.rank)

    def withdraw(self, backend: Backend) -> None:
        self._heap(backend).drop(backend.backend_id)

    def settle(self, assignment: Assignment) -> Backend | None:
        """Returns the session's backend, or another one if that is not healthy; None when there is none."""
        held = assignment.backend
        if held is not None and held.state == "healthy":
            return held
        chosen = self._choose(assignment.task_id)
        if chosen is not None:
            if held is not None:
                _note_move(assignment, held, chosen)
            self.leave(assignment)
            self._join(assignment, chosen)
        return chosen

    def place(self, assignment: Assignment, backend: Backend) -> None:
        """Assign the session to this backend."""
        if (held := assignment.backend) is not backend:
            if held is not None:
                assignment.moves.append({"from": held.url, "to": backend.url, "why": "its place"})
            self.leave(assignment)
            self._join(assignment, backend)

    def leave(self, assignment: Assignment) -> None:
        backend, assignment.backend = assignment.backend, None
        if backend is None:
            return
        backend.num_sessions -= 1
        mates = self._of_task[assignment.task_id]
        mates[backend.backend_id] -= 1
        if not +mates:
            del self._of_task[assignment.task_id]
        if backend.state == "healthy":
            self.offer(backend)

    def _join(self, assignment: Assignment, backend: Backend) -> None:
        assignment.backend = backend
        backend.num_sessions += 1
        backend.num_assigned += 1
        self._of_task.setdefault(assignment.task_id, Counter())[backend.backend_id] += 1
        self.offer(backend)

    def _choose(self, task_id: str) -> Backend | None:
        key = self._near.least() or self._far.least()
        if key is None:
            return None
        least = self._backends[key]
        mates = [self._backends[mate] for mate in self._of_task.get(task_id, ()) if mate in self._backends]
        mates = [mate for mate in mates if mate.state == "healthy" and self._heap(mate) is self._heap(least)]
        best = min(mates, key=lambda mate: mate.rank, default=least)
        return best if best.num_sessions - least.num_sessions < self._affinity_slack else least

    def _heap(self, backend: Backend) -> LeastAssigned:
        return self._near if backend.is_near else self._far


def _note_move(assignment: Assignment, old: Backend, new: Backend) -> None:
    why = "removed" if old.state == "draining" else old.error or "unhealthy"
    assignment.moves.append({"from": old.url, "to": new.url, "why": why})
    log.warning("backend.replaced session=%s from=%s to=%s why=%s", assignment.session_id, old.url, new.url, why)


def is_on_this_machine(url: str) -> bool:
    """Whether all addresses of the URL's host belong to this machine. Blocking; False for a name that does not
    resolve."""
    host = urlsplit(url).hostname
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM) if host else []
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(_is_own(family, str(address[0])) for family, _, _, _, address in found)


def _is_own(family: int, address: str) -> bool:
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((address, 9))
        except OSError:
            return False
        # Packets to the kernel's own address have that address as source; packets to any other have a different one.
        return probe.getsockname()[0] == address


class BackendPool:
    """Long because it has everything that places a call: health, roles, sessions, and places in caches."""

    def __init__(
        self,
        probe_interval_s: float = 5.0,
        clock: Callable[[], float] = time.time,
        *,
        role: str | None = None,
        numbers: Iterator[int] | None = None,
        node: str | None = None,
        affinity_slack: int = 0,
        admission: Admission | None = None,
        wait_s: float = 60.0,
        check_timeout_s: float = 5.0,
        probe_timeout_s: float = 120.0,
        max_failures: int = 3,
        capture: Literal["ids", "text"] = "ids",
        is_traced: bool = False,
        read_secret: Callable[[str], str] = read_secret,
    ) -> None:
        """role: the role whose calls it answers; None: the policy's. numbers: of backends; None counts from 1.
        node: backends with this label, and unlabelled ones on this machine, are chosen before all others.
        affinity_slack: a session prefers a backend that already has a session of its task, as long as that has fewer
        than this many sessions more than the least loaded one; 0: never.
        admission: decides which sessions may call, and where; None: all, and `Placement` decides where.
        wait_s: for a healthy backend. max_failures: consecutive failed checks until a backend is unhealthy; one is
        enough when a call failed too. capture: `text` accepts servers that report no token ids.
        is_traced: see `PooledEngine`.
        read_secret: reads a key by the name of its environment variable; raises InvalidRequest.
        """
        self._clock = clock
        self._wait_s = wait_s
        self._is_traced = is_traced
        self._check_timeout_s = check_timeout_s
        self._backends: dict[str, Backend] = {}
        self._clients = EngineClients(capture=capture, read_secret=read_secret, probe_timeout_s=probe_timeout_s)
        self._health = HealthChecks(
            self._backends,
            self._clients,
            self._set_state,
            self._read_page,
            every_s=probe_interval_s,
            timeout_s=check_timeout_s,
            max_failures=max_failures,
            clock=clock,
        )
        self._role = role
        self._numbers = count(1) if numbers is None else numbers
        self._placement = Placement(self._backends, affinity_slack=affinity_slack)
        self._places = None if admission is None else Places(admission, self._backends, self._placement.place)
        self._node = node
        self._assignments: dict[str, Assignment] = {}
        self._usable = asyncio.Event()
        """Set while a backend is healthy, and permanently once closed."""
        self._closed = False
        self._letting_go: asyncio.Task[None] | None = None
        self._is_version_set = False

    # -- the operator's side -------------------------------------------------------------------------------------

    async def add(
        self,
        url: str,
        kind: str = "auto",
        label: str | None = None,
        api_key_env: str | None = None,
        options: Mapping[str, Any] | None = None,
        capture: Literal["ids", "text"] | None = None,
    ) -> BackendView:
        """Probe the engine at `url` and add it. An engine that was added before is left as it is.

        `api_key_env`: the environment variable with the engine's key.
        `options`: see `make_engine`. `capture`: see `BackendSpec`.

        Raises: EngineUnavailable, EngineIncapable; UnknownPlugin; InvalidRequest when the key is missing or the option
        is unknown; Conflict when it differs from the others in model, tokenizer or kind of log-probs.
        """
        if self._closed:
            raise EngineUnavailable("the node is stopping")
        spec = BackendSpec(_base(url), kind, label, api_key_env, dict(options or {}), self._role, capture)
        engine = await self._clients.make(url, spec)
        try:
            capabilities, identity = await self._clients.probe(engine, url, anew=False)
            is_near = label == self._node if label else await asyncio.to_thread(is_on_this_machine, spec.url)
            cache = None
            if self._places is not None and self._places.are_needed:
                with suppress(EngineError):
                    cache, _ = await self._clients.page(spec)
            if (known := self._known(url)) is None:
                for other in self.staying():
                    refuse_difference(url, identity, other.identity, f"as {other.url} has it")
                added = self._take_in(spec, engine, capabilities, identity, is_near)
                if self._places is not None:
                    self._places.read(added, cache)
                return self._view(added)
        except BaseException:
            await engine.close()
            raise
        await engine.close()
        return self._view(known)

    async def _read_page(self, backend: Backend) -> None:
        is_due = backend.has_page and self._clock() - backend.page_read_at >= _PAGE_EVERY_S
        if not (is_due or (self._places is not None and (backend.has_page or self._places.are_needed))):
            return
        with suppress(GanglineError):
            cache, load = await self._clients.page(backend.spec)
            if self._places is not None:
                self._places.read(backend, cache)
            if load is not None and is_due:
                backend.speed.read(load)
                backend.page_read_at = self._clock()
            backend.has_page = load is not None

    async def remove(self, backend_id: str, drain: bool = True) -> None:
        """Remove the backend. Its sessions move at their next call. `drain` waits for calls in flight; otherwise they
        fail over.

        Raises: NotFound.
        """
        backend = self._backends.get(backend_id)
        if backend is None:
            raise NotFound(f"no backend {backend_id!r}. Known: {', '.join(self._backends) or 'none'}.")
        await self._take_out(backend, drain)

    async def _take_out(self, backend: Backend, drain: bool) -> None:
        """Idempotent: two callers may remove the same backend."""
        self._set_state(backend, "draining", None)
        if drain and backend.num_calls:
            await backend.idle.wait()
        if self._backends.pop(backend.backend_id, None) is not None:
            await backend.engine.close()
            log.info("backend.removed backend=%s url=%s", backend.backend_id, backend.url)

    async def clear(self, drain: bool = True) -> None:
        """Remove all backends, for instance to serve other weights elsewhere. Engines added next may serve another
        model."""
        async with asyncio.TaskGroup() as group:
            for backend in list(self._backends.values()):
                group.create_task(self._take_out(backend, drain))

    def has(self, url: str) -> bool:
        """Whether the engine at `url` is in the pool and not draining."""
        return self._known(url) is not None

    def views(self) -> list[BackendView]:
        return [self._view(backend) for backend in self._backends.values()]

    def _view(self, backend: Backend) -> BackendView:
        view = backend.view()
        return view if self._places is None else msgspec.structs.replace(view, cache=self._places.view_of(backend))

    def members(self) -> list[BackendSpec]:
        """Specs of all backends that are not draining, as the operator gave them."""
        return [backend.spec for backend in self.staying()]

    # -- the trainer's side --------------------------------------------------------------------------------------

    def version_set(self, unknown: Collection[str] = ()) -> None:
        """Record that all healthy backends now have the gate's policy version, except those at the URLs `unknown`,
        whose weights are unknown."""
        self._is_version_set = True
        urls = {_base(url) for url in unknown}
        for backend in self._backends.values():
            backend.weights_known = backend.state == "healthy" and backend.url not in urls

    def lease_expired(self) -> None:
        """Resume the engines that a trainer had paused before it died or was cut off. Their weights are unknown."""
        self.version_set(unknown=[backend.url for backend in self._backends.values()])
        self._letting_go = asyncio.create_task(self._let_all_go())

    async def _let_all_go(self) -> None:
        backends = list(self._backends.values())
        await asyncio.gather(*(self._clients.let_go(backend, self._check_timeout_s) for backend in backends))

    async def check(self) -> None:
        """Run one round of health checks; the pool runs one every `probe_interval_s`."""
        await self._health.round()

    async def close(self) -> None:
        """Close the pool. Calls that wait or are in flight fail. Idempotent."""
        self._closed = True
        self._usable.set()
        if self._places is not None:
            self._places.close()
        await self._health.stop()
        if self._letting_go is not None:
            self._letting_go.cancel()
            await asyncio.wait({self._letting_go})
        await self.clear(drain=False)

    # -- the sessions' side --------------------------------------------------------------------------------------

    @property
    def places(self) -> PlacesView | None:
        return None if self._places is None else self._places.view()

    def turn(self, assignment: Assignment, meter: GateMeter) -> AbstractAsyncContextManager[None]:
        """Wait until the session may call a backend; for the duration of a call."""
        return nullcontext() if self._places is None else self._places.turn(assignment, meter)

    def engine_for(self, session_id: str, task_id: str, slots: Slots | None = None) -> Engine:
        """Returns an engine that follows the session's backend through moves. The backend is assigned at the first
        call.

        slots: each call holds one while in flight.
        """
        assignment = self._assignments.setdefault(session_id, Assignment(session_id, task_id))
        return PooledEngine(self, assignment, slots, is_traced=self._is_traced)

    def release(self, session_id: str) -> None:
        """End the session's assignment. Idempotent."""
        assignment = self._assignments.pop(session_id, None)
        if assignment is not None:
            assignment.is_over = True
            self._placement.leave(assignment)
            if self._places is not None:
                self._places.release(session_id)

    async def backend_of(self, assignment: Assignment) -> Backend:
        """Returns the session's backend, or another one when that is dead or removed.

        Raises: EngineUnavailable, naming the backends, when none is healthy within `wait_s`.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                while (backend := self._settle(assignment)) is None:
                    await self._usable.wait()
        except TimeoutError:
            raise _nobody(self._backends.values(), self._role, self._wait_s) from None
        return backend

    def _settle(self, assignment: Assignment) -> Backend | None:
        if self._closed or assignment.is_over:
            raise EngineUnavailable("the node is stopping" if self._closed else "the session is over")
        return self._placement.settle(assignment)

    async def is_lost(self, backend: Backend) -> bool:
        """Whether the backend of a failed call is dead or removed. If not, the fault is the call's."""
        if backend.state == "healthy":
            await self._health.check_now(backend)
        return backend.state != "healthy"

    def _set_state(self, backend: Backend, state: BackendState, error: str | None) -> None:
        if backend.state == "draining":
            return
        if backend.state != state:
            backend.state, backend.since = state, self._clock()
            level = logging.WARNING if state == "unhealthy" else logging.INFO
            log.log(level, "backend.%s backend=%s url=%s error=%s", state, backend.backend_id, backend.url, error)
        backend.error = error
        backend.weights_known = backend.weights_known and state == "healthy"
        if state == "healthy":
            self._placement.offer(backend)
            self._usable.set()
        else:
            self._placement.withdraw(backend)
            if not self._closed and not any(other.state == "healthy" for other in self._backends.values()):
                self._usable.clear()

    # -- membership ----------------------------------------------------------------------------------------------

    def _known(self, url: str) -> Backend | None:
        return next((other for other in self.staying() if other.url == _base(url)), None)

    def staying(self) -> list[Backend]:
        return [backend for backend in self._backends.values() if backend.state != "draining"]

    def _take_in(
        self,
        spec: BackendSpec,
        engine: Engine,
        capabilities: EngineCapabilities,
        identity: Identity,
        is_near: bool,
    ) -> Backend:
        number = next(self._numbers)
        backend_id = f"b{number}"
        backend = Backend(
            backend_id=backend_id,
            number=number,
            spec=spec,
            engine=engine,
            capabilities=capabilities,
            identity=identity,
            is_near=is_near,
            state="unhealthy",
            since=self._clock(),
            weights_known=not self._is_version_set,
        )
        self._backends[backend_id] = backend
        self._set_state(backend, "healthy", None)
        self._health.start()
        return backend


def _nobody(backends: Collection[Backend], role: str | None, wait_s: float) -> EngineUnavailable:
    whose = "" if role is None else f" for role {role}"
    if not backends:
        return EngineUnavailable(
            f"the node has no backend{whose}, and none was added within {wait_s:g} s. Add a running engine."
        )
    states = "; ".join(f"{b.url} is {b.state} ({b.error or 'no error'})" for b in backends)
    return EngineUnavailable(f"no backend{whose} was healthy within {wait_s:g} s: {states}")


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
