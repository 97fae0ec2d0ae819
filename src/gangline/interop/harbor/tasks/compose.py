"""Reads `environment/docker-compose.yaml` of a Harbor task: the agent's container `main`, and further services. Any key
that is not listed here is refused by name.

Values are read as text, as compose does: `no` and `0755` keep their spelling. `${VAR}` must be a variable of the task's
environment or have a default; variables of this machine are never used.

Source: Harbor 0.26, `environments/docker`; the Compose Specification.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.interop.harbor.tasks.config import MAIN
from gangline.machine.reading.documents import read_yaml
from gangline.machine.reading.environment import image_name
from gangline.machine.reading.paths import SourcePath

COMPOSE_FILE = "docker-compose.yaml"
_TOP = {"services", "version", "name"}
_NO_MEANING = {"expose"}
_KEYS_OF_MAIN = {"build", "image", "command", "environment", "depends_on"}
_KEYS = {
    *("image", "build", "command", "entrypoint", "environment", "user", "working_dir", "healthcheck", "depends_on"),
    *("container_name", "hostname", "restart"),
}
_KEYS_OF_BUILD = {"context", "dockerfile"}
_KEYS_OF_CHECK = {"test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"}
_CONDITIONS = {
    "service_started": "started",
    "service_healthy": "ready",
    "service_completed_successfully": "ready",
}
_IDLE = ("sleep infinity", "tail -f /dev/null")
_VARIABLE = re.compile(
    r"\$(?:\$|(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<sign>:?-)(?P<else>[^${}]*))?\}|)"
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_S, _LONGEST_TRY_S = 3600.0, 120.0
"""Upper bounds for a task's health check."""


