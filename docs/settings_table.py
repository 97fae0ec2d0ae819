"""The page of settings: every key of gangline.toml, its option, its environment variable and its default."""

from __future__ import annotations

import json
from collections.abc import Iterator

from gangline.cli.options.settings import COMMANDS
from gangline.settings.fields import TABLES, Leaf
from gangline.settings.service import LEAVES

_INTRODUCTION = """\
# Settings

Keys of `gangline.toml`. An option wins over an environment variable, a variable over the file. Unless a line names
others, the option of `run_slots` is `--run-slots`, and the variable of `run_slots` in table `[node]` is
`GANGLINE_NODE__RUN_SLOTS`. [Configuration](../guides/configuration.md) explains how settings are found;
`gangline config show` prints the values and where each came from.
"""
_ABOUT = {
    "": "Above the tables: settings for every command. Options are named where there are any.",
    "server": "For `gangline server`, and the server of `gangline up`.",
    "node": "For `gangline node`, and the nodes of `gangline up` and `gangline cluster`.",
    "cluster": "For `gangline cluster` and `gangline up --cluster`.",
    "up": "For `gangline up` alone.",
}


def settings() -> str:
    """docs/reference/settings.md"""
    parts = ["<!-- Made by docs/generate.py from the code; `make docs` makes it again. -->\n", _INTRODUCTION]
    for table in ("", *TABLES):
        parts += [f"## {f'[{table}]' if table else 'Machine'}\n", f"{_ABOUT[table]}\n"]
        parts += [_line(leaf) for leaf in LEAVES.values() if leaf.table == table]
        parts.append("")
    parts.append(f"Defaults of `gangline up` that differ: {'; '.join(_own_defaults())}.\n")
    return "\n".join(parts)


def _line(leaf: Leaf) -> str:
    names = [*_options(leaf), *(f"`{name}`" for name in _variables(leaf))]
    meaning = leaf.about
    default = _default(leaf)
    shown = f" Default: {default}." if default and "Default:" not in meaning else ""
    bracketed = f" ({', '.join(names)})" if names else ""
    key = f"`{leaf.name}`" if not leaf.setting.is_secret else "not in the file"
    return f"- {key}{bracketed}: {meaning}{_bounds(leaf)}{shown}"


def _bounds(leaf: Leaf) -> str:
    lowest = next((one.ge for one in leaf.field.metadata if hasattr(one, "ge")), 0)
    highest = next((one.le for one in leaf.field.metadata if hasattr(one, "le")), None)
    return (f" At least {lowest}." if lowest else "") + ("" if highest is None else f" At most {highest}.")


def _options(leaf: Leaf) -> Iterator[str]:
    """Those whose name does not follow from the key's."""
    if any(leaf.key in command.options for command in COMMANDS.values()):
        if not leaf.table or leaf.option != f"--{leaf.name.replace('_', '-')}":
            yield f"`{leaf.option}`"
        if leaf.unset:
            yield f"unset: `{leaf.unset}`"


def _variables(leaf: Leaf) -> tuple[str, ...]:
    usual = f"GANGLINE_{leaf.table}__{leaf.name}".upper()
    return () if leaf.env == (usual,) else leaf.env


def _default(leaf: Leaf) -> str:
    value = leaf.field.default
    if leaf.field.default_factory is not None or value in (None, (), {}) or value is False or leaf.is_document:
        return ""
    return f"`{json.dumps(value, default=str)}`"


def _own_defaults() -> Iterator[str]:
    for key, value in COMMANDS["up"].defaults.items():
        yield f"`{key}` {json.dumps(value)}"
