"""`gangline fork`: runs further sessions that continue a recorded one from one of its turns."""

from __future__ import annotations

from typing import Annotated

import typer

from gangline.cli.service.through import with_running
from gangline.cli.terminal.output import DataOption, JsonOption, ServerOption, console, print_json, run

_EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="ROLE",
        help="Role whose own engines answer the calls behind the fork. They must have the record's tokenizer and chat "
        "template. Default: the policy's engines.",
        show_default=False,
    ),
]


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
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Top-p behind the fork, likewise.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a reply behind the fork, likewise.", show_default=False)
    ] = None,
    edit: Annotated[
        str | None,
        typer.Option(
            help="Text in the place of the newest message before the first sampled call: of the tool's result, or "
            "of the user's message. The agent does not see it.",
            show_default=False,
        ),
    ] = None,
    engine: _EngineOption = None,
    task_id: Annotated[str | None, typer.Option("--id", help="Id of the new task.", show_default=False)] = None,
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a session's agent again: its first model calls are answered from the record, the others by the engine.

    Creates a task whose sessions begin at that state. A session that cannot be forked there is refused with the reason.
    If the agent's calls differ from the record, the session ends with the difference. `gangline show SESSION` shows the
    turns.
    """
    from gangline.domain.task import ParameterRule, SamplingPolicy
    from gangline.wire.client.running import find_service

    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    rules = {name: ParameterRule(override=value) for name, value in given.items() if value is not None}
    sampling = SamplingPolicy(**rules) if rules else None
    submitted = run(
        with_running(
            find_service(data, server),
            lambda client, _: client.fork(
                session, turn, samples=samples, sampling=sampling, edit=edit, engine=engine, task_id=task_id
            ),
        )
    )
    if as_json:
        print_json(submitted)
    else:
        console().print(f"{submitted.task_id}: {samples} sessions from {session}, turn {turn}", markup=False)


def register(app: typer.Typer) -> None:
    app.command()(fork)
