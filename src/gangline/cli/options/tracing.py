"""Starts traces if `OTEL_EXPORTER_OTLP_ENDPOINT` names a collector; requires the extra."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from gangline.domain.errors import InvalidRequest
from gangline.settings.installation import extra_command
from gangline.settings.machine import Settings

if TYPE_CHECKING:
    from gangline.machine.telemetry.traces import Traces


@contextmanager
def traces_of(service: Literal["server", "node"], settings: Settings) -> Generator[Traces | None]:
    """None if no collector is configured. Pending spans are sent at the end of the block.

    Raises: InvalidRequest when a collector is configured and the extra is missing.
    """
    if settings.otel_endpoint is None:
        yield None
        return
    try:
        from gangline.machine.telemetry.traces import Traces
    except ImportError as error:
        raise InvalidRequest(
            f"OTEL_EXPORTER_OTLP_ENDPOINT is set, and {error.name} is not installed. Unset it, or run: "
            f"{extra_command('otel')}"
        ) from error
    traces = Traces.to_collector(service)
    try:
        yield traces
    finally:
        traces.close()
