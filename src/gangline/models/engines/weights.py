"""A trainer's control of a running engine: pause it, load weights from a folder, set their version, resume it.

Sources, as read: vLLM 0.32 (`entrypoints/rl/online/api_router.py`, served under `VLLM_SERVER_DEV_MODE=1`; the engines
that Gangline starts have the same routes) and SGLang 0.5 (`managers/io_struct.py`, `UpdateWeightFromDiskReqInput`).

Law: after a crash between two calls, the version of the engine's tokens is unknown, never wrong.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from gangline.domain.errors import EngineIncapable, EngineRefused, EngineUnavailable
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.replies import decode

Version = int | Literal["unknown"] | None
"""None: the engine has no route for it."""

_UNKNOWN = "unknown"
_NO_ROUTE = (404, 405)


class EngineWeights(Protocol):
    """All methods may raise EngineRefused when the engine refuses, EngineUnavailable when it does not answer or
    fails."""

    keeps_calls: bool
    """Whether calls in flight may continue under new weights, with a version for each token."""

    async def version(self) -> Version:
        """Version of the weights, as the engine reports it. `unknown`: not set, for example after its start."""
        ...

    async def hold(self) -> None:
        """Stop sampling until `let_go`; calls in flight are kept. Idempotent."""
        ...

    async def load(self, folder: str, version: int) -> None:
        """Load the weights of `folder`, a path on the engine's machine. The engine must be paused.

        Raises: EngineRefused: the engine kept its previous weights. EngineUnavailable: its weights are unknown.
        """
        ...

    async def let_go(self) -> None:
        """Idempotent."""
        ...

    async def close(self) -> None: ...


def engine_weights(kind: str, url: str, api_key: str | None = None) -> EngineWeights:
    """kind: the engine's kind in `/v1/backends`. Raises: EngineIncapable when weights cannot be loaded into it."""
    http = EngineHttp(url, api_key=api_key)
    match kind:
        case "vllm" | "generate_vllm":
            return _VllmWeights(http)
        case "sglang" | "generate_sglang":
            return _SglangWeights(http)
        case _:
            raise EngineIncapable(
                f"engine {url} is of kind {kind!r}, which has no route for new weights: use vLLM (started with "
                "VLLM_SERVER_DEV_MODE=1), SGLang, or `gangline engine`."
            )


class _VllmWeights:
    keeps_calls = True

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self.close = http.close

    async def version(self) -> Version:
        return _version_of(await self._said_version())

    async def hold(self) -> None:
        await _post_or_explain(self._http, "/pause?mode=keep")

    async def load(self, folder: str, version: int) -> None:
        before = await self._said_version()
        await self._say_version(before, _UNKNOWN)
        try:
            await _post(self._http, "/collective_rpc", method="reload_weights", kwargs={"weights_path": folder})
        except EngineRefused:
            await self._say_version(before, before)
            raise
        await self._say_version(before, str(version))

    async def let_go(self) -> None:
        await _post_or_explain(self._http, "/resume")

    async def _said_version(self) -> str | None:
        """None if the engine has no version."""
        return await _weight_version(self._http, "/weight_info")

    async def _say_version(self, before: str | None, version: str | None) -> None:
        """before: the engine's previous version; None for an engine without a route to set it."""
        if before is not None:
            await _post(self._http, "/update_weight_version", new_version=_UNKNOWN if version is None else version)


class _SglangWeights:
    keeps_calls = False
    """It reports one version for a whole reply."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self.close = http.close

    async def version(self) -> Version:
        return _version_of(await _weight_version(self._http, "/get_weight_version"))

    async def hold(self) -> None:
        """With `retract` the cache of a waiting call is recomputed, so it may be emptied."""
        await _post(self._http, "/pause_generation", mode="retract")

    async def load(self, folder: str, version: int) -> None:
        """Sets weights and version in one call."""
        answer = await _post(
            self._http, "/update_weights_from_disk", model_path=folder, weight_version=str(version), flush_cache=True
        )
        loaded = decode(answer, _Loaded, self._http.url)
        if not loaded.success:
            raise EngineUnavailable(f"engine {self._http.url} did not load {folder}: {loaded.message}")

    async def let_go(self) -> None:
        await _post(self._http, "/continue_generation")


class _Loaded(msgspec.Struct):
    success: bool = False
    message: str = ""


class _Said(msgspec.Struct):
    weight_version: str | int | None = None


async def _weight_version(http: EngineHttp, path: str) -> str | None:
    try:
        version = decode(await http.get(path), _Said, http.url).weight_version
    except EngineRefused as refused:
        if refused.details.get("status") in _NO_ROUTE:
            return None
        raise
    return None if version is None else str(version)


def _version_of(reported: str | None) -> Version:
    text = (reported or "").removeprefix("v")
    if text.isascii() and text.isdecimal():
        return int(text)
    return None if reported is None else "unknown"


async def _post(http: EngineHttp, path: str, **fields: Any) -> bytes:
    return await http.post(path, msgspec.json.encode(fields))


async def _post_or_explain(http: EngineHttp, path: str) -> None:
    try:
        await _post(http, path)
    except EngineRefused as refused:
        if refused.details.get("status") in _NO_ROUTE:
            raise EngineIncapable(
                f"engine {http.url} has no route {path.partition('?')[0]}: start vLLM with VLLM_SERVER_DEV_MODE=1."
            ) from refused
        raise
