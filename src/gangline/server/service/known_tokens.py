"""The tokens of the database, held in memory, so that a request costs no read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from secrets import token_hex

from gangline.domain.tenancy import Principal
from gangline.domain.views import NodeView
from gangline.store.sql.tasks import TaskStore
from gangline.store.sql.tokens import Opening, StoredTokens, digest_of, node_secret, token_of

KNOWN_FOR_S = 2.0
"""Seconds after which they are read again: how long a token that another server revoked still opens something."""
_ROOT = "node_root"
_REST_S = 0.25
"""Shortest time between two reads for unknown tokens."""


class KnownTokens:
    """Bound to one event loop. control_token: also that of nodes without a token of their own."""

    def __init__(self, store: TaskStore, control_token: str | None, *, clock: Callable[[], float] = time.time) -> None:
        self.stored = StoredTokens(store.database, self._node_secret)
        self._store = store
        self._control_token = control_token
        self._root = ""
        self._clock = clock
        self._known: dict[str, Opening] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def start(self) -> None:
        self._root = await self._store.run(self._store.change_note, _ROOT, _or_random)

    def of_node(self, node: NodeView) -> str | None:
        """The token that the node itself runs with."""
        if not node.key:
            return self._control_token
        return token_of(node.key.partition(".")[0], self._node_secret(node.key))

    def _node_secret(self, key: str) -> str:
        return node_secret(self._root, self._control_token, key)

    async def known(self, token: str) -> Principal | None:
        """Whose token it is; None: nobody's. Raises: StoreError."""
        digest = digest_of(token)
        await self._read(KNOWN_FOR_S if digest in self._known else _REST_S)
        found = self._known.get(digest)
        return found.principal if found is not None and self._is_valid(found) else None

    async def still(self, principal: Principal) -> bool:
        """Whether its token still opens something. Raises: StoreError."""
        if not principal.token_id:
            return True
        await self._read(KNOWN_FOR_S)
        ids = {one.principal.token_id for one in self._known.values() if self._is_valid(one)}
        return principal.token_id in ids

    async def changed(self) -> None:
        """Reads them again."""
        await self._read(0.0)

    def _is_valid(self, known: Opening) -> bool:
        return known.until is None or self._clock() < known.until

    async def _read(self, older_than_s: float) -> None:
        asked_at = time.monotonic()
        if asked_at - self._read_at < older_than_s:
            return
        async with self._reading:
            if self._read_at < asked_at - older_than_s or older_than_s == 0:
                began = time.monotonic()
                self._known = await self.stored.database.query(self.stored.known)
                self._read_at = began


def _or_random(known: str | None) -> str:
    return known or token_hex(32)
