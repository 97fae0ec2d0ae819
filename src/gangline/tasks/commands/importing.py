"""`gangline tasks from`: converts other systems' tasks and dataset rows to tasks for `gangline submit` and `vet`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec

from gangline.cli.terminal.output import JsonOption, notes, print_json
from gangline.domain.errors import InvalidRequest, UnknownPlugin
from gangline.tasks.commands.source_options import (
    FilterOption,
    FormatOption,
    FromOption,
    ImageOption,
    LimitOption,
    LogParserOption,
    MapOption,
    NetworkOption,
    OutOption,
    PrefixOption,
    PresetOption,
    PythonOption,
    RegistryOption,
    RepositoriesOption,
    RuntimeOption,
    SourceArgument,
    SplitOption,
    StrictOption,
    TestCommandOption,
)

if TYPE_CHECKING:
    from gangline.domain.task import NetworkPolicy
    from gangline.machine.reading.imported import Imported, LeftOut
    from gangline.tasks.presets.preset import Preset

_MAX_SHOWN_NOTES = 10
_LONGEST_ID_CHARS = 100
"""An id may have 128; evaluations and sessions append to it."""


def from_source(
    source: SourceArgument,
    given: FromOption = None,
    kind: FormatOption = None,
    limit: LimitOption = None,
    filters: FilterOption = None,
    out: OutOption = None,
    prefix: PrefixOption = None,
    preset: PresetOption = None,
    mapping: MapOption = None,
    split: SplitOption = None,
    runtime: RuntimeOption = None,
    image: ImageOption = None,
    network: NetworkOption = None,
    python: PythonOption = None,
    registry: RegistryOption = None,
    repositories: RepositoriesOption = None,
    test_command: TestCommandOption = None,
    log_parser: LogParserOption = None,
    strict: StrictOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make tasks of other systems' tasks and of datasets, one JSON object a line, for `gangline submit` and `vet`.

    Task ids are the names in the source; its fields are kept in the metadata, and its solution if it has one. The tasks
    have no agent yet. Rows that cannot be read or graded are left out and reported on stderr; with --strict nothing is
    written then. With --json stdout is one document: `tasks`, or with --out their number, `left_out` and `notes`.
    """
    from gangline.machine.reading.imported import Choices
    from gangline.tasks.benchmarks.catalogue import named_benchmark
    from gangline.tasks.benchmarks.reading import read_benchmark
    from gangline.tasks.importers.plain.mapping import parsed_mapping
    from gangline.tasks.importers.source import FORMATS, Format, Wanted, read_source
    from gangline.tasks.importers.swe import InstanceChoices

    wanted = Wanted(
        choices=Choices(runtime=runtime, image=image, python=python, network=network_policy(network)),
        instances=InstanceChoices(repositories=repositories, test_command=test_command, log_parser=log_parser),
        format=cast("Format | None", _one_of("--format", kind, FORMATS)),
        preset=None if preset is None else found_preset(preset),
        mapping=parsed_mapping(mapping or []),
        split=split,
        registry=registry,
        filters=tuple(filters or ()),
        limit=limit,
    )
    named = None if registry else named_benchmark(source, is_certain=given is not None)
    if named is None:
        made = Made(read_source(Path(source), wanted, check), prefix)
    else:
        made = Made(read_benchmark(named, wanted, given, check), prefix or named.prefix)
    _put(made, out, strict=strict, as_json=as_json)


def _put(made: Made, out: Path | None, *, strict: bool, as_json: bool) -> None:
    """Raises: InvalidRequest."""
    if strict:
        made.refuse_left_out()
    if out is not None:
        made.write(out)
    if as_json:
        print_json(made.document(with_tasks=out is None))
        return
    if out is None:
        for body in made.bodies:
            sys.stdout.write(msgspec.json.encode(body).decode() + "\n")
    made.report(out)


