"""One random schedule of a whole service: a server, nodes, a trainer and its receiver over a network that loses,
doubles and delays, while everything crashes and the server's clock jumps.

All randomness comes from the seed, time passes in a queue of what is to happen, so a seed is one schedule, always the
same. After `CHAOS_S` seconds nothing goes wrong any more, and all that was accepted must come to its end.

Invariants, checked as it goes and at the end:
- Each session ends once, every task ends, and a session's outcome is that of the result that was kept for it.
- No lease is held twice: each has a higher fence than any before, and only the newest one is renewed, or reported for.
- No result is lost: what a node was told is accepted was kept; what it was not told, it sends until it is.
- No callback is unsent: every task has one, which arrives, under one key, with the outcomes of the end.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import msgspec

from gangline.domain.errors import Failure, LeaseLost
from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.store.sql.outbox import Callback, next_try_at
from support.chaos.simulated_servers import Crash, Ended, Server
from support.service.running import beat, engine_down, request, result

__all__ = ["LEASE_S", "World"]

T = TypeVar("T")

LEASE_S = 10.0
CHAOS_S = 60.0
PATIENCE_S = 4000.0
BEAT_S = 3.0
SWEEP_S = 4.0

_WITHOUT_A_RESULT = ("lease_expired", "lease_unheard", "given_back")
"""Ends of sessions whose node reported none."""


class World:
    """The clock, what is to happen, and the network. `make_server` is given the server's own clock."""

    def __init__(self, seed: int, make_server: Callable[[Callable[[], float]], Server]) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.skew_s = 0.0
        self.server_up = True
        self.life = 0
        self.receiver_up = True
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self.server = make_server(lambda: 1e6 + self.now + self.skew_s)
        self.fences: dict[str, int] = {}
        self.accepted: dict[tuple[str, int], SessionResult] = {}
        self.kept: dict[tuple[str, int], SessionResult] = {}
        self.arrived: dict[str, Counter[str]] = defaultdict(Counter)
        self.submitted: set[str] = set()
        self.on_the_way: set[int] = set()
        self.nodes = [SimulatedNode(self, f"n{number}") for number in (1, 2)]

    # -- time and chance -----------------------------------------------------------------------------------------

    @property
    def is_calm(self) -> bool:
        return self.now >= CHAOS_S

    def chance(self, probability: float) -> bool:
        return not self.is_calm and self.random.random() < probability

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._number), happens))

    def every(self, seconds: float, happens: Callable[[], None]) -> None:
        def again() -> None:
            happens()
            self.after(seconds, again)

        self.after(self.random.uniform(0, seconds), again)

    def run(self) -> None:
        """To the end of everything. Raises: AssertionError."""
        self._set_out()
        while self.now < PATIENCE_S:
            self.now, _, happens = heapq.heappop(self._queue)
            happens()
            if self.is_calm and self._is_over():
                break
        self._check_end()

    def _set_out(self) -> None:
        for number in range(self.random.randint(1, 3)):
            self.after(self.random.uniform(0, CHAOS_S / 2), lambda number=number: self._submit(f"t{number}"))
        for node in self.nodes:
            self.every(BEAT_S, node.tick)
            self.after(self.random.uniform(0, CHAOS_S), node.crash)
        for _ in range(self.random.randint(0, 3)):
            self.after(self.random.uniform(0, CHAOS_S), self._crash_server)
        for _ in range(self.random.randint(0, 2)):
            self.after(self.random.uniform(0, CHAOS_S), self._jump)
        for up in (False, True):
            self.after(self.random.uniform(0, CHAOS_S), lambda up=up: setattr(self, "receiver_up", up))
        self.after(CHAOS_S, lambda: setattr(self, "receiver_up", True))
        self.every(SWEEP_S, self._sweep)
        self.every(1.0, self._deliver)

    # -- the network ---------------------------------------------------------------------------------------------

    def ask(self, call: Callable[[], T], answered: Callable[[T | LeaseLost], None]) -> None:
        """Send a request to the server. It, or its answer, may be late, doubled or lost."""
        if self.chance(0.1):
            return
        self.after(self._delay(), lambda: self._handle(call, answered))
        if self.chance(0.1):
            self.after(self._delay(), lambda: self._handle(call, lambda _answer: None))

    def _delay(self) -> float:
        return 0.01 if self.is_calm else self.random.choice((0.01, 0.1, 1.0, 8.0))

    def _handle(self, call: Callable[[], T], answered: Callable[[T | LeaseLost], None]) -> None:
        if not self.server_up:
            return
        try:
            answer: T | LeaseLost = call()
        except LeaseLost as error:
            answer = error
        except Crash:
            self._crash_server()
            return
        if not self.chance(0.1):
            self.after(self._delay(), lambda: answered(answer))

    # -- the server's own work, and what happens to it -----------------------------------------------------------

    def _crash_server(self) -> None:
        if self.server_up:
            self.server_up = False
            self.on_the_way.clear()
            self.after(self.random.uniform(0.1, 15.0), self._start_server)

    def _start_server(self) -> None:
        self.server.start_again()
        self.server_up = True
        self.life += 1

    def _jump(self) -> None:
        self.skew_s += self.random.choice((-600.0, -15.0, 5.0, 15.0, 600.0))

    def _sweep(self) -> None:
        if self.server_up:
            self.server.sweep()

    def lease(self, node_id: str, max_sessions: int) -> list[Lease]:
        leases = self.server.lease(node_id, max_sessions)
        for lease in leases:
            assert lease.fence > self.fences.get(lease.session_id, 0), "each lease has its own fence"
            self.fences[lease.session_id] = lease.fence
        return leases

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        reply = self.server.heartbeat(beat)
        for session_id in reply.renewed:
            assert beat.sessions[session_id][0] == self.fences[session_id], "only the newest lease is renewed"
        return reply

    def report(self, told: SessionResult) -> None:
        """Raises: LeaseLost, Crash."""
        slot = (told.session_id, told.attempt)

        def keep() -> None:
            assert told.fence == self.fences[told.session_id], "only the newest lease is listened to"
            assert slot not in self.accepted, "an attempt has one result"
            self.kept[slot] = told
            if self.chance(0.05):
                raise Crash

        self.server.report(told, keep)
        before = self.accepted.setdefault(slot, told)
        assert before.fence == told.fence, "a session's attempt was accepted twice"
        assert self.kept[slot] == before, "what was accepted was kept"

    # -- callbacks -----------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        if not self.server_up:
            return
        for callback in self.server.due():
            if callback.id not in self.on_the_way:
                self.on_the_way.add(callback.id)
                self.after(self._delay(), lambda callback=callback, life=self.life: self._post(callback, life))

    def _post(self, callback: Callback, life: int) -> None:
        """The receiver may have it although the server never hears so."""
        heard = self.receiver_up and not self.chance(0.2)
        if heard:
            self.arrived[callback.key][callback.body] += 1
        is_told = heard and not self.chance(0.2)
        self.after(self._delay(), lambda: self._settle(callback, life, is_told))

    def _settle(self, callback: Callback, life: int, is_told: bool) -> None:
        if not self.server_up or life != self.life:
            return
        self.on_the_way.discard(callback.id)
        if is_told:
            self.server.delivered(callback)
            return
        now = 1e6 + self.now + self.skew_s
        tries = callback.num_tries + 1
        next_at = next_try_at(tries, now=now, expires_at=callback.expires_at, base_s=1.0, max_s=30.0)
        self.server.failed(callback, next_at)

    # -- the trainer ---------------------------------------------------------------------------------------------

    def _submit(self, task_id: str) -> None:
        """Until the server has answered; perhaps cancelled later."""
        task = request(
            task_id,
            num_samples=self.random.randint(1, 3),
            max_attempts=self.random.randint(1, 3),
            callback_url="http://trainer.test/",
        )

        def again() -> None:
            if task_id not in self.submitted:
                self.ask(lambda: self.server.submit(task), lambda _answer: self.submitted.add(task_id))
                self.after(5.0, again)

        again()
        if self.chance(0.15):
            self.after(self.random.uniform(10, 40), lambda: self._cancel(task_id))

    def _cancel(self, task_id: str) -> None:
        if task_id in self.submitted:
            self.ask(lambda: self.server.cancel(task_id), lambda _answer: None)

    # -- the end -------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return (
            self.server_up
            and all(not node.outgoing and not node.running and node.is_up for node in self.nodes)
            and all(session.state == "ended" for session in self.server.sessions().values())
            and all(state == "delivered" for _, state in self.server.callbacks())
        )

    def _check_end(self) -> None:
        sessions = self.server.sessions()
        assert sessions
        assert self.submitted <= {session.task_id for session in sessions.values()}
        self._each_session_ended_once(sessions)
        self._no_result_is_lost(sessions)
        self._no_callback_is_unsent(sessions)

    def _each_session_ended_once(self, sessions: dict[str, Ended]) -> None:
        ends = self.server.num_ends()
        for session_id, session in sessions.items():
            assert session.state == "ended", f"{session_id} never ended"
            assert ends[session_id] == 1, f"{session_id} ended {ends[session_id]} times"

    def _no_result_is_lost(self, sessions: dict[str, Ended]) -> None:
        assert not any(node.outgoing for node in self.nodes), "a node still has a result that nobody answered"
        for session_id, session in sessions.items():
            if session.outcome == "cancelled" or session.failure_code in _WITHOUT_A_RESULT:
                continue
            final = self.kept[session_id, session.result_attempt or 0]
            assert (final.outcome, final.attempt) == (session.outcome, session.attempt)
            assert self.accepted.get((session_id, final.attempt), final) == final
        for slot, told in self.accepted.items():
            assert self.kept[slot] == told, f"what was accepted of {slot} is gone"

    def _no_callback_is_unsent(self, sessions: dict[str, Ended]) -> None:
        tasks = {session.task_id for session in sessions.values()}
        assert Counter(self.server.callbacks()) == Counter((f"{task_id}:ended", "delivered") for task_id in tasks)
        for task_id in tasks:
            (body,) = self.arrived[f"{task_id}:ended"]
            outcomes = msgspec.json.decode(body)["outcomes"]
            here = [session.outcome for session in sessions.values() if session.task_id == task_id]
            assert sorted(outcomes) == sorted(map(str, here))


