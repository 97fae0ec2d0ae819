"""The SGLang engines behind the router of slime or miles: their addresses and the version of their weights.

Source: slime's `slime/ray/rollout.py` (`args.sglang_router_ip`, `args.sglang_model_routers`) and `sglang_engine.py`
(the router's workers, `/get_weight_version`); sglang-router 0.3.2; miles's `miles/router/router.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from gangline.domain.errors import EngineIncapable, EngineUnavailable, InvalidRequest, WeightsNotLoaded
from gangline.models.engines.http import EngineHttp
from gangline.models.engines.replies import decode
from gangline.models.engines.weights import Version, engine_weights

_log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0


class _Worker(msgspec.Struct):
    url: str
    worker_type: str = "regular"


class _Workers(msgspec.Struct):
    """Answer of `GET /workers` of sglang-router."""

    workers: list[_Worker]


class _Urls(msgspec.Struct):
    """Answer of `GET /list_workers` of miles's own router."""

    urls: list[str]


class Router:
    """url: without a path. lists_urls: whether it is miles's own (`--use-miles-router`), which lists only URLs."""

    def __init__(self, url: str, *, lists_urls: bool = False) -> None:
        self.url = url
        self._lists_urls = lists_urls
        self._http = EngineHttp(url, timeout_s=_TIMEOUT_S)

    async def engines(self) -> list[str]:
        """URLs of the engines, bypassing the router: a stock router drops the ids that rows need.

        Raises: EngineUnavailable; EngineIncapable if prefill and decode are separate.
        """
        if self._lists_urls:
            found = decode(await self._http.get("/list_workers"), _Urls, self.url).urls
        else:
            workers = decode(await self._http.get("/workers"), _Workers, self.url).workers
            if apart := [worker for worker in workers if worker.worker_type != "regular"]:
                raise EngineIncapable(
                    f"engine {apart[0].url} only does {apart[0].worker_type}: nodes ask engines directly, so prefill "
                    "and decode must be in one (no --prefill-num-servers, no such groups in --sglang-config)."
                )
            found = [worker.url for worker in workers]
        if not found:
            raise EngineUnavailable(f"router {self.url} lists no engine: the trainer has started none, or they died.")
        return sorted({url.rstrip("/") for url in found})

    async def close(self) -> None:
        await self._http.close()


def router_of(args: Any, model: str | None = None) -> Router:
    """The router of the trained model.

    model: its name in `--sglang-config`; needed if that lists several. Raises: InvalidRequest.
    """
    routers: dict[str, tuple[str, int]] = getattr(args, "sglang_model_routers", None) or {}
    if model is None and len(routers) > 1:
        raise InvalidRequest(
            f"the trainer serves several models ({', '.join(routers)}): name the one that is trained "
            "(`SupplySettings(model=...)`)."
        )
    if model is not None and routers and model not in routers:
        raise InvalidRequest(f"the trainer serves no model {model!r}, but {', '.join(routers)}.")
    ip, port = routers[model] if model is not None and routers else (_of(args, "ip"), _of(args, "port"))
    if ip is None or port is None:
        raise InvalidRequest(
            "the trainer names no router (args.sglang_router_ip), so its engines cannot be given to nodes. Give the "
            "rollout `supply=None` where nodes have their engines already and nothing changes their weights."
        )
    return Router(f"http://{ip}:{port}", lists_urls=bool(getattr(args, "use_miles_router", False)))


def _of(args: Any, what: str) -> Any:
    return getattr(args, f"sglang_router_{what}", None)


async def weight_version(urls: Sequence[str], *, kind: str = "sglang") -> tuple[list[str], int | None]:
    """(engines that answer, policy version of their weights; None if it was never set or is not reported).

    Raises: EngineUnavailable if no engine answers, WeightsNotLoaded if versions differ.
    """
    answers = await asyncio.gather(*(_version(url, kind) for url in urls), return_exceptions=True)
    versions: dict[str, Version] = {}
    for url, version in zip(urls, answers, strict=True):
        if isinstance(version, EngineUnavailable):
            _log.warning("engines.silent url=%s error=%s", url, version)
        elif isinstance(version, BaseException):
            raise version
        else:
            versions[url] = version
    if not versions:
        raise EngineUnavailable(f"none of the trainer's engines answers: {', '.join(urls)}.")
    if len(set(versions.values())) > 1:
        what = ", ".join(f"{url} has {version}" for url, version in versions.items())
        raise WeightsNotLoaded(f"the trainer's engines have different weights: {what}.")
    version = next(iter(versions.values()))
    return list(versions), version if isinstance(version, int) else None


async def _version(url: str, kind: str) -> Version:
    weights = engine_weights(kind, url)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await weights.version()
    except TimeoutError:
        raise EngineUnavailable(f"engine {url} did not tell its version in {_TIMEOUT_S:g} s.") from None
    finally:
        await weights.close()