class Made:
    """The tasks of one source."""

    def __init__(self, found: Iterable[Imported | LeftOut], prefix: str | None) -> None:
        """Raises: InvalidRequest, naming file, row and field."""
        from gangline.machine.reading.imported import Imported

        self.bodies: list[dict[str, Any]] = []
        self._notes: dict[str, None] = {}
        self._left_out: list[str] = []
        ids = _Ids(prefix)
        for one in found:
            if isinstance(one, Imported):
                self._notes |= dict.fromkeys(one.notes)
                self.bodies.append({"task_id": ids.of(one.name), **one.body})
            else:
                self._left_out.append(one.why)
        if ids.num_renamed:
            self._notes[f"{ids.num_renamed} tasks have a name that another has too: their ids end in -2, -3, ..."] = (
                None
            )

    def refuse_left_out(self) -> None:
        """Raises: InvalidRequest when a row was left out."""
        if self._left_out:
            _show_some(self._left_out)
            raise InvalidRequest(f"--strict: {len(self._left_out)} rows would be left out; nothing was written.")

    def write(self, out: Path) -> None:
        """Raises: InvalidRequest."""
        try:
            out.write_bytes(b"".join(msgspec.json.encode(body) + b"\n" for body in self.bodies))
        except OSError as error:
            raise InvalidRequest(f"--out {out}: {error.strerror}.") from error

    def document(self, *, with_tasks: bool) -> dict[str, Any]:
        tasks = {"tasks": self.bodies} if with_tasks else {"num_tasks": len(self.bodies)}
        return {**tasks, "left_out": self._left_out, "notes": list(self._notes)}

    def report(self, out: Path | None) -> None:
        """Report differences from the source, and omitted rows, on stderr."""
        _show_some(self._notes)
        _show_some(f"left out: {why}" for why in self._left_out)
        parts = [f"{len(self.bodies)} tasks{'' if out is None else f' in {out}'}"]
        if self._left_out:
            parts.append(f"{len(self._left_out)} rows left out (--strict refuses them)")
        notes().print(", ".join(parts), markup=False, soft_wrap=True, style="dim")


class _Ids:
    """Creates unique task ids from names."""

    def __init__(self, prefix: str | None) -> None:
        self._prefix = "" if prefix is None else f"{prefix}-"
        self._taken: set[str] = set()
        self.num_renamed = 0

    def of(self, name: str) -> str:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self._prefix + name).lstrip("-._")[:_LONGEST_ID_CHARS] or "task"
        number = 1
        found = plain
        while found in self._taken:
            number += 1
            found = f"{plain}-{number}"
        self._taken.add(found)
        self.num_renamed += number > 1
        return found


def check(one: Imported) -> None:
    """Raises: InvalidRequest if the task, apart from its agent, would be rejected at submit."""
    from gangline.cli.tasks.files import validated

    validated({**one.body, "agent": {"harness": "shell", "settings": {"command": "true"}}}, one.name)


def _show_some(lines: Iterable[str]) -> None:
    shown = list(lines)
    for line in shown[:_MAX_SHOWN_NOTES]:
        notes().print(line, markup=False, soft_wrap=True, style="dim")
    if len(shown) > _MAX_SHOWN_NOTES:
        notes().print(f"... and {len(shown) - _MAX_SHOWN_NOTES} more of that kind", style="dim")


def network_policy(given: str | None) -> NetworkPolicy | None:
    """Raises: InvalidRequest."""
    from gangline.domain.task import NetworkPolicy

    return cast("NetworkPolicy | None", _one_of("--network", given, get_args(NetworkPolicy)))


def _one_of(option: str, given: str | None, known: tuple[str, ...]) -> str | None:
    if given is not None and given not in known:
        raise InvalidRequest(f"{option} {given}: must be one of {', '.join(known)}.")
    return given


def found_preset(name: str) -> Preset:
    """Raises: UnknownPlugin."""
    from gangline.tasks.presets.preset import PRESETS, find_preset

    if (found := find_preset(name)) is None:
        raise UnknownPlugin.named("preset", name, [preset.name for preset in PRESETS])
    return found
