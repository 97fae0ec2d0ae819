"""The pages of the command line: an index, and one page for each command, read from the commands themselves."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from typing import Any

import typer.main

from gangline.cli.commands import COMMANDS, load_command
from gangline.cli.main import build_app
from gangline.cli.options.settings import COMMANDS as SERVED
from gangline.cli.terminal.exits import EXPLAINED
from gangline.settings.service import LEAVES

_NOTE = "<!-- Made by docs/generate.py. -->\n"
_COMMON_FROM = 5
"""An option that as many commands have, with the same help, is explained once."""
_INDEX = """\
Documents go to stdout, notes and logs to stderr. With `--json` stdout is one JSON document, or one per line; an error
is then `{"error": {"code", "message", "retryable"}}` on stdout too.
"""

Option = tuple[str, str]
"""Names, and what it means."""


def command_pages() -> dict[str, str]:
    """Below docs/reference: file -> text."""
    loaded = {name: load_command(name) for name in COMMANDS}
    leaves = [leaf for name, command in loaded.items() for leaf in _leaves(name, command)]
    found = Counter(_shown(param) for _, command in leaves for param in _options(command))
    common = {option for option, times in found.items() if times >= _COMMON_FROM}
    pages = {f"cli/{name}.md": _page(name, command, common) for name, command in loaded.items()}
    return {"cli.md": _index(common), **pages}


def _index(common: set[Option]) -> str:
    root: Any = typer.main.get_command(build_app())
    parts = [
        f"{_NOTE}\n# The command line\n",
        f"{inspect.cleandoc(root.help)}\n",
        "| command | what it does |\n|---|---|",
        *(f"| [`{name}`](cli/{name}.md) | {_clause(line.help)} |" for name, line in COMMANDS.items()),
        f"\n{_INDEX}",
        "## Common options\n",
        *(f"- {names}: {meaning}" for names, meaning in sorted(common)),
        "- `--debug`, before the command: Show the traceback of an error.",
        "\n## Exit codes\n",
        "| code | meaning |\n|---|---|",
        *(f"| {int(code)} | {meaning} |" for code, meaning in EXPLAINED.items()),
        "\n## Environment and config file\n",
        "Each option of `up`, `server`, `node` and `cluster` is also a key of `gangline.toml` and an environment "
        "variable: [settings](settings.md).",
    ]
    return "\n".join(parts) + "\n"


def _clause(text: str) -> str:
    """What comes before details."""
    return re.split(r"[:;.] |[:;.]$|, until", text)[0]


def _leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None) or {}
    if not inner:
        yield name, command
    for sub, one in inner.items():
        yield from _leaves(f"{name} {sub}", one)


def _page(name: str, command: Any, common: set[Option]) -> str:
    lines = [_NOTE, f"# gangline {name}\n"]
    if not getattr(command, "commands", None):
        return "\n".join([*lines, *_body(name, command, common, ())]).rstrip() + "\n"
    lines.append(f"{inspect.cleandoc(command.help or '')}\n")
    leaves = list(_leaves(name, command))
    of_all = set[Option].intersection(common, *({_shown(param) for param in _options(one)} for _, one in leaves))
    if of_all:
        lines.append(_shared("All of them take", (names for names, _ in sorted(of_all))))
    for full_name, one in leaves:
        lines += [f"## gangline {full_name}\n", *_body(full_name, one, common, of_all)]
    return "\n".join(lines).rstrip() + "\n"


def _shared(who: str, names: Iterable[str]) -> str:
    return f"{who} [common options](../cli.md#common-options): {', '.join(names)}.\n".lstrip()


def _body(name: str, command: Any, common: set[Option], said: Container[Option]) -> Iterator[str]:
    """said: options that the page has named already."""
    if arguments := " ".join(_argument(param) for param in command.params if _is_shown(param) and _is_argument(param)):
        yield f"```\ngangline {name} {arguments} [OPTIONS]\n```\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    of_tables: dict[str, list[str]] = {}
    own: list[str] = []
    shared: list[str] = []
    for param in _options(command):
        names, meaning = _shown(param)
        key = param.name.replace("__", ".", 1)
        if key in LEAVES and name in SERVED and key not in SERVED[name].help:
            of_tables.setdefault(LEAVES[key].table, []).append(names)
        elif (names, meaning) in common:
            shared += [names] * ((names, meaning) not in said)
        else:
            own.append(f"- {names}{': ' * bool(meaning)}{meaning}")
    if own:
        yield "\n".join(own) + "\n"
    for table, names in of_tables.items():
        title = table or "machine"  # as on the page of settings
        yield f"[Settings: {title}](../settings.md#{title}): {', '.join(names)}.\n"
    if shared:
        yield _shared("And", shared)


def _options(command: Any) -> Iterator[Any]:
    yield from (param for param in command.params if _is_shown(param) and not _is_argument(param))


def _is_shown(param: Any) -> bool:
    return not getattr(param, "hidden", False)


def _is_argument(param: Any) -> bool:
    return not any(name.startswith("-") for name in param.opts)


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    return name if param.required or name.startswith("[") else f"[{name}]"


def _shown(param: Any) -> Option:
    names = ", ".join(f"`{name}`" for name in param.opts if name != "-h")
    meaning = " ".join((param.help or "").split())
    if param.required:
        return names, f"{meaning} Required."
    if param.is_flag or param.default in (None, "", []) or "Default:" in meaning:
        return names, meaning
    default = ", ".join(map(str, param.default)) if isinstance(param.default, list | tuple) else param.default
    return names, f"{meaning} Default: `{default}`."
