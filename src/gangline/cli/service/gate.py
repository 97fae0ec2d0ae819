"""`gangline gate`: let model calls wait while weights are updated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.service.node_addresses import NodesOption, ask_nodes
from gangline.cli.terminal.output import DataOption, JsonOption, console, notes, print_json, run
from gangline.cli.terminal.tables import Column, FactTable, prose
from gangline.domain.node_views import GateMode, GateState
from gangline.domain.weight_updates import GateUpdate, advice_on_phases

if TYPE_CHECKING:
    from gangline.wire.client.node import NodeClient

gate = typer.Typer(no_args_is_help=True, help="Hold model calls while weights are updated, and set the policy version.")


def _ask(
    data: Path | None, nodes: list[str] | None, as_json: bool, question: Callable[[NodeClient], Awaitable[GateState]]
) -> None:
    answers = run(ask_nodes(data, nodes, question))
    if as_json:
        print_json(answers)
        return
    table = FactTable("node", "gate", "version#", "in flight#", "waiting#", Column("opens by itself in", 1))
    for url, state in answers.items():
        paused = f"paused ({state.mode})" if state.is_paused else "open"
        left = "" if state.lease_left_s is None else f"{state.lease_left_s:.0f} s"
        version = "" if state.version is None else str(state.version)
        table.add_row(url, paused, version, str(state.num_in_flight), str(state.num_waiting), left)
    console().print(table)
    for note in sorted({note for state in answers.values() for note in state.notes}):
        console().print(note, markup=False, soft_wrap=True)


@gate.command()
def pause(
    mode: Annotated[
        GateMode,
        typer.Option("--mode", help="drain waits until no call is in flight; keep leaves calls in flight as they are."),
    ] = "drain",
    lease: Annotated[float, typer.Option("--lease", help="Seconds after which the gate reopens by itself.")] = 600,
    data: DataOption = None,
    node: NodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold model calls. Streams stay alive, and session budgets stop meanwhile."""
    _ask(data, node, as_json, lambda client: client.pause(mode, lease))


@gate.command()
def resume(data: DataOption = None, node: NodesOption = None, as_json: JsonOption = False) -> None:
    """Resume model calls."""
    _ask(data, node, as_json, lambda client: client.resume())


@gate.command()
def version(
    number: Annotated[int, typer.Argument(min=0, help="The policy version from now on.")],
    data: DataOption = None,
    node: NodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set the policy version of the model calls from now on."""
    _ask(data, node, as_json, lambda client: client.set_version(number))


@gate.command()
def show(data: DataOption = None, node: NodesOption = None, as_json: JsonOption = False) -> None:
    """Show whether model calls are held, and the policy version."""
    _ask(data, node, as_json, lambda client: client.gate())


@gate.command()
def updates(data: DataOption = None, node: NodesOption = None, as_json: JsonOption = False) -> None:
    """Show the last weight updates by phase, and the phase that took most of the time."""
    answers = run(ask_nodes(data, node, lambda client: client.updates()))
    if as_json:
        print_json(answers)
        return
    if not any(answers.values()):
        notes().print("No gate has seen a weight update yet.")
        return
    table = FactTable("node", Column("ended", 1), "version#", "seconds#", prose("by phase"))
    for url, found in answers.items():
        for one in found:
            table.add_row(url, *_update_cells(one))
    console().print(table)
    for url, found in answers.items():
        if found and (summary := advice_on_phases(found[-1].phases)) is not None:
            notes().print(f"{url}: {summary}.", markup=False, soft_wrap=True)


def _update_cells(update: GateUpdate) -> tuple[str, str, str, str]:
    ended = datetime.fromtimestamp(update.ended_at).astimezone().strftime("%H:%M:%S")
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in update.phases.items())
    expired = "; its lease ran out" if update.has_expired else ""
    version = "" if update.version is None else str(update.version)
    return ended, version, f"{sum(update.phases.values()):.1f}", phases + expired


def register(app: typer.Typer) -> None:
    app.add_typer(gate, name="gate")
