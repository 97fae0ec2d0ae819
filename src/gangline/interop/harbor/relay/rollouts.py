"""What the connector remembers of its rollouts, in files (0600) that survive its restart.

Laws
- A call is written down before it is forwarded, and forgotten once the relay has read its whole answer. What is left
  are the calls that an agent may ask again; they keep their idempotency key, by which the node knows the repeat.
- Of equal calls, each repeat takes another one: first those that were certainly not heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gangline.domain.errors import StoreError
from gangline.machine.durable import disk_full_error, remove_unfinished, write_whole
from gangline.machine.event_loop import to_end
from gangline.machine.private import make_private_folder

_MAX_UNHEARD = 256
"""Calls of a rollout that can be asked again."""
_LAST = 1 << 62


class AskedCall(msgspec.Struct, frozen=True):
    """A call whose answer the agent may not have."""

    digest: str
    key: str
    """Idempotency key of all its tries."""


@dataclass(eq=False)
class OpenTry:
    """One request of a call: in flight, or without an answer that was heard."""

    asked: AskedCall
    link: object
    sent_ns: int = 0
    """When the end of its answer was sent, by the monotonic clock; 0: it was not."""

    @property
    def doubt(self) -> int:
        """The smaller, the surer it is that its answer was not heard. A relay reads in order, so it lost the last."""
        return _LAST - self.sent_ns if self.sent_ns else 0


class SessionAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The session that answers a rollout's calls."""

    session_id: str
    api_key: str
    url: str
    """Its node's, to which the agent's paths are appended."""


class _KeptRollout(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str
    job_id: str
    session: SessionAddress | None
    is_over: bool
    asked: tuple[AskedCall, ...]


class _KeptJob(msgspec.Struct, frozen=True, kw_only=True):
    delivered: tuple[str, ...]
    """Ids of rollouts."""


class RelayedRollout:
    """One rollout and its calls."""

    def __init__(
        self,
        rollout_id: str,
        job_id: str,
        *,
        session: SessionAddress | None = None,
        is_over: bool = False,
        asked: tuple[AskedCall, ...] = (),
    ) -> None:
        self.rollout_id = rollout_id
        self.job_id = job_id
        self.session = session
        self.is_over = is_over
        """Whether its session has ended."""
        self.order = asyncio.Lock()
        """For opening the session, and for writing the file."""
        self._unheard = [OpenTry(one, None) for one in asked]
        self._open: list[OpenTry] = []

    def ask(self, digest: str, link: object, *, own_key: str | None, new_key: str) -> OpenTry:
        """A try of the call that a request belongs to: of one whose answer was not heard, else of a new one.

        link: the connection that the request came by; what is open on another one was not heard. own_key: the
        idempotency key that the agent's client gave it, if any. new_key: for a new call without one.
        """
        lost = [one for one in self._open if one.link is not link]
        for one in sorted((*self._unheard, *lost), key=lambda one: one.doubt):
            if one.asked.digest == digest and own_key in (None, one.asked.key):
                (self._open if one in lost else self._unheard).remove(one)
                asked = one.asked
                break
        else:
            asked = AskedCall(digest, own_key or new_key)
        self._open.append(made := OpenTry(asked, link))
        return made

    def close(self, one: OpenTry, *, was_heard: bool) -> None:
        """End a try. Without an answer that was heard, the call can be asked again, if it was not yet."""
        if one in self._open:
            self._open.remove(one)
            if not was_heard:
                self._unheard = [*self._unheard, one][-_MAX_UNHEARD:]

    @property
    def num_open(self) -> int:
        """Calls in flight."""
        return len(self._open)

    def encoded(self) -> bytes:
        tries = sorted((*self._unheard, *self._open), key=lambda one: one.doubt)
        return msgspec.json.encode(
            _KeptRollout(
                rollout_id=self.rollout_id,
                job_id=self.job_id,
                session=self.session,
                is_over=self.is_over,
                asked=tuple(one.asked for one in tries),
            )
        )


class RolloutBook:
    """`FOLDER/ROLLOUT.json`, and `FOLDER/jobs/JOB.json` with what was delivered. One process at a time.

    Ids are Harbor's own UUIDs, checked by their reader. Raises: OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = folder / "jobs"
        make_private_folder(self._jobs)
        remove_unfinished(folder)
        self._rollouts = {one.rollout_id: one for one in map(_read, sorted(folder.glob("*.json")))}

    def __iter__(self) -> Iterator[RelayedRollout]:
        return iter(list(self._rollouts.values()))

    def find(self, rollout_id: str) -> RelayedRollout | None:
        return self._rollouts.get(rollout_id)

    def add(self, rollout: RelayedRollout) -> None:
        self._rollouts[rollout.rollout_id] = rollout

    def jobs(self) -> list[str]:
        """Jobs with rollouts that are not delivered."""
        return sorted({rollout.job_id for rollout in self._rollouts.values()})

    async def save(self, rollout: RelayedRollout) -> None:
        """Durable on return. Raises: StoreError, DiskFull."""
        async with rollout.order:
            await self._write(self._folder / f"{rollout.rollout_id}.json", rollout.encoded())

    def delivered(self, job_id: str) -> frozenset[str]:
        """Ids of the job's rollouts that were delivered. Blocking."""
        path = self._jobs / f"{job_id}.json"
        return (
            frozenset(msgspec.json.decode(path.read_bytes(), type=_KeptJob).delivered) if path.exists() else frozenset()
        )

    async def add_delivered(self, job_id: str, rollout_ids: frozenset[str]) -> None:
        """Durable on return. Raises: StoreError, DiskFull."""
        known = await asyncio.to_thread(self.delivered, job_id)
        data = msgspec.json.encode(_KeptJob(delivered=tuple(sorted(known | rollout_ids))))
        await self._write(self._jobs / f"{job_id}.json", data)

    def forget(self, job_id: str, rollout_ids: Collection[str]) -> None:
        """Remove these rollouts of a job; what was delivered is remembered. Blocking."""
        for rollout in self:
            if rollout.job_id == job_id and rollout.rollout_id in rollout_ids:
                (self._folder / f"{rollout.rollout_id}.json").unlink(missing_ok=True)
                del self._rollouts[rollout.rollout_id]

    async def _write(self, path: Path, data: bytes) -> None:
        try:
            await to_end(asyncio.to_thread(write_whole, path, data))
        except OSError as error:
            full = disk_full_error(error, "the connector's rollouts")
            raise full or StoreError(f"{path} cannot be written: {error}") from error


def _read(path: Path) -> RelayedRollout:
    """Raises: StoreError."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=_KeptRollout)
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path} cannot be read: {error}. Move it away to begin without this rollout.") from error
    return RelayedRollout(
        record.rollout_id, record.job_id, session=record.session, is_over=record.is_over, asked=record.asked
    )
