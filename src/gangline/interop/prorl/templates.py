"""Creates tasks from ProRL Agent's instances, by `data_source`: the operator's template, a preset, or a registered
handler.

A template is `<data>/server/handlers/<data_source>.json`, a task's body in which `{name}` is replaced by the instance's
field of that name. With `"preset": NAME` it is based on that preset's template and overrides its fields. The names of
the published server's own handlers are presets here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest, StoreError
from gangline.domain.ids import ID_PATTERN
from gangline.domain.task_template import filled
from gangline.settings import plugins
from gangline.settings.wings import wing_part

_SOURCE = re.compile(ID_PATTERN)
_USUAL_SOURCE = "swebench"
_PRESETS = {"swebench": "swe", "deepscaler": "math"} | dict.fromkeys(
    ("codecontests", "apps", "codeforces", "taco"), "code"
)
"""The published server's data sources; names starting with `deepcoder` are also code."""


class Templates:
    """folder: the operator's templates; None: no templates."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def task_of(self, instance: Mapping[str, Any]) -> dict[str, Any]:
        """Body of the instance's task. Templates are read each time, so that changes take effect at once.

        Raises: InvalidRequest if its data source is unknown or a preset cannot read it, StoreError if a template cannot
        be read.
        """
        source = instance.get("data_source") or _USUAL_SOURCE
        if not isinstance(source, str) or not _SOURCE.fullmatch(source):
            raise InvalidRequest(
                "instance: give `agent` and `instruction`, as in a task, or the `data_source` of a template, preset or "
                "handler; without one it is `swebench`."
            )
        if (template := self._template(source)) is not None:
            return _of_preset(template, instance) if "preset" in template else filled(template, instance)
        if (preset := _presets().get(source)) is not None:
            return preset.task(instance)
        if source in plugins.names("handler"):
            return _handled(source, instance)
        if (preset := _presets().get(_preset_name(source))) is not None:
            return preset.task(instance)
        known = sorted({*self._names(), *_presets(), *plugins.names("handler")})
        raise InvalidRequest(f"no template for data_source {source[:140]!r}. Known: {', '.join(known)}.")

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


def _presets() -> dict[str, Any]:
    """Name -> `gangline.tasks.presets.Preset`."""
    return {preset.name: preset for preset in wing_part("presets")}


def _preset_name(source: str) -> str:
    return "code" if source.startswith("deepcoder") else _PRESETS.get(source, "")


def _of_preset(template: dict[str, Any], instance: Mapping[str, Any]) -> dict[str, Any]:
    """Raises: InvalidRequest."""
    changes = {name: value for name, value in template.items() if name != "preset"}
    preset = _presets().get(str(template["preset"]))
    if preset is None:
        raise InvalidRequest(f"the template names the preset {template['preset']!r}. Known: {', '.join(_presets())}.")
    return preset.task(instance, changes)


def _handled(handler: str, instance: Mapping[str, Any]) -> dict[str, Any]:
    """A task that runs the handler's methods."""
    instruction = instance.get("instruction")
    return {
        "instruction": instruction if isinstance(instruction, str) else "",
        "agent": {"harness": "handler", "settings": {"handler": handler, "instance": dict(instance)}},
        "evaluator": {"strategy": "handler"},
    }
