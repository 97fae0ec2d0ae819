"""Tasks of ProRL Agent's instances, by their `data_source`: an operator's template, or a registered handler.

A template is `<data>/server/handlers/<data_source>.json`, a task's body in which `{name}` stands for the instance's
field of that name. A data source without one is the name of an `AgentHandler`, an entry point of `gangline.handlers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from gangline import plugins
from gangline.domain.errors import InvalidRequest, StoreError
from gangline.domain.ids import ID_PATTERN

__all__ = ["Templates"]

_SOURCE = re.compile(ID_PATTERN)
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Templates:
    """folder: the operator's templates; None is none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def task_of(self, instance: Mapping[str, Any]) -> dict[str, Any]:
        """Body of the instance's task. Templates are read each time, so that a changed one counts at once.

        Raises: InvalidRequest when its data source is not known, StoreError when a template cannot be read.
        """
        source = instance.get("data_source")
        if not isinstance(source, str) or not _SOURCE.fullmatch(source):
            raise InvalidRequest(
                "instance: give `agent` and `instruction`, as in a task, or the `data_source` of a template or handler."
            )
        if (template := self._template(source)) is not None:
            return cast("dict[str, Any]", _filled(template, instance))
        if source in plugins.names("handler"):
            return _handled(source, instance)
        known = sorted({*self._names(), *plugins.names("handler")})
        raise InvalidRequest(f"no template for data_source {source[:140]!r}. Known: {', '.join(known) or 'none'}.")

    def _template(self, source: str) -> dict[str, Any] | None:
        """Raises: StoreError."""
        if self._folder is None:
            return None
        path = self._folder / f"{source}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(f"the template {path.name} cannot be read: {error}") from error

    def _names(self) -> list[str]:
        return [] if self._folder is None else [path.stem for path in self._folder.glob("*.json")]


def _handled(handler: str, instance: Mapping[str, Any]) -> dict[str, Any]:
    """The task that a handler's methods carry out."""
    instruction = instance.get("instruction")
    return {
        "instruction": instruction if isinstance(instruction, str) else "",
        "agent": {"harness": "handler", "settings": {"handler": handler, "instance": dict(instance)}},
        "evaluator": {"strategy": "handler"},
    }


def _filled(value: Any, instance: Mapping[str, Any]) -> Any:
    """The template with the instance's fields in it; braces around anything else stay."""
    if isinstance(value, str):
        return _FIELD.sub(lambda found: _text(instance, found[1], found[0]), value)
    if isinstance(value, dict):
        return {name: _filled(inner, instance) for name, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_filled(inner, instance) for inner in cast("list[Any]", value)]
    return value


def _text(instance: Mapping[str, Any], name: str, otherwise: str) -> str:
    if name not in instance:
        return otherwise
    value = instance[name]
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
