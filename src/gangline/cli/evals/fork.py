"""`gangline fork`: more sessions that continue a recorded one from one of its turns."""

from __future__ import annotations

from typing import Annotated

import typer

from gangline.cli.service.through import with_running
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, print_json, run

__all__ = ["register"]


def fork(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="A session that has ended.", show_default=False)],
    turn: Annotated[
        int,
        typer.Option("--turn", min=1, help="Last model call that is answered from the record.", show_default=False),
    ],
    samples: Annotated[int, typer.Option("--samples", min=1, help="Sessions that continue from there.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Temperature behind the fork. Default: as in the session.", show_default=False),
    ] = None,
    task_id: Annotated[str | None, typer.Option("--id", help="Id of the new task.", show_default=False)] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a session's agent again: its first model calls are answered from the record, the others by the engine.

    Makes a task whose sessions begin at that state. A session that cannot be forked there is refused with the reason;
    one whose agent asks otherwise than before ends with the difference. `gangline show SESSION` shows the turns.
    """
    from gangline.client.running import find_service
    from gangline.domain.task import ParameterRule, SamplingPolicy

    sampling = None if temperature is None else SamplingPolicy(temperature=ParameterRule(override=temperature))
    submitted = run(
        with_running(
            find_service(data, server),
            lambda client, _: client.fork(session, turn, samples=samples, sampling=sampling, task_id=task_id),
        )
    )
    if as_json:
        print_json(submitted)
    else:
        console().print(f"{submitted.task_id}: {samples} sessions from {session}, turn {turn}", markup=False)


def register(app: typer.Typer) -> None:
    app.command()(fork)
