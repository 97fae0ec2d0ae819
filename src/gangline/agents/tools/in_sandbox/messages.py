"""JSON through the C functions that the module `json` itself uses: its regular expressions take 8 ms to import."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest: see `gangline.agents.tools.in_sandbox`
if TYPE_CHECKING:
    from typing import Any


class _Reading:
    """The decoder settings that the C scanner needs, as in `json.JSONDecoder`."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float


def loads(line: bytes | str) -> Any:
    """Raises: ValueError."""
    text = line if isinstance(line, str) else line.decode("utf-8", "surrogatepass")
    text = text.strip(" \t\r\n")
    try:
        value, end = _scan(text, 0)
    except (StopIteration, SystemError):  # until Python 3.11 it raises the module's error only if that is imported
        raise ValueError("this is not valid JSON") from None
    if end != len(text):
        raise ValueError("this is JSON with something behind it")
    return value


def dumps(value: Any) -> str:
    """Raises: TypeError, ValueError."""
    return "".join(_pieces(value, 0))


def _unknown(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} cannot be told in JSON")


try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner
except ImportError:  # another Python than CPython
    pass
else:
    _scan = make_scanner(_Reading)  # pyright: ignore[reportArgumentType] - it only needs these names
    _pieces = make_encoder(None, _unknown, encode_basestring_ascii, None, ": ", ", ", False, False, True)
