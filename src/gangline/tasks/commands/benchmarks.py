"""`gangline tasks names`: the benchmarks that have a name; and their tasks, for `gangline eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gangline.cli.terminal.output import JsonOption, console, print_json
from gangline.tasks.commands.importing import Made, check, network_policy


def names(as_json: JsonOption = False) -> None:
    """List the benchmarks that `gangline tasks from NAME` and `gangline eval NAME` know, with what each needs."""
    from gangline.tasks.benchmarks.catalogue import catalogue

    found = list(catalogue().values())
    if as_json:
        print_json([{**msgspec.to_builtins(one), "url": one.url, "is_pinned": one.is_pinned} for one in found])
        return
    from gangline.cli.terminal.tables import FactTable, prose

    table = FactTable("name", "tasks", "grader", prose("about"), prose("licence"), prose("needs"))
    for one in found:
        table.add_row(one.name, f"{one.tasks:,}", one.grader, one.about, one.license, one.needs)
    console().print(table)


def benchmark_tasks(
    source: str, limit: int | None, split: str | None, given: Path | None, python: str | None, network: str | None
) -> list[dict[str, Any]] | None:
    """The tasks of the benchmark that is named, each with an agent; None if a file is meant.

    Raises: InvalidRequest.
    """
    from gangline.machine.reading.imported import Choices
    from gangline.tasks.benchmarks.catalogue import named_benchmark
    from gangline.tasks.benchmarks.reading import read_benchmark
    from gangline.tasks.importers.source import Wanted

    is_certain = any(option is not None for option in (given, split, python, network))
    if (named := named_benchmark(source, is_certain=is_certain)) is None:
        return None
    wanted = Wanted(choices=Choices(python=python, network=network_policy(network)), split=split, limit=limit)
    made = Made(read_benchmark(named, wanted, given, check), named.prefix)
    made.report(None)
    return [{"agent": named.agent or {"harness": "native"}, **body} for body in made.bodies]
