"""The table of commands, and how each is loaded.

`COMMANDS` has everything that `gangline --help` shows, so that help, name completion and suggestions for a wrong name
import no command's module. A module has a `register(app)` that adds its commands, and is imported when one of them runs
or shows its help. The commands themselves, errors and exit codes are elsewhere.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from gangline.domain.errors import InvalidRequest
from gangline.settings.wings import wing_entries


class Command(NamedTuple):
    """A line of `gangline --help`."""

    module: str | None
    """Below `gangline.cli`; None: an entry point of group `gangline.commands`, provided by a wing."""
    help: str
    """First paragraph of the command's help; a test compares them."""


_LINES: dict[str, Command] = {
    "demo": Command(
        None,
        "Run a small agent on a real model: sessions, rewards, an audit of every token, rows, then training.",
    ),
    "init": Command(
        "starting.init",
        "Make a folder with an agent, tasks, a reward function and an experiment, and print the next steps.",
    ),
    "up": Command(
        "service.up", "Run the whole service on this machine until Ctrl-C or SIGTERM: engine, server and node."
    ),
    "down": Command(
        "service.down", "Stop the service of a data folder, and wait until all of its processes have ended."
    ),
    "submit": Command(
        "tasks.submit", "Submit tasks: from FILE, standard input (-), or options; options override fields of the file."
    ),
    "status": Command("service.status", "Show the service at a glance, or one task with its sessions."),
    "cancel": Command(
        "service.status", "Cancel a task with all its sessions, or one session. Ended sessions are unchanged."
    ),
    "watch": Command(
        "tasks.watch", "Watch the service live, until Ctrl-C: stages, throughput, groups, failures, engines."
    ),
    "open": Command("results.page", "Print a link to the page, where sessions are seen down to their tokens."),
    "show": Command(
        "results.show",
        "Show a session: its turns with messages, tool results and certificates; its tokens. For a task: its sessions.",
    ),
    "logs": Command(
        "results.agent_logs",
        "Print the stdout and stderr of a session's agent program, or one of the files kept with its result.",
    ),
    "audit": Command("results.audit", "Check rows against the sampled tokens; exit code 1 if any differ."),
    "check-rows": Command(
        None,
        "Check rows of any trainer or environment for faults; exit code 1 if there are any.",
    ),
    "drift": Command(
        "results.drift", "Count the calls whose context differs from the tokens sampled before, by cause."
    ),
    "export": Command(
        "results.export",
        "Write the rows of tasks' ended sessions: ids, masks, log-probs, versions, rewards, certificates.",
    ),
    "eval": Command(
        None,
        "Evaluate an agent on many tasks: pass@k, pass^k and mean reward with errors clustered by "
        "task, cost, failures.",
    ),
    "compare": Command(
        None,
        "Compare two evaluations task by task: the difference, its interval, and the tasks that got better or worse.",
    ),
    "regrade": Command(
        None,
        "Grade recorded sessions again, by another evaluator or their tasks' own; their agents do not run again.",
    ),
    "fork": Command(
        None,
        "Run a session's agent again: its first model calls are answered from the record, the others by the engine.",
    ),
    "vet": Command(None, "Audit tasks: are their rewards to be believed?"),
    "data": Command(
        None,
        "Make a dataset of recorded sessions: filter, deduplicate, split, and write Parquet with a dataset card.",
    ),
    "doctor": Command(
        "machine.doctor",
        "Check this machine's sandbox, limits, engines, model, tools, agents' Python, ports, disk, data and service.",
    ),
    "tokens": Command("service.tokens", "Create, list, rotate and revoke tokens with a role and a tenant."),
    "tenants": Command("service.tokens", "Show the use of tenants, and set their shares and quotas."),
    "usage": Command("service.tokens", "Sum up the sessions that have ended: slot-hours, sampled tokens, costs."),
    "actions": Command(
        "service.actions", "Show the log of control actions on the server and the nodes: caller, action, time, status."
    ),
    "drain": Command(
        "service.drain", "Drain nodes: they take no more sessions, and exit when their current ones have ended."
    ),
    "engine": Command(
        "service.engine",
        "Run an engine server with vLLM's routes and fields: a small real model on the CPU or a GPU, or a script.",
    ),
    "server": Command("service.server", "Run a rollout server: tasks, groups, leases, results, callbacks."),
    "node": Command(
        "service.node", "Run a node: it leases sessions, runs them in sandboxes, and answers their model calls."
    ),
    "cluster": Command(None, "Run nodes on a Ray cluster for a running server. Needs the extra `cluster`."),
    "tasks": Command(None, "Make tasks of other systems' tasks and datasets, and look at them."),
    "serve": Command(
        None,
        "Serve tasks as an OpenEnv environment until Ctrl-C: clients act in their sandboxes and get their rewards.",
    ),
    "serve-agent": Command(
        None,
        "Serve an agent by OpenAI's Responses API until Ctrl-C: each request is a session, its answer the whole run.",
    ),
    "harbor": Command(None, "Answer the model calls of agents that Harbor runs."),
    "preset": Command(None, "Task families that are ready to use: swe, stem, math, code."),
    "list": Command("tasks.listing", "List tasks or sessions, newest first, a page at a time."),
    "train": Command(None, "Train on groups of sessions."),
    "runs": Command(None, "Training runs of a data folder."),
    "config": Command("machine.config", "Show settings and where they come from."),
    "harness": Command("machine.harness", "List, install and check agent programs."),
    "image": Command("machine.image", "Build, list, remove and prefetch images for runtimes."),
    "gate": Command("service.gate", "Hold model calls while weights are updated, and set the policy version."),
    "backend": Command("service.backend", "Add, remove and list the running engines behind each node."),
}

