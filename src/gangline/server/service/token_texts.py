"""The bytes of token ids of any model, asked once of a node that has an engine with the tokenizer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from gangline.domain.completion import Completion
from gangline.domain.errors import GanglineError
from gangline.domain.tokens import TokenIds
from gangline.server.service.core import RolloutService
from gangline.server.service.live_nodes import live_nodes, node_client
from gangline.server.web.decoding import Decode, Divider, TokenDecoder, decode_of
from gangline.server.web.tokens import arrays_of, tokenizer_of

log = logging.getLogger("gangline.server.web")

_PATIENCE_S = 10.0


class TokenTexts:
    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._of: dict[str, _Known] = {}

    async def of(self, calls: Sequence[Completion]) -> dict[int, bytes]:
        """Bytes of the calls' ids and of others, as far as they are known. calls: one or more, of one tokenizer."""
        held = self._of.setdefault(tokenizer_of(calls[0]), _Known())
        async with held.lock:
            try:
                if new := await asyncio.to_thread(held.unasked, calls):
                    async with self._decode(calls[0]) as decode:
                        await held.add(new, decode)
            except (GanglineError, OSError) as error:
                model = calls[0].model
                log.info("vocabulary.unknown model=%s why=%.200s: the page shows ids without their text", model, error)
        return held.known

    @asynccontextmanager
    async def _decode(self, call: Completion) -> AsyncGenerator[Decode | None]:
        """None without an engine that has the call's tokenizer."""
        digest = call.certificate.tokenizer_digest
        if (decode := await asyncio.to_thread(decode_of, call.model)) is not None:
            yield decode
            return
        for node in await live_nodes(self._service) if digest else ():
            templates: list[dict[str, Any]] = [engine.get("template") or {} for engine in node.backends]
            if any(template.get("tokenizer_digest") == digest for template in templates):
                async with node_client(self._service, node, timeout_s=_PATIENCE_S) as client:
                    yield partial(client.detokenize, digest)
                return
        yield None


class _Known:
    """What is known about one tokenizer."""

    def __init__(self) -> None:
        self.known: dict[int, bytes] = {}
        self.lock = asyncio.Lock()
        self._asked: set[int] = set()
        """Includes ids whose bytes were not found."""
        self._divider: Divider | None = None

    def unasked(self, calls: Sequence[Completion]) -> list[TokenIds]:
        """Tokens of calls with new ids. Blocking."""
        return [ids for ids in arrays_of(calls) if not self._asked.issuperset(np.unique(ids).tolist())]

    async def add(self, sequences: Sequence[TokenIds], decode: Decode | None) -> None:
        if decode is None:
            return
        decoder = TokenDecoder(decode, self._divider)
        self.known |= await decoder.bytes_of(sequences)
        self._divider = decoder.divider
        self._asked.update(np.concatenate(sequences).tolist())
