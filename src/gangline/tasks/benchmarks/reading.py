"""Makes tasks of a benchmark, as the catalogue says."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.imported import Imported, LeftOut
from gangline.tasks.benchmarks.bringing import brought, missing
from gangline.tasks.benchmarks.catalogue import Benchmark
from gangline.tasks.importers.source import Wanted, read_source
from gangline.tasks.presets.preset import find_preset


def read_benchmark(
    one: Benchmark, wanted: Wanted, given: Path | None, check: Callable[[Imported], object] = lambda one: None
) -> Generator[Imported | LeftOut]:
    """The tasks, with the benchmark and its revision in their metadata. A copy that is not whole is said at the end.

    wanted: how many, which, and where they run. given: the user's copy of the files.

    Raises: InvalidRequest, as `brought` and `read_source` do; also for options that the catalogue decides.
    """
    if wanted.format or wanted.preset or wanted.mapping or wanted.registry:
        raise InvalidRequest(f"{one.name}: --format, --preset, --map and --registry are decided by the catalogue.")
    if one.kind == "program" and wanted.choices.python is None:
        raise missing(one, "", "it is listed and graded by its own program, in a Python environment that has it")
    path = brought(one, given, wanted.split)
    how = msgspec.structs.replace(
        wanted,
        format=one.format,
        preset=None if one.preset is None else find_preset(one.preset),
        mapping=one.map,
        split=None,
        files=one.pattern(wanted.split) or None,
        name=one.name if wanted.split in (None, *one.splits[:1]) else f"{one.name}-{wanted.split}",
    )
    num = 0
    for found in read_source(path, how, check):
        num += 1
        yield _marked(one, found, wanted.split, given) if isinstance(found, Imported) else found
    is_all = wanted.limit is None and not wanted.filters and wanted.split in (None, *one.splits[:1])
    if is_all and num != one.tasks and one.is_pinned:
        yield LeftOut(f"{path}: holds {num:,} tasks, and {one.name} has {one.tasks:,}: it is not that revision, or cut")


def _marked(one: Benchmark, found: Imported, split: str | None, given: Path | None) -> Imported:
    about = {"name": one.name, "revision": None if given else one.revision, "split": split or "".join(one.splits[:1])}
    body: dict[str, Any] = {**found.body, "metadata": {**found.body["metadata"], "benchmark": about}}
    if one.ask:
        body["instruction"] = f"{body['instruction'].rstrip()}\n\n{one.ask}"
    pinned = () if one.is_pinned else (f"{one.name}: {one.revision} is not pinned: its tasks may change",)
    return msgspec.structs.replace(found, body=body, notes=(*found.notes, *pinned))
