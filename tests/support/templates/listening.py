"""Writes down the model calls that a node answers: each request as it came, and the reply that it got."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from gangline.node.calls import proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec

__all__ = ["listen"]


def listen(to: Path) -> None:
    """From now on every call of this process's nodes is a line of the file `to`."""
    raw: dict[int, dict[str, Any]] = {}
    flights: dict[int, Any] = {}
    read_here, subscribe = proxy.read_here, ModelSession.subscribe
    answer = proxy.Proxy._call  # pyright: ignore[reportPrivateUsage]

    def reading(dialect: Any, request: Any, kind: Any, path: str, limits: Any) -> Any:
        read = read_here(dialect, request, kind, path, limits)
        if kind == "call":
            known = {name: value for name, value in request.headers.items() if name == "anthropic-beta"}
            raw[id(read.call)] = {
                "dialect": dialect.name,
                "path": path,
                "params": dict(request.params),
                "query": {name: value for name, value in request.query.items() if name != "key"},
                "headers": known,
                "body": json.loads(request.body),
            }
        return read

    def subscribing(session: ModelSession, call: Any, *rest: Any) -> Any:
        subscription = subscribe(session, call, *rest)
        flights[id(call)] = subscription.flight
        return subscription

    async def answering(self: Any, request: Any, session: ModelSession, dialect: Any, read: Any) -> Any:
        response = await answer(self, request, session, dialect, read)
        flight = flights.pop(id(read.call))
        reply = (await flight.reply()).choices[0].message
        spec: SessionSpec = session.spec
        line = {"session": spec.session_id, **raw.pop(id(read.call)), "key": flight.record_key}
        with to.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"reply": msgspec.to_builtins(reply)}) + "\n")
        return response

    proxy.read_here, proxy.is_large = reading, _never
    session_class: Any = ModelSession
    session_class.subscribe, proxy.Proxy._call = subscribing, answering  # pyright: ignore[reportPrivateUsage]


def _never(_pieces: Any) -> bool:
    """Another process would not be heard."""
    return False
