"""What a node does, after a crash, with attempts of its earlier life that it does not adopt."""

from __future__ import annotations

from collections.abc import Collection

from gangline.domain.session import SessionResult
from gangline.node.external.sessions import is_external
from gangline.node.sessions.adoption import RESTARTED
from gangline.node.sessions.failures import unfinished
from gangline.node.sessions.leases.delivery import Delivery
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal


class Recovery:
    """`find` before the first heartbeat, `run` once."""

    def __init__(self, node_id: str, journal: Journal, delivery: Delivery) -> None:
        self.left: dict[str, int] = {}
        """session id -> fence, of attempts that the server has not heard the end of."""
        self._node_id = node_id
        self._journal = journal
        self._delivery = delivery

    def find(self, adopted: Collection[AttemptKey] = ()) -> list[AttemptOpened]:
        """Attempts that an earlier life of this node began and did not end, without those that go on here."""
        unclosed = [opened for opened in self._journal.unclosed() if not is_external(opened)]
        found = [opened for opened in unclosed if (opened.session_id, opened.attempt) not in adopted]
        self.left = {opened.session_id: opened.fence for opened in found}
        return found

    async def run(self, adopted: Collection[AttemptKey]) -> None:
        """Deliver what the earlier life finished, and report what it left unfinished."""
        unclosed = self.find(adopted)
        finished = self._delivery.leftover()
        for key in finished:
            await self._delivery.deliver_leftover(key)
        for opened in unclosed:
            if (opened.session_id, opened.attempt) not in finished:
                await self._delivery.deliver(await self._interrupted(opened))
        self.left = {}

    async def _interrupted(self, opened: AttemptOpened) -> SessionResult:
        """The completed calls of an attempt that died with the node, so that they are kept with the session."""
        completions = await self._journal.read(AttemptKey(opened.session_id, opened.attempt))
        return unfinished(opened, self._node_id, RESTARTED, completions, held_out=opened.held_out)
