"""`gangline doctor`: this machine's capabilities, its gaps, and the command that closes each.

Includes the check of the Python that agents run with, as a sandbox sees it, and the checks of the data folder: who can
read or replace it, and whether sandboxes see it.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from gangline.cli.machine.checks import Check
from gangline.cli.terminal.exits import Exit
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, print_json, printable
from gangline.cli.terminal.tables import FactTable, prose
from gangline.domain.errors import GanglineError, OtherVersion
from gangline.domain.ids import new_id
from gangline.domain.sandbox import ExecResult, RuntimeStart
from gangline.domain.task import LimitsSpec, RuntimeSpec
from gangline.sandbox.bubblewrap.command_line import HOST_ROOTS
from gangline.settings.machine import Settings
from gangline.settings.plugins import make_runtime
from gangline.store.journal.marker import check_journal
from gangline.store.sql.database import check_database

if TYPE_CHECKING:
    from gangline.cli.machine.checks import Check

_MARKS = {"ok": "[green]ok[/]", "optional": "[yellow]optional[/]", "missing": "[bold red]missing[/]"}

_SDKS = ("openai", "anthropic", "google.genai", "langgraph", "pydantic_ai", "agents", "smolagents", "mcp")
_LOOK = f"""
import importlib.util, json, platform, sys
def can_import(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
found = [name for name in {_SDKS!r} if can_import(name)]
print(json.dumps({{"version": platform.python_version(), "path": sys.executable, "modules": found}}))
"""
_TIMEOUT_S = 30.0
_NAME = "agents' python"

_SHOWN = 5
_MAX_LOOKED_AT = 20_000


def check_data_folder(settings: Settings) -> Check:
    folder = settings.data_dir.absolute()
    found: list[str] = []
    advice: list[str] = []
    try:
        check_database(settings.database_url or folder / "server" / "gangline.db")
    except OtherVersion as error:
        return Check(
            name="data folder", state="missing", found="the database is of a newer version", advice=error.message
        )
    for journal in sorted(folder.glob("nodes/*/journal")):
        try:
            check_journal(journal)
        except OtherVersion as error:
            return Check(name="data folder", state="missing", found="a journal is unreadable", advice=error.message)
    if readable := list(islice(_readable(folder), _SHOWN + 1)):
        names = ", ".join(str(path) for path in readable[:_SHOWN]) + (" and more" if len(readable) > _SHOWN else "")
        found.append(f"other users can read {names}")
        advice.append(f"chmod -R go= {folder}")
    if loose := [str(parent) for parent in folder.parents if _replaceable_in(parent)]:
        found.append(f"other users can replace it, by {', '.join(loose)}")
        advice.append(f"chmod o-w {' '.join(loose)}, or choose another folder with --data")
    if seen := [str(root) for root in _seen_by_sandboxes(settings) if root in (folder, *folder.parents)]:
        found.append(f"it is in {', '.join(seen)}, which sandboxes see")
        advice.append("choose a folder elsewhere with --data or GANGLINE_DATA: it is masked there, and needs no mask")
    if found:
        return Check(name="data folder", state="optional", found="; ".join(found), advice="; ".join(advice))
    return Check(name="data folder", state="ok", found=f"{folder} is closed to other users and to sandboxes")


def _readable(folder: Path) -> Iterator[Path]:
    """Files that others can reach and read. The content of a closed folder and sandboxes' files are left out."""
    if not folder.is_dir() or any(not _mode(parent) & stat.S_IXOTH for parent in folder.parents):
        return
    looked_at = 0
    waiting = [folder]
    while waiting and looked_at < _MAX_LOOKED_AT:
        path = waiting.pop()
        mode = _mode(path)
        looked_at += 1
        if mode & stat.S_IROTH:
            yield path
        if mode & (stat.S_IXOTH | stat.S_IXGRP) and path.is_dir() and path.name != "runtimes":
            waiting += _within(path)


def _within(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if not entry.is_symlink()]
    except OSError:
        return []


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0


def _replaceable_in(parent: Path) -> bool:
    """Whether others may rename entries of a folder that all may write to. With the sticky bit, as in /tmp, only owners
    may."""
    mode = _mode(parent)
    return bool(mode & (stat.S_IWOTH)) and not mode & stat.S_ISVTX


def _seen_by_sandboxes(settings: Settings) -> Iterator[Path]:
    yield from (Path("/") / name for name in HOST_ROOTS)
    yield from (path.absolute() for path in settings.expose)


class _Interpreter(msgspec.Struct, frozen=True):
    version: str
    path: str
    modules: tuple[str, ...]


def check_agent_python(python: Path | None) -> Check:
    """Start `python3` in a sandbox. python: the environment of `submit --python`; None is the usual interpreter."""
    try:
        with tempfile.TemporaryDirectory(prefix="gangline-doctor-") as folder:
            result = asyncio.run(_look(Path(folder), None if python is None else str(python.absolute())))
    except GanglineError as error:
        return Check(name=_NAME, state="optional", found="cannot be examined", advice=error.message)
    if not result.ok:
        last_line = result.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        advice = "let every user read the environment (chmod -R a+rX), or name another one with --python VENV"
        return Check(name=_NAME, state="missing" if python else "optional", found=last_line[0][:300], advice=advice)
    found = msgspec.json.decode(result.stdout, type=_Interpreter)
    modules = f"imports {', '.join(found.modules)}" if found.modules else "imports none of the common SDKs"
    advice = "" if found.modules else "give agents an environment with their packages: gangline submit --python VENV"
    state = "ok" if found.modules else "optional"
    return Check(name=_NAME, state=state, found=f"{found.version} at {found.path}; {modules}", advice=advice)


async def _look(folder: Path, python: str | None) -> ExecResult:
    """Raises: GanglineError when the sandbox does not start, or the folder is not a Python environment."""
    runtime = make_runtime("sandbox")
    limits = LimitsSpec(**dict.fromkeys(LimitsSpec.model_fields))
    spec = RuntimeSpec(network="none", limits=limits, python=python)
    start = RuntimeStart(runtime_id=new_id("doctor"), owner="doctor", spec=spec, folder=folder / "sandbox")
    sandbox = await runtime.start(start)
    try:
        return await sandbox.exec(["python3", "-c", _LOOK], timeout_s=_TIMEOUT_S)
    finally:
        await sandbox.stop()


def _print(checks: list[Check]) -> None:
    table = FactTable("", "state", prose("found, and what to do"))
    for check in checks:
        advice = Text.assemble("\n", ("->", "bold"), f" {printable(check.advice)}") if check.advice else ""
        table.add_row(check.name, Text.from_markup(_MARKS[check.state]), Text.assemble(printable(check.found), advice))
    console().print(table)


def _not_needed(check: Check) -> Check:
    """For users with an external engine."""
    return msgspec.structs.replace(check, state="optional") if _only_built_in(check) else check


def _only_built_in(check: Check) -> bool:
    return check.state == "missing" and check.name in ("embedded engine", "model", "openai SDK")


def doctor(
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="URL of an engine to check; repeatable.", show_default=False),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            "--python",
            metavar="VENV",
            help="Python environment of agents, as of gangline submit, to examine in a sandbox.",
            show_default=False,
        ),
    ] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine's sandbox, limits, engines, model, tools, agents' Python, ports, disk, data and service.

    Exit code 1 if a requirement is missing or broken; each line names the remedy. With engines of your own, the
    requirements of the built-in one are optional.
    """
    from gangline.cli.machine.checks import CHECKS
    from gangline.cli.machine.checks_leftovers import check_leftovers
    from gangline.cli.machine.checks_service import SERVICE_CHECKS, check_engine
    from gangline.cli.machine.doctor import check_agent_python, check_data_folder

    settings = Settings.from_environ()
    if data is not None:
        settings = settings.model_copy(update={"data_dir": data})
    if server is not None:
        settings = settings.model_copy(update={"server_url": server})
    checks = [check(settings) for check in (*CHECKS, check_data_folder, check_leftovers, *SERVICE_CHECKS)]
    checks.append(check_agent_python(python))
    if engine:
        checks = [_not_needed(check) for check in checks] + [check_engine(url) for url in engine]
    missing = [check.name for check in checks if check.state == "missing"]
    if as_json:
        print_json({"ok": not missing, "checks": checks})
    else:
        _print(checks)
        console().print(f"[red]Missing: {', '.join(missing)}.[/]" if missing else "[green]Ready: gangline demo[/]")
    if missing:
        raise typer.Exit(Exit.FAILED)


def register(app: typer.Typer) -> None:
    app.command()(doctor)
