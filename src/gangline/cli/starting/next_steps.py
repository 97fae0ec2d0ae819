"""`gangline` without a command: the state of this folder, and suggested next commands, most likely first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import __version__
from gangline.cli.terminal.output import console, run
from gangline.domain.errors import GanglineError, ServerUnavailable
from gangline.settings.machine import Settings
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from gangline.domain.views import ServiceStatus, TaskSummary

Step = tuple[str, str]
"""A command, and a remark."""
_PATIENCE_S = 5.0
_TASK_FILES = ("task.json", "tasks.jsonl")


class Found:
    """The contents of a folder and its data folder."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.task_file = next((name for name in _TASK_FILES if (folder / name).is_file()), None)
        self.makes_tasks = (folder / "tasks.py").is_file()
        self.experiment = next((name.name for name in sorted(folder.glob("experiment*.y*ml"))), None)
        self.task = _newest(data, "server/results/[!.]*")
        self.run = _newest(data, "runs/*/lineage.json")
        self.run_is_done = self.run is not None and (data / "runs" / self.run / "results.json").is_file()
        self.evaluations = sorted(path.parent.name for path in data.glob("evals/*/report.json"))
        self.status: ServiceStatus | None = None
        """Status of the running service; None if no service runs."""
        self.trouble = ""
        """Why an expected service gives no status."""


def _newest(data: Path, pattern: str) -> str | None:
    """Name of the most recently changed folder below `server/results` or `runs`."""
    found = max(data.glob(pattern), key=_changed_at, default=None)
    return None if found is None else found.name if found.is_dir() else found.parent.name


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # a running service has removed it meanwhile
        return 0.0


def look_around(folder: Path, settings: Settings) -> Found:
    """Inspects the files and, if one runs, the service."""
    found = Found(folder, settings.data_dir)
    try:
        found.status, newest = run(_asked())
    except ServerUnavailable as error:
        found.trouble = error.message if settings.server_url else ""
    except GanglineError as error:
        found.trouble = error.message
    except TimeoutError:
        found.trouble = f"The service has not answered for {_PATIENCE_S:g} s."
    else:
        found.task = newest.task_id if newest else None
    return found


async def _asked() -> tuple[ServiceStatus, TaskSummary | None]:
    async with asyncio.timeout(_PATIENCE_S), find_service().client() as client:
        return await client.status(), next(iter((await client.tasks(limit=1)).tasks), None)


def next_steps(found: Found) -> Iterator[Step]:
    yield from _of_service(found) if found.status is not None else _to_begin(found)
    if found.run is not None and not found.run_is_done:
        yield f"gangline runs show {found.run}", "a training that has not ended; `gangline train run` continues it"
    elif found.run is not None:
        yield "gangline runs list", "trainings, with their rewards before and after"
    if len(found.evaluations) > 1:
        yield f"gangline compare {' '.join(found.evaluations[-2:])}", "two evaluations, task by task"


def _of_service(found: Found) -> Iterator[Step]:
    status = found.status
    assert status is not None
    if not status.nodes:
        yield "gangline node", "no node has joined: sessions wait"
    if status.sessions.get("queued", 0) + status.sessions.get("leased", 0):
        yield "gangline watch", "sessions are under way"
    if found.task is not None:
        yield f"gangline status {found.task}", "the newest task: its sessions, and why any failed"
        yield "gangline open", "the page: sessions down to their tokens"
        yield f"gangline export {found.task} --format jsonl", "its rows, to train on"
    yield from _submits(found)


def _submits(found: Found) -> Iterator[Step]:
    if found.task_file is None and found.makes_tasks:
        yield "python3 tasks.py", "writes the tasks"
    if found.task_file or found.makes_tasks:
        yield f"gangline submit {found.task_file or 'task.json'} --wait", "runs the agent on a task of this folder"
    elif found.task is None:
        yield "gangline init FOLDER", "an agent with tasks, a reward and an experiment"
        yield "gangline preset list", "tasks that are ready to use"


def _to_begin(found: Found) -> Iterator[Step]:
    if found.task is not None:
        yield f"gangline show {found.task}", "sessions that were recorded here; no service is needed"
        yield f"gangline export {found.task} --format jsonl", "their rows, to train on"
    if found.task is not None or found.task_file or found.makes_tasks:
        yield "gangline up", "the service: engine, server, node and page"
        yield from _submits(found)
        if found.experiment:
            yield f"gangline train run {found.experiment}", "training; it starts its own service"
        return
    yield "gangline doctor", "whether this machine has what it takes"
    yield "gangline demo", "all of it once, on a small model: sessions, an audit, rows, training"
    yield "gangline init FOLDER", "an agent of your own, with tasks, a reward and an experiment"


def print_steps(steps: Sequence[Step]) -> None:
    width = max(len(command) for command, _ in steps)
    for command, remark in steps:
        console().print(f"  {command:<{width}}  # {remark}" if remark else f"  {command}", markup=False)


def print_next_steps(is_installed: Callable[[str], bool]) -> None:
    """is_installed: name of a command -> whether this installation has it."""
    settings = Settings.from_environ()
    found = look_around(Path.cwd(), settings)
    if found.status is not None:
        where = f"a service runs: {sum(found.status.tasks.values())} tasks, {len(found.status.nodes)} nodes"
    else:
        where = f"no service runs on {settings.data_dir}"
    console().print(f"gangline {__version__}: {where}.", markup=False)
    if found.trouble:
        console().print(found.trouble, style="yellow", markup=False)
    named = [(step, step[0].split()) for step in next_steps(found)]
    print_steps([step for step, (program, name, *_) in named if program != "gangline" or is_installed(name)])
    console().print("All commands: gangline --help", style="dim")
