"""An engine plug-in made with an operator's options: its own, and `parsers`, which any engine can have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.engines.contract import Engine
from gangline.engines.text.parsed import ParsedEngine
from gangline.language.parsing.parser import Parsers

__all__ = ["make_engine"]

_NAMED_ELSEWHERE = frozenset({"url", "api_key", "capture"})


def make_engine(
    make: Callable[..., Engine], kind: str, url: str, given: Mapping[str, Any], options: Mapping[str, Any]
) -> Engine:
    """
    given: the node's own options, such as a key.
    options: the operator's. `parsers` goes to a plug-in that takes it; the text of any other is parsed in front of it.

    Raises: InvalidRequest when the plug-in has no such option.
    """
    known = [name for name in inspect.signature(make).parameters if name not in _NAMED_ELSEWHERE]
    wrapped = "parsers" in options and "parsers" not in known
    own = {name: value for name, value in options.items() if not (wrapped and name == "parsers")}
    unknown = sorted(set(own) - set(known))
    if unknown:
        options_known = ", ".join(sorted({*known, "parsers"}))
        raise InvalidRequest(f"engine {kind!r} has no option {unknown[0]!r}. It has: {options_known}.")
    if not wrapped:
        return make(url, **given, **own)
    names = options["parsers"]
    if not isinstance(names, Mapping):
        raise InvalidRequest('parsers must be an object such as {"thinking": "qwen3", "tools": "hermes"}.')
    parsers = Parsers.named(cast("Mapping[str, Any]", names))
    if parsers.thinking == "harmony":
        raise InvalidRequest(
            "harmony's marks are special tokens, which the text of a chat route comes without: use the engine's own "
            "parsers, or its route of ids with kind generate_template."
        )
    engine = make(url, **given, **own)
    return ParsedEngine(engine, parsers) if parsers else engine
