"""The routes of tenants: the use of each, and its share and quotas."""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec
from aiohttp import web

from gangline.domain.errors import InvalidRequest
from gangline.domain.ids import validated_id
from gangline.domain.tenancy import TENANT, TenantList, TenantView, UsageBy, UsageRow
from gangline.server.access import TENANT as OF_TENANT
from gangline.server.access import tenant_of
from gangline.server.service.core import WORK, RolloutService
from gangline.wire.http.negotiation import answer, path_id, read_record
from gangline.wire.http.query import Choice, Number
from gangline.wire.http.routes import Route

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_BY = Choice("by", "What to sum over; left out, `tenant`.", of=get_args(UsageBy))
_SINCE = Number("since", "Unix time: sessions that ended from then on.", high=2**53)
_UNTIL = Number("until", "Unix time: those that ended before.", default=2**53, high=2**53)


class TenantRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/tenants/{tenant}`. An absent field stays; null is no limit."""

    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1e6)] | msgspec.UnsetType = msgspec.UNSET
    max_running: _Count | msgspec.UnsetType | None = msgspec.UNSET
    max_queued: _Count | msgspec.UnsetType | None = msgspec.UNSET
    max_slot_s_per_day: _Amount | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens_per_day: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | msgspec.UnsetType | None = msgspec.UNSET


class TenantRoutes:
    def __init__(self, service: RolloutService) -> None:
        self._service = service

    async def listed(self, request: web.Request) -> web.Response:
        store = self._service.store
        return answer(request, TenantList(tenants=tuple(await store.query(store.tenants, tenant_of(request)))))

    async def change(self, request: web.Request) -> web.Response:
        name, store = path_id(request, "tenant"), self._service.store
        if not TENANT.fullmatch(name):
            raise InvalidRequest(f"a tenant's name must match {TENANT.pattern}, got {validated_id(name, 'tenant')!r}.")
        wanted = msgspec.structs.asdict(await read_record(request, TenantRequest))
        changes = {key: value for key, value in wanted.items() if value is not msgspec.UNSET}
        await store.run(store.set_tenant, name, changes)
        self._service.notifier.notify(WORK)
        return answer(request, (await store.query(store.tenants, name))[0])

    async def usage(self, request: web.Request) -> web.Response:
        store, by = self._service.store, _BY.read(request) or "tenant"
        period = _SINCE.read(request), _UNTIL.read(request)
        return answer(request, await store.query(store.usage, by, *period, tenant_of(request)))

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/v1/tenants", self.listed, "Tenants: shares, quotas, and their use.",
                  answer=TenantList, query=(OF_TENANT,), errors=(400, 401, 403)),
            Route("POST", "/v1/tenants/{tenant}", self.change, "Set a tenant's share and quotas.",
                  body=TenantRequest, answer=TenantView, errors=(400, 401, 403)),
            Route("GET", "/v1/usage", self.usage, "The use of sessions that have ended, summed up.",
                  answer=list[UsageRow], query=(_BY, _SINCE, _UNTIL, OF_TENANT), errors=(400, 401, 403, 404)),
        ]  # fmt: skip