_PANELS = {
    "Start": "demo init doctor up down",
    "Run": "submit cancel eval compare regrade fork vet tasks preset serve serve-agent harbor",
    "Look": "status watch list open show logs",
    "Data": "export data audit check-rows drift",
    "Train": "train runs",
    "Operate": "engine server node cluster drain gate backend tokens tenants usage actions config harness image",
}
"""Panel of `gangline --help` -> its commands."""

COMMANDS = {name: _LINES[name] for names in _PANELS.values() for name in names.split()}
"""In the order of `--help`."""

_ANYWHERE = (
    "init submit cancel compare status watch list open show logs export data audit check-rows drift runs drain gate "
    "backend tokens tenants usage config"
)
"""Commands that ask a server or read files, and need no Linux."""


class LazyCommands(TyperGroup):
    """The root command. Holds lines of the table until a command is requested."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands.update(
            {
                name: TyperCommand(name, help=COMMANDS[name].help, rich_help_panel=panel)
                for panel, names in _PANELS.items()
                for name in names.split()
                if is_installed(name)
            }
        )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The loaded command, to run it or show its options. A wrong name fails without an import."""
        if args and args[0] in COMMANDS and not is_installed(args[0]):
            why = "is not part of this installation: install the whole package, and a checkout that has changed again."
            if sys.platform != "linux" and args[0] not in _ANYWHERE.split():
                why = "runs on Linux only. Start the service on a Linux machine, and name it here by --server URL."
            raise InvalidRequest(f"`gangline {args[0]}` {why}")
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and load_command(name), rest


def is_installed(name: str) -> bool:
    """Whether a command of the table is installed, and runs on this system: a wing may be missing."""
    runs_here = sys.platform == "linux" or name in _ANYWHERE.split()
    return runs_here and (COMMANDS[name].module is not None or name in wing_entries("gangline.commands"))


def module_of(name: str) -> str:
    """The full name of a command's module."""
    module = COMMANDS[name].module
    return wing_entries("gangline.commands")[name].module if module is None else f"gangline.cli.{module}"


def import_command(name: str) -> Any:
    """Imports the module of a command of the table."""
    return importlib.import_module(module_of(name))


def load_command(name: str) -> Any:
    """The command with its options or subcommands."""
    app = typer.Typer()
    app.callback()(lambda: None)  # with a callback, Typer makes a group even of a single command
    import_command(name).register(app)
    root: Any = typer.main.get_command(app)
    return root.commands[name]
