"""Requests made from an OpenAPI description by schemathesis, as it allows them and as it does not; never off loopback.

Only 2xx and 4xx are right answers, and 503 where a route says that it may come; an error is a problem+json document.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

NOWHERE = "http://127.0.0.1:9"
MAX_WAIT_S = 0.05


@schemathesis.serializer("application/msgpack")
def _msgpack(_context: Any, value: Any) -> bytes:
    try:
        return value if isinstance(value, bytes) else msgspec.msgpack.encode(value, enc_hook=str)
    except OverflowError:
        return b"\xc1"  # a number that MessagePack has no form for: what no reader can read


def operations(description: dict[str, Any], *, without: frozenset[str] = frozenset()) -> list[Any]:
    """Of the description. without: `METHOD /path` of those that never end, or that end what serves them."""
    schema = schemathesis.openapi.from_dict(description)
    found = [result.ok() for result in schema.get_all_operations()]
    return [one for one in found if f"{one.method.upper()} {one.path}" not in without]


def assail(operation: Any, url: str, headers: dict[str, str], *, num_cases: int) -> None:
    """Send requests; fails with the request whose answer is wrong."""
    allowed = {int(status) for status in operation.definition.raw["responses"]}

    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

        @settings(
            max_examples=num_cases,
            deadline=None,
            database=None,
            derandomize=True,
            phases=(Phase.generate,),
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            _tame(case)
            response = case.call(base_url=url, headers=headers, timeout=20)
            told = (
                f"{operation.method} {operation.path}: {response.status_code} {response.text[:400]} {case.body!r:.300}"
            )
            assert response.status_code < 500 or response.status_code in allowed - {500}, told
            if response.status_code >= 400:
                assert response.headers["content-type"][0].startswith("application/problem+json"), told

        with suppress(Unsatisfiable):  # an operation without parameters cannot be sent wrongly
            send()


def _tame(case: Any) -> None:
    """Names of other machines become a closed port of this one; no waiting."""
    case.body = _local(case.body)
    for name in ("wait_s", "timeout_s"):
        if case.query and name in case.query:
            case.query[name] = _short(case.query[name])
        if isinstance(case.body, dict) and name in case.body:
            case.body[name] = _short(case.body[name])


def _short(value: Any) -> Any:
    return MAX_WAIT_S if isinstance(value, int | float) and value > MAX_WAIT_S else value


def _local(value: Any) -> Any:
    if isinstance(value, str) and value.lower().startswith(("http:", "https:")):
        return NOWHERE
    if isinstance(value, dict):
        return {name: _local(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_local(inner) for inner in value]
    return value


@contextmanager
def on_a_thread(serve: Callable[[Callable[[str], None]], Coroutine[Any, Any, None]]) -> Generator[str]:
    """Run `serve(on_ready)` on an event loop of its own; gives what it says when it is ready."""
    ready = threading.Event()
    said: list[str] = []
    loop = asyncio.new_event_loop()
    failed: list[BaseException] = []

    def on_ready(url: str) -> None:
        said.append(url)
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    task = loop.create_task(serve(on_ready))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert ready.wait(60)
        if failed:
            raise failed[0]
        yield said[0]
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        if failed:
            raise failed[0]


def names_of(found: list[Any]) -> Iterator[str]:
    return (f"{one.method.upper()} {one.path}" for one in found)
