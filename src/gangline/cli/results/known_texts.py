"""The bytes of a session's token ids, for a page that is saved as a file."""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gangline.domain.errors import GanglineError
from gangline.server.web.columns import COLUMNS, decode_columns
from gangline.server.web.decoding import Decode, TokenDecoder, decode_of
from gangline.server.web.tokens import TokenBytes, arrays_of, recorded_texts, texts_in, tokenizer_of
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from pathlib import Path

    from gangline.server.web.outline import OpenedSession

_AT_ONCE = 256


async def known_texts(
    session: OpenedSession, named: str | None, data: Path | None, server: str | None
) -> dict[str, TokenBytes]:
    """By tokenizer (`tokenizer_of`): decoded by the model's if it is known, else by an engine of the running service,
    else as the engine reported them.

    named: the tokenizer of the first call. Raises: NotFound when it is unavailable.
    """
    found: dict[str, TokenBytes] = {}
    for tokenizer in dict.fromkeys(map(tokenizer_of, session.calls)):
        numbers = [number for number, call in enumerate(session.calls) if tokenizer_of(call) == tokenizer]
        calls = [session.calls[number] for number in numbers]
        decode = _decode_by(named) if named and not found else decode_of(calls[0].model)
        if decode is not None:
            found[tokenizer] = await TokenDecoder(decode).bytes_of(arrays_of(calls))
            continue
        served: dict[int, bytes] = {}
        with contextlib.suppress(GanglineError):  # there is no service
            await _add_served(served, session, numbers, data, server)
        found[tokenizer] = ChainMap(served, recorded_texts(calls))
    return found


def _decode_by(name: str) -> Decode:
    """Raises: NotFound."""
    from gangline.models.language.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(name)

    async def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids)

    return decode


async def _add_served(
    served: dict[int, bytes], session: OpenedSession, numbers: Sequence[int], data: Path | None, server: str | None
) -> None:
    end = 0
    async with find_service(data, server).client() as client:
        for number in numbers:
            if number < end:
                continue
            end = number + _AT_ONCE
            asked = {"first": str(number), "limit": str(_AT_ONCE), "attempt": str(session.outline.attempt)}
            path = f"/v1/sessions/{session.outline.session_id}/tokens"
            served |= texts_in(decode_columns(await client.request("GET", path, params=asked, accept=COLUMNS)))
