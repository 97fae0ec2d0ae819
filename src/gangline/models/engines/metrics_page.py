"""The samples of an engine's metrics page, in Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(page: bytes, names: tuple[str, ...]) -> Iterator[Sample]:
    """Those with one of the names. Lines that cannot be read are left out, and the many others are not parsed."""
    for line in page.decode(errors="replace").split("\n"):
        if line.startswith(names):
            with suppress(ValueError, IndexError):  # the parser's, by its input
                for family in text_string_to_metric_families(line):
                    yield from (sample for sample in family.samples if sample.name in names)
