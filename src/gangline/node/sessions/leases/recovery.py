"""Settles, after a crash, the attempts from before the restart that the node does not adopt."""

from __future__ import annotations

from collections.abc import Collection

from gangline.domain.session import SessionResult
from gangline.node.external.sessions import is_external
from gangline.node.sessions.adoption import RESTARTED
from gangline.node.sessions.failures import unfinished
from gangline.node.sessions.leases.delivery import Delivery
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal


class Recovery:
    """Call `find` before the first heartbeat, and `run` once."""

    def __init__(self, node_id: str, journal: Journal, delivery: Delivery) -> None:
        self.left: dict[str, int] = {}
        """session id -> fence, of attempts whose end was not reported to the server."""
        self._node_id = node_id
        self._journal = journal
        self._delivery = delivery

    def find(self, adopted: Collection[AttemptKey] = ()) -> list[AttemptOpened]:
        """Returns the attempts that were begun but not ended before the restart, except `adopted` ones."""
        unclosed = [opened for opened in self._journal.unclosed() if not is_external(opened)]
        found = [opened for opened in unclosed if (opened.session_id, opened.attempt) not in adopted]
        self.left = {opened.session_id: opened.fence for opened in found}
        return found

    async def run(self, adopted: Collection[AttemptKey]) -> None:
        """Deliver finished results from before the restart, and report unfinished attempts."""
        unclosed = self.find(adopted)
        finished = self._delivery.leftover()
        for key in finished:
            await self._delivery.deliver_leftover(key)
        for opened in unclosed:
            if (opened.session_id, opened.attempt) not in finished:
                await self._delivery.deliver(await self._interrupted(opened))
        self.left = {}

    async def _interrupted(self, opened: AttemptOpened) -> SessionResult:
        """Returns the completed calls of an attempt that died with the node, so that the session keeps them."""
        completions = await self._journal.read(AttemptKey(opened.session_id, opened.attempt))
        return unfinished(opened, self._node_id, RESTARTED, completions, held_out=opened.held_out)
