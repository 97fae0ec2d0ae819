"""Clients of engines, built from an operator's spec: a key, the plug-in's options, and `parsers`, which any engine can
have."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, cast

from gangline.domain.conversation import Message, Text
from gangline.domain.errors import Conflict, EngineUnavailable, GanglineError, InvalidRequest
from gangline.models.engines.cache import EngineCache, engine_page
from gangline.models.engines.contract import Engine, EngineCapabilities
from gangline.models.engines.text.parsed import ParsedEngine
from gangline.models.engines.times import EngineLoad
from gangline.models.engines.weights import engine_weights
from gangline.models.language.parsing.parser import Parsers
from gangline.node.backends.engine import Backend, BackendSpec
from gangline.settings import plugins

log = logging.getLogger("gangline.backends")

Identity = dict[str, Any]
"""Model, tokenizer and kind of log-probs: the same for all backends of a node."""

_NAMED_ELSEWHERE = frozenset({"url", "api_key", "capture"})
_TEXT_KINDS = ("auto", "openai_text")
"""Engine plug-ins that can work without token ids."""

_SAMPLE = (Message("system", (Text("Be brief."),)), Message("user", (Text("Größe? 12 🙂"),)))
"""Rendered by each backend: the same ids mean the same tokenizer and template."""


class EngineClients:
    """Makes clients of engines and probes their identity."""

    def __init__(
        self, *, capture: Literal["ids", "text"], read_secret: Callable[[str], str], probe_timeout_s: float
    ) -> None:
        """capture: for engines whose spec has none. read_secret: see `BackendPool`."""
        self._capture = capture
        self._read_secret = read_secret
        self._probe_timeout_s = probe_timeout_s

    async def make(self, url: str, spec: BackendSpec) -> Engine:
        """Returns a client of the engine. Asks the engine for its kind if the spec leaves that open.

        Raises: UnknownPlugin; InvalidRequest when the key is missing or the option is unknown; the errors of `probe`.
        """
        given: dict[str, str] = {}
        if (spec.capture or self._capture) == "text" and spec.kind in _TEXT_KINDS:
            given["capture"] = "text"
        if spec.api_key_env is not None:
            given["api_key"] = self._read_secret(spec.api_key_env)
        async with self._in_time(url):
            return await make_engine(plugins.load("engine", spec.kind), spec.kind, url, given, spec.options)

    async def probe(self, engine: Engine, url: str, *, anew: bool = True) -> tuple[EngineCapabilities, Identity]:
        """anew: probe again an engine that was probed before. Raises: EngineUnavailable, EngineIncapable."""
        async with self._in_time(url):
            found = await (engine.probe() if anew else engine.capabilities())
            ids = (await engine.render(_SAMPLE)).tobytes() if found.renders else None
        tokenizer = None if ids is None else hashlib.blake2b(ids, digest_size=8).hexdigest()
        return found, {"model": found.model, "tokenizer": tokenizer, "kind of log-probs": found.logprob_kind}

    @asynccontextmanager
    async def _in_time(self, url: str) -> AsyncGenerator[None]:
        """Raises: EngineUnavailable."""
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                yield
        except TimeoutError:
            raise EngineUnavailable(f"engine {url} did not answer a probe in {self._probe_timeout_s:g} s") from None

    async def page(self, spec: BackendSpec) -> tuple[EngineCache | None, EngineLoad | None]:
        """See `engine_page`. Raises: also InvalidRequest when the key is missing."""
        return await engine_page(spec.url, spec.api_key_env and self._read_secret(spec.api_key_env))

    async def let_go(self, backend: Backend, timeout_s: float) -> None:
        """Resume an engine that a trainer had paused. Failures are logged."""
        key = backend.spec.api_key_env
        try:
            weights = engine_weights(backend.capabilities.engine, backend.url, key and self._read_secret(key))
        except GanglineError:
            return  # no weights can be loaded into it, so it was never paused
        try:
            async with asyncio.timeout(timeout_s):
                await weights.let_go()
        except (GanglineError, TimeoutError) as error:
            log.warning("backend.not_let_go backend=%s url=%s error=%s", backend.backend_id, backend.url, error)
        finally:
            await weights.close()


def refuse_difference(url: str, found: Identity, wanted: Identity, as_what: str) -> None:
    """Raises: Conflict."""
    for name, value in wanted.items():
        if found[name] != value:
            raise Conflict(
                f"backend {url} has another {name} ({found[name]}) than {as_what} ({value}): the sessions of a node "
                "must get one model from all of its backends. Clear the others first, or start it as they are."
            )


async def make_engine(
    make: Callable[..., Engine | Awaitable[Engine]],
    kind: str,
    url: str,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Engine:
    """Returns the engine that the plug-in makes.

    given: the node's own options, such as a key.
    options: the operator's. `parsers` is passed to a plug-in that accepts it; for any other plug-in, the engine is
    wrapped and its text parsed here.

    Raises: InvalidRequest when the plug-in has no such option; errors of `make`.
    """
    known = [name for name in inspect.signature(make).parameters if name not in _NAMED_ELSEWHERE]
    wrapped = "parsers" in options and "parsers" not in known
    own = {name: value for name, value in options.items() if not (wrapped and name == "parsers")}
    unknown = sorted(set(own) - set(known))
    if unknown:
        options_known = ", ".join(sorted({*known, "parsers"}))
        raise InvalidRequest(f"engine {kind!r} has no option {unknown[0]!r}. It has: {options_known}.")
    if not wrapped:
        return await _made(make(url, **given, **own))
    names = options["parsers"]
    if not isinstance(names, Mapping):
        raise InvalidRequest('parsers must be an object such as {"thinking": "qwen3", "tools": "hermes"}.')
    parsers = Parsers.named(cast("Mapping[str, Any]", names))
    if not parsers.read_plain_text:
        named = " and ".join(sorted({name for name in (parsers.thinking, parsers.tools) if name}))
        raise InvalidRequest(
            f"the marks of {named} are special tokens, which the text of a chat route comes without: use the engine's "
            "own parsers, or its route of ids with kind generate_template."
        )
    engine = await _made(make(url, **given, **own))
    return ParsedEngine(engine, parsers) if parsers else engine


async def _made(engine: Engine | Awaitable[Engine]) -> Engine:
    return await engine if inspect.isawaitable(engine) else engine
