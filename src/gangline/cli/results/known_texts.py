"""The bytes of a session's token ids, for the terminal, a picture, and a page that is saved as a file."""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gangline.domain.errors import GanglineError, InvalidRequest
from gangline.server.web.columns import COLUMNS, decode_columns
from gangline.server.web.decoding import Decode, TokenDecoder, decode_of
from gangline.server.web.tokens import TokenBytes, arrays_of, recorded_texts, texts_in, tokenizer_of
from gangline.settings.installation import extra_command
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from pathlib import Path

    from gangline.domain.completion import Completion
    from gangline.domain.trajectory import Trace
    from gangline.server.web.outline import OpenedSession

TextOf = Callable[[int], str | None]
"""Text of a token id; None if it is not known."""

_AT_ONCE = 256


def text_of(trace: Trace, calls: Sequence[Completion], known: Mapping[str, TokenBytes]) -> TextOf:
    """Texts of a trace's ids. calls: those of its session; known: by their tokenizers."""
    (first,) = (call for call in calls if call.completion_id == trace.spans[0].completion_id)
    texts = known.get(tokenizer_of(first), {})
    return lambda token_id: texts[token_id].decode(errors="replace") if token_id in texts else None


async def known_texts(
    session: OpenedSession, named: str | None, data: Path | None, server: str | None
) -> dict[str, TokenBytes]:
    """By tokenizer (`tokenizer_of`): decoded by the model's if it is known, else by an engine of the running service,
    else as the engine reported them.

    named: the tokenizer of the first call. Raises: NotFound, InvalidRequest when it is unavailable.
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
    """Raises: NotFound, InvalidRequest."""
    try:
        from gangline.models.language.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(name)
    except ImportError as error:
        why = f"--tokenizer needs the Python package {error.name!r}: {extra_command('tokenizer')}"
        raise InvalidRequest(why) from error

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
