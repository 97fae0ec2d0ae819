"""`gangline harbor`: Harbor's agents and tasks, with every token."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gangline.cli.terminal.output import (
    DataOption,
    JsonOption,
    ServerOption,
    console,
    log_to_stderr,
    notes,
    print_json,
    printable,
    run,
)
from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from gangline.domain.task import TaskRequest
    from gangline.domain.views import TaskView
    from gangline.interop.harbor.relay.connector import ConnectorSpec, ConnectorState
    from gangline.wire.client.server import ServerClient

harbor = typer.Typer(no_args_is_help=True, help="Answer the model calls of agents that Harbor runs.")

_FIELDS = (
    "builder",
    "callback_expiry_seconds",
    "callback_form",
    "callback_secret",
    "callback_url",
    "capture",
    "held_out",
    "metadata",
    "priority",
    "submitter",
)
"""Fields of a task that a file may give to each group: Harbor decides on the others."""


@harbor.command()
def connect(
    relay: Annotated[
        str, typer.Option("--relay", metavar="URL", help="The Harbor server: `harbor serve --relay-url`.")
    ],
    session: Annotated[
        str,
        typer.Option("--session", help="`session_id` of the jobs whose calls are answered. One connector each."),
    ] = "gangline",
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="FILE", help=f"Fields of each delivered task: {', '.join(_FIELDS)}."),
    ] = None,
    reward: Annotated[
        str, typer.Option("--reward", metavar="NAME", help="The reward, if Harbor's verifier gives several numbers.")
    ] = "reward",
    key_env: Annotated[
        str, typer.Option("--key-env", metavar="NAME", help="Variable with the Harbor server's key.")
    ] = "HARBOR_API_KEY",
    data: DataOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer the model calls of a Harbor server's jobs, and deliver their rollouts as groups with rewards.

    Submit jobs with `"relay_inference": true` and this session's `session_id`. Each rollout is a session on a node, and
    each task of a job becomes a task here once its rollouts have ended. Started again, the same command continues.
    With --json: one line {"session_id", "relay"} when it is connected, then one line for each delivered task.
    """
    from gangline.cli.service.through import with_running
    from gangline.settings.machine import Settings
    from gangline.wire.client.running import find_service

    folder = (data or Settings.from_environ().data_dir).absolute() / "harbor"
    spec = _spec(relay, session, task, reward, key_env, folder)
    service = find_service(data, server)
    log_to_stderr()

    async def connected(client: ServerClient, _token: str | None) -> None:
        await _connect(spec, client, as_json=as_json)

    run(with_running(service, connected))


def _spec(relay: str, session: str, task: str | None, reward: str, key_env: str, folder: Path) -> ConnectorSpec:
    """Raises: InvalidRequest."""
    import re
    from urllib.parse import urlsplit

    from gangline.interop.harbor.relay.connection import RelayPlace
    from gangline.interop.harbor.relay.connector import ConnectorSpec

    parts = urlsplit(relay)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise InvalidRequest(f"--relay must be a URL such as http://127.0.0.1:8390, got {relay!r}.")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", session):
        raise InvalidRequest(f"--session takes letters, digits, `_` and `-`, at most 100; got {session!r}.")
    key = os.environ.get(key_env, "")
    if not key.strip():
        raise InvalidRequest(f"{key_env} is not set: `harbor serve --relay-url` asks for its HARBOR_API_KEY.")
    place = RelayPlace(relay.rstrip("/"), session)
    name = f"{session}-{hashlib.sha256(place.url.encode()).hexdigest()[:8]}"
    return ConnectorSpec(
        place=place, key=key.strip(), folder=folder / name, template=_template(task), reward_name=reward
    )


def _template(file: str | None) -> TaskRequest:
    """Raises: InvalidRequest, UnknownPlugin."""
    from gangline.cli.tasks.files import read_tasks, validated

    fields: dict[str, Any] = {}
    if file is not None:
        given = read_tasks(file)
        if len(given) != 1:
            raise InvalidRequest(f"{file}: give one task, whose fields each group gets; there are {len(given)}.")
        fields = given[0]
    if unknown := sorted(fields.keys() - set(_FIELDS)):
        raise InvalidRequest(f"{file}: `{unknown[0]}` is Harbor's to decide. Fields: {', '.join(_FIELDS)}.")
    found = validated({"instruction": "", "agent": {"harness": "harbor"}, **fields}, file or "the task")
    if found.capture.seed is not None:
        raise InvalidRequest(f"{file}: capture.seed would sample the same tokens in each rollout of a group.")
    return found


async def _connect(spec: ConnectorSpec, client: ServerClient, *, as_json: bool) -> None:
    from gangline.interop.harbor.relay.connector import connector

    view = _ConnectorView(spec, as_json=as_json)
    async with connector(spec, client, view.show, view.deliver) as connection:
        with view.status:
            try:
                await connection.run()
            except asyncio.CancelledError:
                view.end(connection.seen)
                raise


class _ConnectorView:
    """Prints what the connector does: results on stdout, progress on stderr."""

    def __init__(self, spec: ConnectorSpec, *, as_json: bool) -> None:
        self._spec = spec
        self._as_json = as_json
        self._is_announced = False
        terminal = notes()
        self._line = terminal.status("Connecting ...") if terminal.is_terminal and not as_json else None
        self.status = self._line or nullcontext()

    def show(self, seen: ConnectorState) -> None:
        if seen.is_connected and not self._is_announced:
            self._is_announced = True
            self._announce()
        if self._line is not None:
            text = f"{seen.num_rollouts} rollouts, {seen.num_calls} calls in flight, {seen.num_delivered} delivered"
            self._line.update(text if seen.trouble is None else f"{text} · {escape(printable(seen.trouble))}")

    def _announce(self) -> None:
        place = self._spec.place
        if self._as_json:
            print_json({"session_id": place.session_id, "relay": place.url})
            return
        console().print(f"Connected to {place.url}. Submit jobs with", markup=False)
        console().print(f'  "relay_inference": true, "session_id": "{place.session_id}"', markup=False)

    def deliver(self, task: TaskView) -> None:
        if self._as_json:
            print_json({"task_id": task.task_id, "rewards": task.rewards, "about": task.request["metadata"]["harbor"]})
            return
        given = [f"{reward:g}" if reward is not None else "-" for reward in task.rewards]
        about = task.request["metadata"]["harbor"]["task"]["name"]
        console().print(f"{task.task_id}: {printable(about)}, rewards {', '.join(given)}", markup=False)

    def end(self, seen: ConnectorState) -> None:
        if seen.num_rollouts:
            print(
                f"{seen.num_rollouts} rollouts have not ended: the same command continues with them.", file=sys.stderr
            )


def register(app: typer.Typer) -> None:
    app.add_typer(harbor, name="harbor")
