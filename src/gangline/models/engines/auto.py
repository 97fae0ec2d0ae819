"""Detects the kind of engine at a URL, by probing it. `--engine-kind auto`."""

from __future__ import annotations

from typing import Any

from gangline.domain.errors import EngineError, EngineIncapable, EngineRefused, EngineUnavailable
from gangline.models.engines.contract import Engine
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.replies import decode
from gangline.models.engines.sglang.engine import SglangEngine
from gangline.models.engines.text.engine import Capture, OpenAITextEngine
from gangline.models.engines.vllm.engine import VllmEngine


async def detect_engine(url: str, *, capture: Capture = "ids", api_key: str | None = None) -> Engine:
    """Returns a probed client of the right kind, which talks to the engine directly.

    SGLang is recognised by its server information. Any other engine is probed for ids as vLLM, whose fields others
    support too. An engine that returns no ids is treated as a text engine.

    Raises: EngineUnavailable when the URL does not answer; EngineIncapable when it returns no ids and `capture` is not
    `text`.
    """
    http = EngineHttp(url, api_key=api_key)
    try:
        is_sglang, is_vllm = await speaks_sglang(http), await _has_version(http)
    finally:
        await http.close()
    engine: Engine = SglangEngine(url, api_key=api_key) if is_sglang else VllmEngine(url, api_key=api_key)
    try:
        return await _probed(engine)
    except (EngineIncapable, EngineRefused) as error:
        if error.details.get("status") in (401, 403):
            raise EngineRefused(
                f"{error.message}: it wants a key. Say which environment variable holds it (`--engine-key-env`, or "
                "`--key-env` where it is added)."
            ) from error
        # For a known kind, its own error is the clearest. A server that lists no models serves no text either.
        if (capture != "text" and (is_sglang or is_vllm)) or error.details.get("lists_models") is False:
            raise
    return await _probed(OpenAITextEngine(url, capture=capture, api_key=api_key))


async def _probed(engine: Engine) -> Engine:
    try:
        await engine.probe()
    except BaseException:
        await engine.close()
        raise
    return engine


async def speaks_sglang(http: EngineHttp) -> bool:
    """Whether the server is SGLang. vLLM in development mode has the route too, with other fields."""
    for path in ("/server_info", "/get_server_info"):
        fields = await _fields(http, path)
        if "model_path" in fields and "vllm_config" not in fields:
            return True
    return False


async def _has_version(http: EngineHttp) -> bool:
    return "version" in await _fields(http, "/version")


async def _fields(http: EngineHttp, path: str) -> dict[str, Any]:
    """Empty if the server has no such route. Raises: EngineUnavailable when it does not answer at all."""
    try:
        body = await http.get(path)
    except EngineUnavailable as error:
        if error.details.get("status") is None:
            raise
        return {}
    except EngineError:
        return {}
    try:
        return decode(body, dict[str, Any], http.url)
    except EngineUnavailable:
        return {}
