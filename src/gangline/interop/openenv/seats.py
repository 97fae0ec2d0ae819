"""Clients and their episodes: each client has a seat, with at most one episode at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gangline.domain.errors import GanglineError, InvalidRequest, TooMany
from gangline.domain.ids import new_id
from gangline.interop.openenv.episode import Episode, Seen
from gangline.wire.client.server import ServerClient

log = logging.getLogger("gangline.interop.openenv")

_IDLE_S = 600.0
"""Seconds after which an unused seat without a connection can be given to a new client."""


class Seats:
    """All clients of one server."""

    def __init__(
        self,
        client: ServerClient,
        tasks: Sequence[tuple[str, Mapping[str, Any]]],
        episodes: dict[str, Episode],
        *,
        max_seats: int,
    ) -> None:
        """tasks: names, and the results of `played_task`; at least one.
        episodes: open ones by key, updated here and read by the engine.
        """
        self.episodes = episodes
        self.max_seats = max_seats
        self._client = client
        self._tasks = tasks
        self._turns = itertools.count()
        self._seats: dict[str, Seat] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._tasks]

    async def open(self) -> Seat:
        """A seat for a new client. Raises: TooMany if all are taken."""
        if len(self._seats) >= self.max_seats:
            await self._dismiss_idle()
        if len(self._seats) >= self.max_seats:
            raise TooMany(
                f"{self.max_seats} clients play already: wait for one to leave, or start with a larger --clients."
            )
        seat = Seat(self)
        self._seats[seat.session_id] = seat
        return seat

    def find(self, session_id: object) -> Seat | None:
        return self._seats.get(session_id) if isinstance(session_id, str) else None

    async def leave(self, seat: Seat) -> None:
        """Free the client's seat and close its episode, even if the caller is cancelled because its client is gone."""
        self._seats.pop(seat.session_id, None)
        leaving = asyncio.create_task(seat.stop(), name=f"leave {seat.session_id}")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)
        await asyncio.shield(leaving)

    async def close(self) -> None:
        """Close all episodes."""
        await asyncio.gather(*map(self.leave, list(self._seats.values())))
        await asyncio.gather(*self._leaving)

    def new_episode(self, wanted: object, seed: object) -> Episode:
        """wanted: a task's name or number; without it, `seed` decides; without that, the next task in turn.

        Raises: InvalidRequest.
        """
        name, task = self._tasks[self._place(wanted, seed)]
        episode = Episode(self._client, task, name)
        self.episodes[episode.key] = episode
        return episode

    def _place(self, wanted: object, seed: object) -> int:
        if wanted is None:
            return (seed if isinstance(seed, int) else next(self._turns)) % len(self._tasks)
        if isinstance(wanted, int) and not isinstance(wanted, bool) and 0 <= wanted < len(self._tasks):
            return wanted
        for at, (name, _) in enumerate(self._tasks):
            if name == wanted:
                return at
        raise InvalidRequest(f"there is no task {wanted!r}; there are {len(self._tasks)}, such as {self.names[0]!r}.")

    async def _dismiss_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        for seat in list(self._seats.values()):
            if not seat.is_attached and now - seat.used_at > _IDLE_S:
                await self.leave(seat)


class Seat:
    """One client's place. Its requests are answered one at a time."""

    def __init__(self, seats: Seats) -> None:
        self.session_id = new_id("client")
        self.is_attached = False
        """Whether a WebSocket holds it."""
        self.used_at = 0.0
        """Event-loop time of the last request, in seconds."""
        self.episode: Episode | None = None
        self._seats = seats
        self._turn = asyncio.Lock()
        self._touch()

    async def reset(self, task: object = None, seed: object = None) -> Seen:
        """Begin an episode, after closing the current one. Raises: InvalidRequest, errors of the service."""
        async with self._turn:
            return await self._begin(task, seed)

    async def act(self, tool: str, arguments: Mapping[str, Any]) -> Seen:
        """Raises: Conflict after the end of the episode, errors of the service."""
        async with self._turn:
            return await (await self._open_episode()).act(tool, arguments)

    async def opened(self) -> Episode:
        """The client's episode, begun if necessary. Raises: errors of the service."""
        async with self._turn:
            return await self._open_episode()

    async def stop(self) -> None:
        """Close the episode. Errors of the service are logged: the session's own limits will end it."""
        episode, self.episode = self.episode, None
        if episode is None:
            return
        self._seats.episodes.pop(episode.key, None)
        try:
            await episode.close()
        except GanglineError as error:
            log.warning("episode.left_open episode=%s error=%s", episode.episode_id, error.message)

    async def _open_episode(self) -> Episode:
        self._touch()
        if self.episode is None:
            await self._begin(None, None)
        assert self.episode is not None
        return self.episode

    async def _begin(self, task: object, seed: object) -> Seen:
        self._touch()
        await self.stop()
        episode = self.episode = self._seats.new_episode(task, seed)
        try:
            return await episode.begin()
        except BaseException:
            await self.stop()
            raise

    def _touch(self) -> None:
        self.used_at = asyncio.get_running_loop().time()
