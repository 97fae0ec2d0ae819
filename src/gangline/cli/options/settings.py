"""Options of the commands that serve, made from the settings' models.

A command's function takes `Resolved` first; `with_settings` adds an option for each of its settings before the
function's own parameters, and reads all sources when the command runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import typer

from gangline.domain.errors import InvalidRequest
from gangline.settings.fields import Leaf
from gangline.settings.service import FROM_STDIN, LEAVES, UP_DEFAULTS, Resolved, read_tables, resolve
from gangline.settings.sources import CONFIG_VARIABLE

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help=f"Config file. Default: {CONFIG_VARIABLE}, else ./gangline.toml where it exists.",
        show_default=False,
    ),
]
_NODE_OPTIONS = Annotated[
    list[str] | None,
    typer.Argument(metavar="NODE_OPTIONS", help="Behind `--`: options of `gangline node`, such as --engine."),
]
_MAX_CHOICES_CHARS = 16
_UNSET = "__unset"
"""Suffix of parameters that unset a flag."""
_BY_KEY = "__by_key"
"""Suffix of parameters for an option named after its key: `--node-id` for `--id`."""
_FROM_STDIN = Annotated[bool, typer.Option(FROM_STDIN, hidden=True)]


def _table(name: str, *without: str) -> tuple[str, ...]:
    return tuple(key for key, leaf in LEAVES.items() if leaf.table == name and leaf.name not in without)


_PANELS = {
    "Engines": "engines engines_later tokenizer engine_kind engine_options engine_wait_s engine_key_env role_engines",
    "Model calls": "capture sampling template_kwargs call_limits affinity_slack session_places places_wait_s",
    "Addresses": "host port public_url allowed_hosts no_token server_url",
    "Storage": "data_dir database_url results keep_days keep_gb disk_reserve_gib checkpoint_gib checkpoint_hold_s",
    "Sandboxes": "runtimes networks labels pull pulls_at_once image_cache_gb warm_sandboxes warm_memory_gib warm_age_s",
    "Work at a time": "run_slots ready_slots init_workers prewarm_workers postrun_workers",
    "Grading and tools": "grader_engines reward_functions search_sources mcp_servers hooks hook_timeout_s",
    "Faults": "breaker_faults breaker_pause_s stuck_after_s adopt_grace_s",
    "Cluster": "on_cluster ray_address num_nodes max_nodes min_nodes shrink_after_s drain_timeout_s node_cpus "
    "node_resources node_data",
}
"""Panel of `--help` -> names of settings. All others are under Options."""


class ServedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command, its settings with options, and its own defaults."""

    name: str
    options: tuple[str, ...]
    """Keys, in the order of `--help`."""
    others: tuple[str, ...] = ()
    """Keys that it reads but has no options for."""
    defaults: Mapping[str, Any] = {}
    """Defaults that differ from the models'."""
    help: Mapping[str, str] = {}
    """Help of options whose meaning differs from the one in the table's other commands."""
    is_child: bool = True
    """Whether a parent process may pass tables on stdin."""
    takes_node_options: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that it reads."""
        machine = tuple(key for key in _table("") if key not in self.options)
        return (*machine, *self.options, *self.others)

    def default(self, key: str) -> Any:
        return self.defaults.get(key, LEAVES[key].field.default)


_STORAGE = ("database_url", "server.results", "server.keep_days", "server.keep_gb")
_OF_NODES = _table("node", "node_id", "host", "port", "public_url", "allowed_hosts", "no_token")
SERVER = ServedCommand(
    name="server",
    options=("data_dir", "database_url", *_table("server"), "log_format"),
)
NODE = ServedCommand(
    name="node",
    options=("server_url", "data_dir", *_table("node"), "log_format"),
)
CLUSTER = ServedCommand(
    name="cluster",
    options=("server_url", "data_dir", *_table("cluster"), "log_format"),
    others=_OF_NODES,
    takes_node_options=True,
)
UP = ServedCommand(
    name="up",
    options=(
        *("node.engines", "up.tokenizer"),
        *("data_dir", "server.host", "server.port", "server.public_url", "server.allowed_hosts"),
        *(key for key in _OF_NODES if key not in ("node.engines", "node.engines_later")),
        *(*_STORAGE, "up.on_cluster", *_table("cluster"), "log_format"),
    ),
    others=(
        *("node.node_id", "node.engines_later"),
        *("node.host", "node.port", "node.public_url", "node.allowed_hosts"),
    ),
    defaults=UP_DEFAULTS,
    help={
        "server.host": "Address to listen on. Default: 127.0.0.1; with --cluster, every address.",
        "server.port": "Port of the server; 0 picks a free one. Default: 8700, or any if taken.",
        "node.engines": "URL of a running engine, embedded:MODEL, or scripted:FILE. URLs of more engines may follow.",
    },
    is_child=False,
)
COMMANDS = {command.name: command for command in (UP, SERVER, NODE, CLUSTER)}


def _type_of(leaf: Leaf) -> Any:
    if leaf.is_list:
        return list[get_args(leaf.kind)[0]]
    return str if leaf.is_document or get_origin(leaf.kind) is Literal else leaf.kind


def _limits(leaf: Leaf) -> str:
    lowest = next((one.ge for one in leaf.field.metadata if hasattr(one, "ge")), 0)
    highest = next((one.le for one in leaf.field.metadata if hasattr(one, "le")), None)
    return (f" At least {lowest}." if lowest else "") + ("" if highest is None else f" At most {highest}.")


def _default_shown(leaf: Leaf, default: Any, help_text: str) -> Any:
    """The default as Typer shows it; None if it is empty, or explained in the help text."""
    if "Default:" in help_text or leaf.is_document or default == ():
        return None
    if leaf.is_list:
        return list(default)
    return int(default) if isinstance(default, float) and default.is_integer() else default


def _choices(leaf: Leaf) -> str | None:
    """None: by type. Long ones are in the help only: they would leave no room for it on a small screen."""
    choices = "|".join(get_args(leaf.kind)) if get_origin(leaf.kind) is Literal else None
    return "choice" if choices is not None and len(choices) > _MAX_CHOICES_CHARS else choices


def _parameter(command: ServedCommand, key: str) -> inspect.Parameter:
    """The parameter for Typer. Its default is only shown: `given_in` detects given options."""
    leaf = LEAVES[key]
    help_text = command.help.get(key) or leaf.about
    shown = _default_shown(leaf, command.default(key), help_text)
    unset = "" if leaf.unset is None else f" {leaf.unset} unsets it."
    option = typer.Option(
        leaf.option,
        help=f"{help_text}{_limits(leaf)}{unset} Environment: {leaf.env[0]}.",
        metavar=_choices(leaf),
        show_default=shown is not None and leaf.kind is not bool,
        rich_help_panel=next((panel for panel, names in _PANELS.items() if leaf.name in names.split()), None),
    )
    kind = _type_of(leaf)
    return _keyword(key.replace(".", "__"), Annotated[kind if shown is not None else kind | None, option], shown)


def _unsetting(command: ServedCommand) -> list[inspect.Parameter]:
    """Hidden options that unset flags. Next to their flags in `--help` they would narrow the column of descriptions."""
    flags = [(key, LEAVES[key].unset) for key in command.options]
    return [
        _keyword(key.replace(".", "__") + _UNSET, Annotated[bool, typer.Option(unset, hidden=True)], False)
        for key, unset in flags
        if unset is not None
    ]


def _by_key(command: ServedCommand) -> list[inspect.Parameter]:
    """Hidden options named as in config files. Help shows only one name for each option."""
    taken = {LEAVES[key].option for key in command.options}
    names = {key: f"--{LEAVES[key].name.replace('_', '-')}" for key in command.options}
    hidden = {
        key: Annotated[_type_of(LEAVES[key]) | None, typer.Option(name, hidden=True)]
        for key, name in names.items()
        if name not in taken
    }
    return [_keyword(key.replace(".", "__") + _BY_KEY, annotation, None) for key, annotation in hidden.items()]


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def given_in(context: Any) -> dict[str, Any]:
    """Key -> value of the options on the command line. Raises: InvalidRequest for a contradiction."""
    given: dict[str, Any] = {}
    for name, value in context.params.items():
        plain, source = name.removesuffix(_UNSET).removesuffix(_BY_KEY), context.get_parameter_source(name)
        key = plain.replace("__", ".", 1)
        if key in LEAVES and source is not None and source.name == "COMMANDLINE":
            if key in given:
                raise InvalidRequest(f"{LEAVES[key].option} is given in two ways that contradict each other: give one.")
            given[key] = False if name.endswith(_UNSET) else value
    return {**given, **_node_options(context.params.get("node_options"))}


def given_to(command: ServedCommand, arguments: Sequence[str]) -> dict[str, Any]:
    """The same for a command line that does not run. Raises: usage errors of Typer."""

    def nothing(_resolved: Resolved) -> None:
        return None

    app = typer.Typer(add_completion=False)
    app.command(command.name)(with_settings(command)(nothing))
    parser: Any = typer.main.get_command(app)
    return given_in(parser.make_context(f"gangline {command.name}", list(arguments)))


def _node_options(arguments: Sequence[str] | None) -> dict[str, Any]:
    """Raises: InvalidRequest for an option of the cluster itself."""
    given = given_to(NODE, arguments) if arguments else {}
    for key in given:
        if key not in CLUSTER.others:
            raise InvalidRequest(f"{LEAVES[key].option} does not belong behind `--`: a cluster's nodes do not take it.")
    return given


def _nothing() -> None:
    return None


def with_settings(
    command: ServedCommand, *, meanwhile: Callable[[], None] = _nothing
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command's function. Adds the settings' options and `--config`.

    meanwhile: called by a child process before it waits for the settings from its parent.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        @functools.wraps(function)
        def run(context: typer.Context, **given: Any) -> None:
            if (config := given["config"]) is not None:
                # Settings read later in this process come from the same file.
                os.environ[CONFIG_VARIABLE] = str(config.absolute())
            options, tables = given_in(context), None
            if given.get("from_stdin"):
                meanwhile()
                later, tables = read_tables(sys.stdin.buffer.read())
                options |= later
            resolved = resolve(options, handed_over=tables, defaults=command.defaults)
            function(resolved, **{one.name: given[one.name] for one in own})

        parameters = [
            inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            *([_keyword("node_options", _NODE_OPTIONS, None)] if command.takes_node_options else ()),
            *(_parameter(command, key) for key in command.options),
            *_unsetting(command),
            *_by_key(command),
            _keyword("config", ConfigOption, None),
            *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own),
            *([_keyword("from_stdin", _FROM_STDIN, False)] if command.is_child else ()),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