class Compose(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed file."""

    services: dict[str, dict[str, Any]]
    """The body's `runtime.services`."""
    env: dict[str, str]
    """Variables of the agent's container."""
    image: str | None
    """Image of the agent's container."""
    notes: tuple[str, ...]


def compose_of(name: str, folder: SourcePath, env: dict[str, str]) -> Compose | None:
    """None if the folder has no such file.

    name: the task's. env: variables of the task's environment, with their values.
    Raises: InvalidRequest, naming the unsupported keys.
    """
    path = folder / COMPOSE_FILE
    if not path.has_file():
        return None
    return _Reader(name, folder, env).read(read_yaml(path, as_texts=True))


class _Reader:
    """Reads one file and collects unsupported keys."""

    def __init__(self, name: str, folder: SourcePath, env: Mapping[str, str]) -> None:
        self._name = name
        self._folder = folder
        self._env = env
        self._refused: list[str] = []
        self._notes: list[str] = []

    def read(self, document: Any) -> Compose:
        """Raises: InvalidRequest."""
        top = self._table("the file", document)
        self._refused += sorted(key for key in top.keys() - _TOP if not key.startswith("x-"))
        services = self._table("services", self._filled("services", top.get("services")))
        main = self._table(f"services.{MAIN}", services.pop(MAIN, None))
        env = self._environment(f"services.{MAIN}.environment", main.get("environment"))
        image = self._main(main)
        found = {name: self._service(name, self._table(f"services.{name}", given)) for name, given in services.items()}
        for name, given in (*services.items(), (MAIN, main)):
            self._wait(name, self._table(f"services.{name}", given).get("depends_on"), found)
        if self._refused:
            raise InvalidRequest(
                f"{self._name}: {self._folder.name}/{COMPOSE_FILE} requests unsupported features: "
                f"{', '.join(dict.fromkeys(self._refused))}."
            )
        return Compose(services=found, env=env, image=image, notes=tuple(self._notes))

    def _main(self, given: dict[str, Any]) -> str | None:
        """Image of the agent's container, if the file sets it."""
        where = f"services.{MAIN}"
        self._refuse_others(where, given, _KEYS_OF_MAIN)
        command = self._words(f"{where}.command", given.get("command"))
        if command is not None and " ".join(command[2:] if command[1:2] == ["-c"] else command) not in _IDLE:
            self._refused.append(f"{where}.command")
        build = given.get("build")
        if build is None:
            return self._text(f"{where}.image", given.get("image"))
        context, dockerfile = self._build(f"{where}.build", build)
        if (context, dockerfile) != (self._folder, self._folder / "Dockerfile"):
            self._refused.append(f"{where}.build")
        return None

    def _service(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        where = f"services.{name}"
        self._refuse_others(where, given, _KEYS)
        for key in ("container_name", "hostname"):
            if given.get(key, name) != name:
                self._refused.append(f"{where}.{key}")
        if given.get("restart", "no") != "no":
            self._refused.append(f"{where}.restart")
        found = {
            "image": self._image(name, given),
            "entrypoint": self._words(f"{where}.entrypoint", given.get("entrypoint")),
            "command": self._words(f"{where}.command", given.get("command")),
            "env": self._environment(f"{where}.environment", given.get("environment")),
            "user": self._text(f"{where}.user", given.get("user")),
            "workdir": self._text(f"{where}.working_dir", given.get("working_dir")),
            "healthcheck": self._healthcheck(f"{where}.healthcheck", given.get("healthcheck")),
        }
        return {key: value for key, value in found.items() if value not in (None, {})}

    def _image(self, name: str, given: dict[str, Any]) -> str | None:
        if given.get("build") is None:
            if given.get("image") is None:
                self._refused.append(f"services.{name} without image or build")
            return self._text(f"services.{name}.image", given.get("image"))
        context, dockerfile = self._build(f"services.{name}.build", given["build"])
        if not dockerfile.has_file():
            self._refused.append(f"services.{name}.build ({dockerfile})")
            return None
        below = "/".join(dockerfile.parts[len(context.parts) :])
        image = image_name(f"{self._name}-{name}-{below}", context)
        file = "" if below == "Dockerfile" else f"-f {dockerfile} "
        self._notes.append(
            f"{self._name}: the image of its service {name} must be there: docker build -t {image} {file}{context}"
        )
        return image

    def _build(self, where: str, given: Any) -> tuple[SourcePath, SourcePath]:
        """Context and Dockerfile."""
        table = {"context": given} if isinstance(given, str) else self._table(where, given)
        self._refuse_others(where, table, _KEYS_OF_BUILD)
        named = {key: self._text(f"{where}.{key}", table.get(key)) for key in _KEYS_OF_BUILD}
        try:
            context = self._folder / (named["context"] or ".")
            return context, context / (named["dockerfile"] or "Dockerfile")
        except InvalidRequest as error:
            raise InvalidRequest(f"{self._name}: {where}: {error.message}") from error

    def _wait(self, name: str, given: Any, found: dict[str, dict[str, Any]]) -> None:
        """Record the dependencies of a service or of the agent's container."""
        where = f"services.{name}.depends_on"
        names = (
            dict.fromkeys(map(str, cast("list[Any]", given))) if isinstance(given, list) else self._table(where, given)
        )
        for other, how in names.items():
            table = self._table(f"{where}.{other}", how)
            self._refuse_others(f"{where}.{other}", table, {"condition"})
            condition = self._text(f"{where}.{other}.condition", table.get("condition", "service_started"))
            is_known = other in found or (other, condition) == (MAIN, "service_started")
            if condition not in _CONDITIONS or not is_known:
                self._refused.append(f"{where}.{other}")
                continue
            if other == MAIN:
                continue  # the agent's container is started first
            if condition == "service_completed_successfully":
                found[other]["completes"] = True
            elif condition == "service_healthy" and "healthcheck" not in found[other]:
                self._refused.append(f"{where}.{other} (the health check of an image)")
            if name != MAIN:
                found[name].setdefault("depends_on", {})[other] = _CONDITIONS[condition]

    def _healthcheck(self, where: str, given: Any) -> dict[str, Any] | None:
        table = self._table(where, given)
        self._refuse_others(where, table, _KEYS_OF_CHECK)
        test: Any = table.get("test")
        if given is None or table.get("disable") == "true" or test in ("NONE", ["NONE"]):
            return None
        match test:
            case str():
                command: Any = test
            case ["CMD-SHELL", str() as command]:
                pass
            case ["CMD", *command]:
                pass
            case _:
                self._refused.append(f"{where}.test")
                return None
        interval_s, timeout_s = (self._seconds(f"{where}.{key}", table.get(key), 30) for key in ("interval", "timeout"))
        retries = self._text(f"{where}.retries", table.get("retries", "3")) or ""
        if not re.fullmatch("[0-9]{1,4}", retries):
            self._refused.append(f"{where}.retries")
            return None
        start_s = self._seconds(f"{where}.start_period", table.get("start_period"), 0)
        within_s = start_s + max(1, int(retries)) * (interval_s + timeout_s)
        timeout_s, within_s = min(timeout_s, _LONGEST_TRY_S), min(within_s, _LONGEST_S)
        return {"command": command, "timeout_seconds": timeout_s, "within_seconds": within_s}

    def _seconds(self, where: str, given: Any, default: float) -> float:
        """Parses durations such as `1m30s`. Compose treats 0 as the default."""
        given = self._text(where, given)
        pieces = _DURATION.findall(given or "")
        if given is not None and "".join(number + unit for number, unit in pieces) != given:
            self._refused.append(where)
        return sum(float(number) * _SECONDS[unit] for number, unit in pieces) or default

    def _words(self, where: str, given: Any) -> list[str] | None:
        if given is None:
            return None
        try:
            words = shlex.split(given) if isinstance(given, str) else given
        except ValueError:  # an unclosed quotation
            words = None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in cast("list[Any]", words)):
            self._refused.append(where)
            return None
        return cast("list[str]", words)

    def _environment(self, where: str, given: Any) -> dict[str, str]:
        """A variable without a value is refused: compose would read it from this machine."""
        if isinstance(given, list):
            lines = [str(line).partition("=") for line in cast("list[Any]", given)]
            variables: dict[str, Any] = {name: value if sign else None for name, sign, value in lines}
        else:
            variables = self._table(where, given)
        self._refused += [f"{where}.{name}" for name, value in variables.items() if not isinstance(value, str)]
        return {name: value for name, value in variables.items() if isinstance(value, str)}

    def _text(self, where: str, given: Any) -> str | None:
        if given is not None and not isinstance(given, str):
            self._refused.append(f"{where} (not a text)")
        return given if isinstance(given, str) else None

    def _table(self, where: str, given: Any) -> dict[str, Any]:
        """Raises: InvalidRequest if it is not a mapping of names."""
        if given is None:
            return {}
        if not isinstance(given, dict) or not all(isinstance(key, str) for key in cast("dict[Any, Any]", given)):
            raise InvalidRequest(f"{self._name}: {COMPOSE_FILE}: {where} is not a mapping of names.")
        return dict(cast("dict[str, Any]", given))

    def _refuse_others(self, where: str, given: dict[str, Any], known: set[str]) -> None:
        others = given.keys() - known - _NO_MEANING
        self._refused += sorted(f"{where}.{key}" for key in others if not key.startswith("x-"))

    def _filled(self, where: str, value: Any) -> Any:
        """The value with variables replaced."""
        if isinstance(value, dict):
            table = cast("dict[str, Any]", value)
            return {key: self._filled(f"{where}.{key}", one) for key, one in table.items()}
        if isinstance(value, list):
            return [self._filled(where, one) for one in cast("list[Any]", value)]
        return _VARIABLE.sub(lambda match: self._variable(where, match), value) if isinstance(value, str) else value

    def _variable(self, where: str, match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name = match["plain"] or match["name"]
        known = self._env.get(name) if name else None
        if known is not None and (known or match["sign"] != ":-"):
            return known
        if match["sign"] is None or name in os.environ:
            self._refused.append(f"{where} (the variable {match[0]} of this machine)")
        return match["else"] or ""
