"""An engine's metrics page, in Prometheus text format, and its samples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gangline.domain.errors import EngineRefused, EngineUnavailable
from gangline.models.engines.http import EngineHttp

_PATIENCE_S = 5.0


async def read_page(url: str, api_key: str | None) -> bytes | None:
    """None if the engine has no such page. Raises: EngineError, when it does not answer within a few seconds too."""
    http = EngineHttp(url, api_key=api_key)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await http.get("/metrics")
    except EngineRefused:
        return None
    except TimeoutError:
        raise EngineUnavailable(f"engine {url} did not answer for its metrics in {_PATIENCE_S:g} s") from None
    finally:
        await http.close()


def samples(page: bytes, names: tuple[str, ...]) -> Iterator[Sample]:
    """Those with one of the names. Lines that cannot be read are left out, and the many others are not parsed."""
    for line in page.decode(errors="replace").split("\n"):
        if line.startswith(names):
            with suppress(ValueError, IndexError):  # the parser's, by its input
                for family in text_string_to_metric_families(line):
                    yield from (sample for sample in family.samples if sample.name in names)
