"""The page of settings: every key of gangline.toml, its option, its environment variable and its default."""

from __future__ import annotations

import json
from collections.abc import Iterator

from gangline.cli.options.settings import COMMANDS
from gangline.settings.fields import TABLES, Leaf
from gangline.settings.service import LEAVES

_INTRODUCTION = """\
# Settings

Keys of `gangline.toml`, each with its option and its environment variable. An option wins over a variable, a variable
over the file. [Configuration](../guides/configuration.md) explains how they are found, and `gangline config show`
prints the values and where each came from.
"""
_ABOUT = {
    "": "Above the tables: settings of the machine, for every command.",
    "server": "Settings of `gangline server`, and of the server of `gangline up`.",
    "node": "Settings of `gangline node`, and of the nodes of `gangline up` and `gangline cluster`.",
    "cluster": "Settings of nodes on Ray, for `gangline cluster` and `gangline up --cluster`.",
    "up": "Settings of `gangline up` alone.",
}


def settings() -> str:
    """docs/reference/settings.md"""
    parts = ["<!-- Made by docs/generate.py from the code; `make docs` makes it again. -->\n", _INTRODUCTION]
    for table in ("", *TABLES):
        parts += [f"## {f'[{table}]' if table else 'The machine'}\n", f"{_ABOUT[table]}\n"]
        parts += ["| key | option | environment | default | meaning |", "|---|---|---|---|---|"]
        parts += [_row(leaf) for leaf in LEAVES.values() if leaf.table == table]
        parts.append("")
    defaults = "; ".join(_own_defaults())
    parts.append(f"Defaults of `gangline up` where they differ: {defaults}.\n")
    return "\n".join(parts)


def _row(leaf: Leaf) -> str:
    key = f"`{leaf.name}`" if not leaf.setting.is_secret else "(not in the file)"
    has_option = any(leaf.key in command.options for command in COMMANDS.values())
    option = ", ".join(f"`{name}`" for name in (leaf.option, leaf.unset) if name) if has_option else ""
    env = ", ".join(f"`{name}`" for name in leaf.env)
    meaning = " ".join((leaf.field.description or "").split()).replace("|", "\\|")
    return f"| {key} | {option} | {env} | {_default(leaf)} | {meaning} |"


def _default(leaf: Leaf) -> str:
    value = leaf.field.default
    if leaf.field.default_factory is not None or value in (None, (), {}) or leaf.is_document:
        return ""
    return f"`{json.dumps(value, default=str)}`"


def _own_defaults() -> Iterator[str]:
    for key, value in COMMANDS["up"].defaults.items():
        yield f"`{key}` {json.dumps(value)}"