class SimulatedNode:
    """Leases, works, reports until it is answered; what it finished, and what it began, outlives its crash."""

    def __init__(self, world: World, node_id: str) -> None:
        self.world = world
        self.node_id = node_id
        self.is_up = True
        self.life = 0
        self.running: dict[str, Lease] = {}
        self.opened: dict[tuple[str, int], Lease] = {}
        self.outgoing: dict[tuple[str, int], SessionResult] = {}

    def tick(self) -> None:
        if not self.is_up:
            return
        life, node_id, room = self.life, self.node_id, 3 - len(self.running)
        now_held = beat(self.running.values(), node_id)
        self.world.ask(lambda: self.world.heartbeat(now_held), lambda reply: self._drop(life, now_held, reply))
        if room > 0:
            self.world.ask(lambda: self.world.lease(node_id, room), lambda leases: self._begin(life, leases))
        for told in self.outgoing.values():
            self._send(told)

    def _begin(self, life: int, leases: list[Lease] | LeaseLost) -> None:
        if not self.is_up or life != self.life or isinstance(leases, LeaseLost):
            return
        for lease in leases:
            self.running[lease.session_id] = lease
            self.opened[lease.session_id, lease.fence] = lease
            works_s = self.world.random.choice((0.0, 1.0, 5.0, 20.0))
            self.world.after(works_s, lambda lease=lease: self._finish(life, lease))

    def _finish(self, life: int, lease: Lease) -> None:
        if not self.is_up or life != self.life or self.running.get(lease.session_id) is not lease:
            return
        del self.running[lease.session_id]
        if self.world.chance(0.1):
            self._give_back(lease)
            return
        ended: dict[str, Any] = engine_down() if self.world.chance(0.3) else {}
        self._put_out(lease, **ended)

    def _give_back(self, lease: Lease) -> None:
        del self.opened[lease.session_id, lease.fence]
        here, server = (self.node_id, lease.session_id, lease.fence), self.world.server
        self.world.ask(lambda: server.release(*here), lambda _answer: None)

    def _put_out(self, lease: Lease, **ended: Any) -> None:
        del self.opened[lease.session_id, lease.fence]
        told = result(lease, self.node_id, **ended)
        self.outgoing[lease.session_id, lease.fence] = told
        self._send(told)

    def _send(self, told: SessionResult) -> None:
        def answered(answer: LeaseLost | None) -> None:
            if answer is None:
                assert self.world.kept[told.session_id, told.attempt] == told, "an accepted result was lost"
            elif told.outcome == "completed":
                assert self.world.accepted.get((told.session_id, told.attempt)) != told, "accepted, then refused"
            self.outgoing.pop((told.session_id, told.fence), None)

        self.world.ask(lambda: self.world.report(told), answered)

    def _drop(self, life: int, asked: Any, reply: HeartbeatReply | LeaseLost) -> None:
        if not self.is_up or life != self.life or isinstance(reply, LeaseLost):
            return
        for session_id in reply.lost:
            lease = self.running.get(session_id)
            if lease is not None and lease.fence == asked.sessions[session_id][0]:
                del self.running[session_id]
                self._give_back(lease)

    def crash(self) -> None:
        self.is_up = False
        self.life += 1
        self.running.clear()
        self.world.after(self.world.random.uniform(0.1, 30.0), self._start)

    def _start(self) -> None:
        """Say of what was begun and never finished that it broke, as the node's recovery does."""
        self.is_up = True
        failure = Failure(boundary="node", code="node_restarted", message="the node died", retryable=True)
        for lease in list(self.opened.values()):
            self._put_out(lease, outcome="infra_error", reward=None, failure=failure)
