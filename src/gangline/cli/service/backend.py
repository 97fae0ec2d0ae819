"""`gangline backend`: the running engines behind each node."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text

from gangline.cli.service.node_addresses import NodesOption, ask_nodes
from gangline.cli.terminal.output import DataOption, JsonOption, console, print_json, printable, run
from gangline.cli.terminal.tables import FactTable, prose
from gangline.cli.terminal.views import cache_line
from gangline.domain.errors import InvalidRequest
from gangline.domain.node_views import BackendView

if TYPE_CHECKING:
    from gangline.wire.client.node import NodeClient

backend = typer.Typer(no_args_is_help=True, help="Add, remove and list the running engines behind each node.")


def _ask(
    data: Path | None,
    nodes: list[str] | None,
    as_json: bool,
    change: Callable[[NodeClient], Awaitable[Any]] | None = None,
) -> None:
    """Apply the change on every node, then show the engines of each."""

    async def changed(client: NodeClient) -> list[BackendView]:
        if change is not None:
            await change(client)
        return await client.backends(times=True)

    answers = run(ask_nodes(data, nodes, changed))
    if as_json:
        print_json(answers)
        return
    out = console()
    for url, backends in answers.items():
        out.print(f"node {url}" + ("" if backends else "  (no engine)"), markup=False, soft_wrap=True)
        for one in backends:
            out.print(_view(one))


_STYLES = {"error": "red", "lacks": "yellow"}


def _view(one: BackendView) -> FactTable:
    """One engine as a few lines."""
    table = FactTable("#", prose(""))
    state = f"{one.state}, {one.num_sessions} sessions, {one.num_calls} calls"
    table.add_row(Text(one.backend_id, "bold"), f"{one.url}  {state}")
    facts = {
        "role": one.role,
        "engine": one.engine,
        "model": one.model,
        "tier": one.tier,
        "template": ", ".join(one.template_told),
        "times": ", ".join(f"{phase} {time.mean_s:.2f} s" for phase, time in one.times.items()),
        "cache": "" if one.cache is None else cache_line(one.cache),
        "error": one.error,
    }
    for name, value in (*facts.items(), *(("lacks", lack) for lack in one.template_lacks)):
        if value:
            table.add_row(Text(name, "dim"), Text(printable(str(value)), _STYLES.get(name, "")))
    return table


@backend.command()
def add(
    url: Annotated[str, typer.Argument(help="URL of a running engine.")],
    kind: Annotated[str, typer.Option("--kind", help="Engine plug-in to use; auto detects it.")] = "auto",
    label: Annotated[
        str | None,
        typer.Option("--label", help="Host label; nodes with the same label prefer this engine. Default: its address."),
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option("--key-env", help="Name of the node's environment variable with the engine's API key."),
    ] = None,
    options: Annotated[
        str | None,
        typer.Option(
            "--options", help='Options of the engine plug-in, as JSON: {"tokenizer": "FOLDER"}.', show_default=False
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option("--role", help="Role whose calls it answers, with its own model. Default: the policy's."),
    ] = None,
    data: DataOption = None,
    node: NodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add an engine, which must serve the same model as the role's others. The node keeps it across restarts."""
    of_plugin = _read_options(options)
    _ask(
        *(data, node, as_json),
        lambda client: client.add_backend(
            url, kind=kind, label=label, api_key_env=key_env, options=of_plugin, role=role
        ),
    )


def _read_options(text: str | None) -> dict[str, Any]:
    """Raises: InvalidRequest."""
    try:
        options: object = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidRequest(f"--options is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise InvalidRequest(f"--options must be a JSON object, got {text}.")
    return cast("dict[str, Any]", options)


@backend.command()
def remove(
    backend_id: Annotated[str, typer.Argument(help="As `gangline backend list` shows it.")],
    now: Annotated[
        bool, typer.Option("--now", help="Remove it at once, without waiting for its calls in flight.")
    ] = False,
    data: DataOption = None,
    node: NodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove an engine; its sessions continue with another."""
    _ask(data, node, as_json, lambda client: client.remove_backend(backend_id, drain=not now))


@backend.command(name="list")
def show(data: DataOption = None, node: NodesOption = None, as_json: JsonOption = False) -> None:
    """Show the engines, their state, and the mean times of a call that vLLM and SGLang measure themselves."""
    _ask(data, node, as_json)


@backend.command()
def clear(
    role: Annotated[
        str | None, typer.Option("--role", help="Role whose engines are removed. Default: the policy's.")
    ] = None,
    data: DataOption = None,
    node: NodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove all engines of the policy, or of a role; model calls wait for new ones."""
    _ask(data, node, as_json, lambda client: client.clear_backends(role))


def register(app: typer.Typer) -> None:
    app.add_typer(backend, name="backend")
