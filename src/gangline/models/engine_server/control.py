"""A trainer's control of an engine: pause, new weights, their version, resume. vLLM's routes and shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.models.engine_server.sampler import UNKNOWN_VERSION, PauseMode, Sampler, version_text
from gangline.models.engine_server.wire import ApiError, RpcRequest, VersionRequest, decode_request

__all__ = ["ControlRoutes"]


class ControlRoutes:
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._is_paused = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/collective_rpc", self.collective_rpc),
            web.post("/update_weight_version", self.update_weight_version),
            web.get("/weight_info", self.weight_info),
        ]

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise ApiError(f"mode {mode!r} is not one of {', '.join(get_args(PauseMode))}.", param="mode")
        await self._sampler.pause(cast("PauseMode", mode))
        self._is_paused = True
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        await self._sampler.resume()
        self._is_paused = False
        return web.json_response({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._is_paused})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        rpc = decode_request(await request.read(), RpcRequest)
        if rpc.method != "reload_weights":
            raise ApiError(f"method {rpc.method!r} is not known; this engine has reload_weights.", param="method")
        try:
            await self._sampler.load_weights(_weights_folder(rpc.kwargs))
        except (InvalidRequest, OSError, ValueError, KeyError) as error:
            message = f"The weights were not loaded, the old ones are kept: {error}"
            raise ApiError(message, param="kwargs.weights_path") from None
        return web.json_response({"results": [None]})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        new_version = decode_request(await request.read(), VersionRequest).new_version
        is_unknown = new_version == version_text(UNKNOWN_VERSION)
        if not is_unknown and not (new_version.isascii() and new_version.isdigit()):
            message = f"new_version must be a whole number as text, or `unknown`, got {new_version!r}."
            raise ApiError(message, param="new_version")
        await self._sampler.set_version(UNKNOWN_VERSION if is_unknown else int(new_version))
        return web.json_response({"success": True, "new_version": new_version})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": version_text(self._sampler.weight_version)})


def _weights_folder(kwargs: dict[str, Any]) -> Path:
    path: object = kwargs.get("weights_path")
    if not isinstance(path, str) or not path:
        raise ApiError("kwargs.weights_path must be a path.", param="kwargs.weights_path")
    return Path(path)
