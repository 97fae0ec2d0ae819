r"""Bodies with half a character in them: clients in JavaScript cut tool output anywhere, also inside an emoji, and the
rest of it goes out as a lone escape (`"\ud83d"`), which is no character and which strict decoders reject.

An agent must not die of that: each lone half becomes U+FFFD, and `dropped` reports it. The same half is replaced in the
same way when it comes back as history, so the conversation stays one. A body without one costs nothing: the search runs
only on rejected bodies.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from gangline.domain.conversation import ModelCall
from gangline.domain.errors import InvalidRequest

__all__ = ["LONE_SURROGATES", "parse_mended"]

LONE_SURROGATES = "lone surrogates"
"""Names in `ModelCall.dropped` that halves of characters were replaced."""

# Every escape is matched, so that an escaped backslash before a `u` begins none. Whole pairs come before halves.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def parse_mended(parse: Callable[[bytes], ModelCall], body: bytes) -> ModelCall:
    """The call that `parse` returns for the body, with lone halves replaced where it has any. Raises: the errors of
    `parse`."""
    try:
        return parse(body)
    except InvalidRequest:
        mended = _mended(body)
        if mended == body:
            raise
    call = parse(mended)
    return msgspec.structs.replace(call, dropped=(*call.dropped, LONE_SURROGATES))


def _mended(body: bytes) -> bytes:
    return _ESCAPE.sub(lambda escape: escape[0] if escape[1] is None else rb"\ufffd", body)
