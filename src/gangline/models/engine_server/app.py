"""The application of an engine server: routes over a `Sampler`, errors in OpenAI's shape, and `run_app`.

The control routes for trainers (pause, new weights, their version, resume) follow vLLM's routes and shapes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast, get_args

from aiohttp import web
from aiohttp.typedefs import Handler

from gangline import __version__
from gangline.domain.errors import GanglineError, InvalidRequest, PortUnavailable
from gangline.models.engine_server.chat import ChatRoute, plan_chat, render_chat
from gangline.models.engine_server.completions import CompletionRoute
from gangline.models.engine_server.generate import GenerateRoute
from gangline.models.engine_server.sampler import UNKNOWN_VERSION, PauseMode, Sampler, version_text
from gangline.models.engine_server.sse import as_api_error
from gangline.models.engine_server.wire import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    RpcRequest,
    TokenizeRequest,
    VersionRequest,
    decode_request,
    encode,
)
from gangline.models.engines.http import SESSION_HEADERS
from gangline.models.language.messages import template_messages
from gangline.models.language.parsing.detect import detect_parsers
from gangline.models.language.parsing.parser import Parsers
from gangline.wire.http.listening import accepting
from gangline.wire.http.same_origin import OwnNames, is_loopback, require_json

__all__ = ["PortUnavailable", "create_app", "run_app", "serving"]

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 1024**2

BodyReader = Callable[[web.Request], Awaitable[bytes]]


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


def create_app(
    sampler: Sampler,
    *,
    dev_mode: bool = True,
    parsers: Parsers | None = None,
    read_body: BodyReader = web.Request.read,
    names: OwnNames | None = None,
) -> web.Application:
    """Build the application. It does not close the sampler.

    dev_mode: serve the control routes too (pause, weights, versions), as vLLM does under `VLLM_SERVER_DEV_MODE`.
    parsers: reply formats, by default found by probing the chat template.
    read_body: reads the body of a model call. Test doubles may replace it.
    names: host names of the server. None is loopback. Requests for other names, and from web pages, are refused.
    """
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors, _guard(names or OwnNames())])
    app.add_routes(
        _Routes(sampler, parsers if parsers is not None else detect_parsers(sampler.tokenizer), read_body).routes()
    )
    if dev_mode:
        app.add_routes(ControlRoutes(sampler).routes())
    return app


@asynccontextmanager
async def serving(app: web.Application, *, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str, None]:
    """Serve `app` inside the block. Yields its base URL. Port 0 takes any free one.

    Raises:
        PortUnavailable: the address cannot be bound.
    """
    if not is_loopback(host):
        _log.warning("engine.open host=%s: it has no key: whoever reaches it may sample, pause and load weights", host)
    # Handlers are cancelled when their client leaves, which takes an abandoned sequence out of the batch.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        assert runner.server is not None
        async with accepting(runner.server, host=host, port=port) as listeners:
            bound_port: int = listeners[0].getsockname()[1]
            yield f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"
    finally:
        await runner.cleanup()


async def run_app(
    sampler: Sampler,
    *,
    host: str,
    port: int,
    allowed_hosts: Sequence[str] = (),
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until cancelled, then close the sampler. `on_ready` receives the base URL.

    Raises:
        InvalidRequest: `allowed_hosts` has an invalid name.
        PortUnavailable: the address cannot be bound.
    """
    names = OwnNames(host, allowed_hosts=allowed_hosts)
    try:
        async with serving(create_app(sampler, names=names), host=host, port=port) as base_url:
            if on_ready is not None:
                on_ready(base_url)
            await asyncio.Event().wait()
    finally:
        await sampler.close()


class _Routes:
    def __init__(self, sampler: Sampler, parsers: Parsers, read_body: BodyReader) -> None:
        self._sampler = sampler
        self._chat = ChatRoute(sampler, parsers)
        self._completions = CompletionRoute(sampler)
        self._generate = GenerateRoute(sampler)
        self._read_body = read_body
        self._started_at = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/chat/completions/render", self.render),
            web.post("/v1/completions", self.completions),
            web.post("/inference/v1/generate", self.generate),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.get("/health", self.health),
            web.get("/version", self.version),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        chat = decode_request(await self._read_body(request), ChatRequest, self._sampler.num_ids)
        chat.session_id = request.headers.get(SESSION_HEADERS[0])
        return await self._chat.answer(request, chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        completion = decode_request(await self._read_body(request), CompletionRequest)
        completion.session_id = request.headers.get(SESSION_HEADERS[0])
        return await self._completions.answer(request, completion)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = decode_request(await self._read_body(request), GenerateRequest)
        asked.sampling_params.session_id = request.headers.get(SESSION_HEADERS[0])
        return await self._generate.answer(request, asked)

    async def render(self, request: web.Request) -> web.Response:
        """Returns the prompt ids and the sampling that a chat request would have, without sampling."""
        chat = decode_request(await request.read(), ChatRequest)
        ids = render_chat(self._sampler, chat)
        plan = plan_chat(self._sampler, chat, ids)
        sampling = {
            "max_tokens": plan.max_tokens,
            "min_tokens": plan.min_tokens,
            "temperature": plan.temperature,
            "top_p": plan.top_p,
            "top_k": plan.top_k,
            "seed": plan.seed,
            "stop_token_ids": sorted(plan.stop_ids),
        }
        return _json({"token_ids": ids, "model": self._sampler.model_name, "sampling_params": sampling})

    async def tokenize(self, request: web.Request) -> web.Response:
        asked = decode_request(await request.read(), TokenizeRequest)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError("Give prompt or messages, one of them.", param="prompt")
        tokenizer = self._sampler.tokenizer
        ids = (
            tokenizer.encode(asked.prompt)
            if asked.prompt is not None
            else tokenizer.render(
                template_messages(asked.messages or ()),
                tools=asked.tools or None,
                add_generation_prompt=asked.add_generation_prompt,
                template_kwargs=asked.chat_template_kwargs,
            )
        )
        texts = [tokenizer.decode([token_id]) for token_id in ids] if asked.return_token_strs else None
        limit = self._sampler.context_length
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

    async def detokenize(self, request: web.Request) -> web.Response:
        asked = decode_request(await request.read(), DetokenizeRequest)
        return _json({"prompt": self._sampler.tokenizer.decode(asked.tokens)})

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._sampler.model_name:
            message = f"The model `{name}` does not exist."
            raise ApiError(message, status=404, type="NotFoundError", param="model")
        return _json(self._model_card())

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": __version__})

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._sampler.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "gangline",
            "root": self._sampler.model_name,
            "max_model_len": self._sampler.context_length,
        }


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (ApiError, GanglineError) as error:
        failure = as_api_error(error)
        return _json(failure.body(), status=failure.status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        failure = ApiError(f"{request.method} {request.path}: {error.reason}", status=error.status, type="HTTPError")
        return _json(failure.body(), status=error.status)
    except web.RequestPayloadError as error:
        failure = ApiError(f"the body cannot be read: {error}; is it of its Content-Encoding?")
        return _json(failure.body(), status=failure.status)
    except Exception as error:  # last resort: any error is reported in the client's error shape
        _log.exception("engine.crashed method=%s path=%s", request.method, request.path)
        return _json(as_api_error(error).body(), status=500)


def _guard(names: OwnNames) -> Any:
    """A middleware. There is no key: any client that can connect may sample and change weights, except web pages."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health":
            names.check(request)
            require_json(request)
        return await handler(request)

    return guard


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(body=encode(body), status=status, content_type="application/json")
