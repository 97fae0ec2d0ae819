"""Annotations: a verdict and a note on a session, and the dataset it belongs to."""

from __future__ import annotations

from functools import partial
from typing import Annotated, get_args

import msgspec
from aiohttp import web

from gangline.domain.ids import ID_PATTERN
from gangline.domain.views import Annotation, AnnotationPage, Verdict
from gangline.server.access import TENANT, tenant_of
from gangline.server.service.core import RolloutService
from gangline.wire.http.negotiation import answer, path_id, read_record
from gangline.wire.http.query import Choice, Text, Whole, given
from gangline.wire.http.routes import VISITOR, Route, given_token, who

MAX_NOTE_CHARS = 10_000


class AnnotationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An annotation of a session."""

    verdict: Verdict | None = None
    note: Annotated[str, msgspec.Meta(max_length=MAX_NOTE_CHARS)] = ""
    call: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    """Number of the call it is about; the whole session if left out."""
    dataset: Annotated[str, msgspec.Meta(pattern=rf"(^$|{ID_PATTERN})(?!\n)")] = ""
    """Name of the set of sessions it belongs to."""


class AnnotationRoutes:
    def __init__(self, service: RolloutService) -> None:
        self._service = service

    async def annotate(self, request: web.Request) -> web.Response:
        fields = msgspec.structs.asdict(await read_record(request, AnnotationRequest))
        fields["by"] = VISITOR.get() or who(given_token(request, password_too=False))
        store = self._service.store
        return answer(request, await store.run(store.annotate, path_id(request, "session_id"), fields))

    async def annotations(self, request: web.Request) -> web.Response:
        store = self._service.store
        return answer(
            request,
            await store.query(
                partial(store.annotations, **given(request, _ANNOTATIONS) | {"tenant": tenant_of(request)})
            ),
        )

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/sessions/{session_id}/annotations", self.annotate, "Say something of a session.",
                  body=AnnotationRequest, answer=Annotation, errors=(400, 401, 404)),
            Route("GET", "/v1/annotations", self.annotations, "What was said of sessions, newest first.",
                  answer=AnnotationPage, query=_ANNOTATIONS),
        ]  # fmt: skip


_LIMIT = Whole("limit", "Length of the page.", default=50, low=1, high=1000)
_BEFORE = Whole("before", "The `next` of the page above.", default=2**53, high=2**53)
_SESSION_ID = Text("session_id", "Only of this session.")
_DATASET = Text("dataset", "Only of this dataset; empty selects those of none.")
_VERDICT = Choice("verdict", "Only with this verdict.", get_args(Verdict))
_ANNOTATIONS = (_LIMIT, _BEFORE, _SESSION_ID, _DATASET, _VERDICT, TENANT)
