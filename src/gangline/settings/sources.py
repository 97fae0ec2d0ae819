"""Values of settings: option, else environment variable, else gangline.toml, else default; each with its origin.

Also formats errors in settings: the key, its line in gangline.toml, and the nearest valid name.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from pydantic import BaseModel, ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.settings.fields import TABLES, Leaf, leaves_of

CONFIG_VARIABLE = "GANGLINE_CONFIG"
"""Path of the config file; if set to an empty value, no file is read."""
_USUAL = Path("gangline.toml")

_MOST = 8
_HEADER = re.compile(r"\s*\[\[?\s*([^\]]+?)\s*\]")
_KEY = re.compile(r"""\s*([\w."'-]+)\s*=""")


def explained(
    error: ValidationError, table: str, model: type[BaseModel], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Path in gangline.toml and message for each error, at most eight. known: keys of all tables."""
    for item in error.errors(include_url=False)[:_MOST]:
        steps = [str(step) for step in item["loc"]]
        path = ".".join([*([table] if table else []), *steps])
        if item["type"] == "extra_forbidden":
            yield path, f"unknown key {steps[-1]!r}{_inside(table, steps)}.{_hint(steps, table, model, known)}"
        else:
            message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
            yield path, f"{path}: {message}, got {_shown(item['input'])}"


def _inside(table: str, steps: list[str]) -> str:
    inside = ".".join([*([table] if table else []), *steps[:-1]])
    return f" in [{inside}]" if inside else " above the tables"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _hint(steps: list[str], table: str, model: type[BaseModel], known: Collection[str]) -> str:
    if len(steps) > 1:
        inner: Any = leaves_of({table: model})[".".join([*([table] if table else []), steps[0]])].kind
        return nearest(steps[-1], getattr(inner, "model_fields", ()))
    leaves = leaves_of({table: model}).values()
    spelled = {leaf.option.removeprefix("--").replace("-", "_"): leaf.name for leaf in leaves}
    names = {**spelled, **{leaf.name: leaf.name for leaf in leaves}}
    if found := difflib.get_close_matches(steps[0], names, n=1):
        return f" Did you mean {names[found[0]]!r}?"
    elsewhere = {key.rpartition(".")[2]: key for key in known}
    if found := difflib.get_close_matches(steps[0], elsewhere, n=1):
        inside, _, name = elsewhere[found[0]].rpartition(".")
        return f" Did you mean {name!r} {f'in [{inside}]' if inside else 'above the tables'}?"
    return "" if known or table else " Most settings belong in a table, such as [node]."


def nearest(name: str, names: Iterable[str]) -> str:
    """` Did you mean ...?`, or an empty string."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def line_of(text: str, path: str) -> int | None:
    """Line number of a key, or of the innermost part of its path that has a line; None if unknown.

    tomllib reports no line numbers, so this scans headers and starts of lines.
    """
    table, best, length = "", None, 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = found = _plain(header[1])
        elif key := _KEY.match(line):
            found = f"{table}.{_plain(key[1])}".removeprefix(".")
        else:
            continue
        if f"{path}.".startswith(f"{found}.") and len(found) > length:
            best, length = number, len(found)
        elif f"{found}.".startswith(f"{path}.") and length < len(path):
            best, length = number, len(path)
    return best


def _plain(name: str) -> str:
    return re.sub(r"[\s\"']", "", name)


class Origin(NamedTuple):
    """The source of a value."""

    source: Literal["default", "file", "environment", "option"]
    where: str = ""
    """Path of the file, or name of the variable or option."""


DEFAULT = Origin("default")


class ConfigFile(NamedTuple):
    """A gangline.toml."""

    path: Path
    text: str
    document: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Raises: InvalidRequest if it cannot be read or is not valid TOML."""
        try:
            text = path.read_text("utf-8")
            return cls(path, text, tomllib.loads(text))
        except OSError as error:
            raise InvalidRequest(f"cannot read the config file {path}: {error.strerror}.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path} is not TOML: {error}.") from error

    @classmethod
    def found(cls, environ: Mapping[str, str], named: Path | None) -> ConfigFile | None:
        """The given file, else GANGLINE_CONFIG's, else ./gangline.toml if it exists. Raises: InvalidRequest."""
        if named is not None:
            return cls.read(named)
        if (path := environ.get(CONFIG_VARIABLE)) is not None:
            return cls.read(Path(path).expanduser()) if path else None
        try:
            info = _USUAL.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidRequest(f"cannot read the config file {_USUAL}: {error.strerror}.") from error
        # The file names commands that are run, so a file that another user may place in a shared folder is not trusted.
        # Windows does not say in these fields who may write to it.
        if sys.platform == "win32" or info.st_uid not in (0, os.geteuid()) or info.st_mode & stat.S_IWOTH:
            raise InvalidRequest(
                f"{_USUAL.absolute()} may belong to another user, or others may write to it. Name it with --config or "
                f"{CONFIG_VARIABLE} if you trust it; an empty {CONFIG_VARIABLE} leaves it out."
            )
        return cls.read(_USUAL)

    def values(self, table: str, model: type[BaseModel], known: Collection[str]) -> dict[str, Any]:
        """Validated values of one table. known: keys of all tables, for hints. Raises: InvalidRequest."""
        data = self._table(table)
        leaves = leaves_of({table: model})
        for leaf in leaves.values():
            if leaf.setting.is_secret and leaf.name in data:
                raise InvalidRequest(f"{self._at(leaf.key)}: {leaf.name} is a secret. Set {leaf.env[0]} instead.")
        try:
            # Strictly as JSON: a number in quotes is an error, but a list becomes a tuple and a string a path.
            made = model.model_validate_json(json.dumps(data, default=str), strict=True)
        except ValidationError as error:
            found = explained(error, table, model, known)
            raise InvalidRequest("; ".join(f"{self._at(path)}: {what}" for path, what in found)) from error
        return {name: self._anchored(getattr(made, name)) for name in data}

    def _table(self, table: str) -> dict[str, Any]:
        """Raises: InvalidRequest."""
        if not table:
            return {name: value for name, value in self.document.items() if name not in TABLES}
        if isinstance(found := self.document.get(table, {}), dict):
            return cast("dict[str, Any]", found)
        raise InvalidRequest(f"{self._at(table)}: [{table}] is a table, got {found!r}.")

    def _anchored(self, value: Any) -> Any:
        """Relative paths are resolved from the file's folder."""
        if isinstance(value, Path):
            return self.path.absolute().parent / value
        return tuple(map(self._anchored, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else value

    def _at(self, path: str) -> str:
        line = line_of(self.text, path)
        return str(self.path) if line is None else f"{self.path}, line {line}"


class Sources(NamedTuple):
    """Sources of settings, strongest first."""

    options: Mapping[str, Any]
    """Values by key, for options that were given."""
    handed_over: Mapping[str, BaseModel]
    """Settings by table, from a parent process. For such a table only options can override them."""
    environ: Mapping[str, str]
    file: ConfigFile | None
    known: Collection[str] = ()
    """Keys of all tables, for hints in errors."""

    @classmethod
    def found(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        config: Path | None = None,
        options: Mapping[str, Any] | None = None,
        handed_over: Mapping[str, BaseModel] | None = None,
        known: Collection[str] = (),
    ) -> Sources:
        """environ: None: the process's own. config: path of the file, instead of the default ones.

        Raises: InvalidRequest if the file cannot be read.
        """
        env = os.environ if environ is None else environ
        return cls(options or {}, handed_over or {}, env, ConfigFile.found(env, config), known)

    def values(self, table: str, model: type[BaseModel]) -> tuple[dict[str, Any], dict[str, Origin]]:
        """Values that are not defaults, and their origins, by field. Raises: InvalidRequest."""
        values: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        leaves = leaves_of({table: model})
        if (handed := self.handed_over.get(table)) is not None:
            values = {name: getattr(handed, name) for name in model.model_fields}
        else:
            if self.file is not None:
                values = self.file.values(table, model, self.known)
                origins = dict.fromkeys(values, Origin("file", str(self.file.path)))
            for leaf, variable in _set(leaves.values(), self.environ):
                values[leaf.name] = _validated(model, leaf, self.environ[variable], variable)
                origins[leaf.name] = Origin("environment", variable)
            _refuse_unknown(table, leaves, self.environ)
        for leaf in leaves.values():
            if leaf.key in self.options:
                values[leaf.name] = _validated(model, leaf, self.options[leaf.key], leaf.option)
                origins[leaf.name] = Origin("option", leaf.given_as(values[leaf.name]))
        return values, origins


def _set(leaves: Collection[Leaf], environ: Mapping[str, str]) -> Iterator[tuple[Leaf, str]]:
    for leaf in leaves:
        if (variable := next((name for name in leaf.env if environ.get(name)), None)) is not None:
            yield leaf, variable


def _validated(model: type[BaseModel], leaf: Leaf, value: Any, source: str) -> Any:
    """Raises: InvalidRequest."""
    try:
        given = leaf.read(value) if isinstance(value, str) else value
        return getattr(model.model_validate({leaf.name: given}), leaf.name)
    except ValidationError as error:
        found = explained(error, leaf.table, model, ())
        problems = "; ".join(what.removeprefix(f"{leaf.key}: ") for _, what in found)
        raise InvalidRequest(f"{source}: {problems}") from error
    except ValueError as error:
        raise InvalidRequest(f"{source}: {error}.") from error


def _refuse_unknown(table: str, leaves: Mapping[str, Leaf], environ: Mapping[str, str]) -> None:
    """Raises: InvalidRequest for a variable that has a setting's prefix but is not one."""
    prefix = f"GANGLINE_{table.upper()}__"
    names = {leaf.env[0] for leaf in leaves.values()}
    for name in sorted(environ) if table else ():
        if name.startswith(prefix) and name not in names:
            raise InvalidRequest(f"the environment variable {name} is not a setting.{nearest(name, names)}")
