"""Which kind of engine is at a URL: asked, not believed. `--engine-kind auto`."""

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
    """A client of the right kind, probed: nobody is asked in between from then on.

    SGLang is recognised by its server information; any other engine is probed for ids as vLLM, whose fields others
    support too. An engine that returns none is treated as a text engine.

    Raises: EngineUnavailable when the URL does not answer; EngineIncapable when there are no ids and `capture` is not
    `text`.
    """
    http = EngineHttp(url, api_key=api_key)
    try:
        is_sglang, is_vllm = await _is_sglang(http), await _has_version(http)
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
        # A server of a known kind says best itself what it lacks. One that lists no models serves no text, either.
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


async def _is_sglang(http: EngineHttp) -> bool:
    """vLLM in its development mode has the route too, with other fields."""
    for path in ("/server_info", "/get_server_info"):
        fields = await _fields(http, path)
        if "model_path" in fields and "vllm_config" not in fields:
            return True
    return False


async def _has_version(http: EngineHttp) -> bool:
    return "version" in await _fields(http, "/version")


async def _fields(http: EngineHttp, path: str) -> dict[str, Any]:
    """Empty where the server has no such route. Raises: EngineUnavailable when nobody answers at all."""
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
