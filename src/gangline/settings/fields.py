"""Names of a setting: its key in gangline.toml, option and environment variables, and the conversion from text."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gangline.domain.described import descriptions

TABLES = ("server", "node", "cluster", "up")
"""Tables of gangline.toml. The machine's own settings are above them."""


class Setting(NamedTuple):
    """Metadata of a field (`Annotated[int, Setting(...)]`) whose names are not derived from its own."""

    option: str | None = None
    """Command-line option; None: the field's name with dashes."""
    unset: str | None = None
    """Option that unsets a flag; None: `--no-` and the flag's name."""
    env: tuple[str, ...] = ()
    """Environment variables, of which the first one that is set counts; empty: GANGLINE_TABLE__FIELD."""
    words: bool = False
    """Whether the variable contains a list as shell-quoted words instead of JSON."""
    is_secret: bool = False
    """Whether it is read from the environment only, and never printed."""


class Leaf(NamedTuple):
    """One setting."""

    table: str
    """Empty for the machine's settings."""
    name: str
    model: type[BaseModel]
    field: FieldInfo
    setting: Setting

    @property
    def about(self) -> str:
        """Its docstring, on one line."""
        return " ".join(descriptions(self.model).get(self.name, "").split())

    @property
    def key(self) -> str:
        """Path in gangline.toml."""
        return f"{self.table}.{self.name}" if self.table else self.name

    @property
    def option(self) -> str:
        return self.setting.option or f"--{self.name.replace('_', '-')}"

    @property
    def unset(self) -> str | None:
        """Option that unsets a flag from a weaker source; None unless it is a flag."""
        if self.kind is not bool:
            return None
        return self.setting.unset or f"--no-{self.option.removeprefix('--')}"

    def given_as(self, value: Any) -> str:
        """The option that sets the value."""
        return self.unset if self.unset is not None and value is False else self.option

    @property
    def env(self) -> tuple[str, ...]:
        # Two underscores: Kubernetes sets variables such as GANGLINE_SERVER_PORT for a service of that name.
        return self.setting.env or (
            "GANGLINE_" + (f"{self.table}__" if self.table else "").upper() + self.name.upper(),
        )

    @property
    def kind(self) -> Any:
        """Its type without None: a plain type, `tuple[item, ...]`, `dict[...]`, a Literal or a model."""
        annotation: Any = self.field.annotation
        if isinstance(annotation, UnionType):
            annotation = next(get_arg for get_arg in get_args(annotation) if get_arg is not type(None))
        return annotation

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple

    @property
    def is_document(self) -> bool:
        """Whether its text form is JSON."""
        return get_origin(self.kind) is dict or (isinstance(self.kind, type) and issubclass(self.kind, BaseModel))

    def read(self, text: str) -> Any:
        """The value of an environment variable, or of an option with JSON. Raises: ValueError."""
        if self.is_list and get_args(self.kind)[0] is Path:
            return [piece for piece in text.split(os.pathsep) if piece]
        if self.is_list and self.setting.words:
            return shlex.split(text)
        if self.is_list or self.is_document:
            try:
                return json.loads(text)
            except ValueError as error:
                raise ValueError(f"it is not JSON: {error}") from error
        return text

    def write(self, value: Any) -> str:
        """The reverse of `read`, for a child's environment."""
        if self.is_list and get_args(self.kind)[0] is Path:
            return os.pathsep.join(map(str, value))
        if self.is_list and self.setting.words:
            return shlex.join(value)
        if self.is_list or self.is_document:
            return json.dumps(value)
        return str(int(value)) if isinstance(value, bool) else str(value)


def leaves_of(models: Mapping[str, type[BaseModel]]) -> dict[str, Leaf]:
    """Settings by key. models: by table, "" for the machine's settings."""
    found = [
        Leaf(table, name, model, field, next((one for one in field.metadata if isinstance(one, Setting)), Setting()))
        for table, model in models.items()
        for name, field in model.model_fields.items()
    ]
    return {leaf.key: leaf for leaf in found}
