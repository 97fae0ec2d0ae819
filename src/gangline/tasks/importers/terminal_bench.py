"""Terminal-Bench task folders, the format before Harbor's: `task.yaml`, `Dockerfile`, `run-tests.sh`, `tests/`,
`solution.sh`.

Graded as in Terminal-Bench: `run-tests.sh` runs in the agent's runtime after its processes have ended, and all tests in
pytest's summary must have passed (skipped and expected failures count as passed). Tests that never printed a summary,
because their tools could not be installed, are not informative about the agent: there is no reward.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.documents import read_yaml
from gangline.machine.reading.environment import Environment, OwnFolders
from gangline.machine.reading.files import written
from gangline.machine.reading.grading import GRADING_MARGIN_S, script_evaluator, solution, tests_of
from gangline.machine.reading.imported import Choices, FolderFormat, Imported, plain
from gangline.machine.reading.paths import SourcePath
from gangline.settings.plugins import explain

FOLDERS = OwnFolders(("/tests", "/logs/verifier", "/oracle"))
_RUN_TESTS = """
out=/logs/verifier/test-stdout.txt
bash /tests/run-tests.sh >$out 2>&1 </dev/null
tail -c 2000 $out
sed -n '/short test summary info/,$p' $out >$out.summary
grep -qE '^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) ' $out.summary || { echo 'pytest left no summary (-rA)'; exit 3; }
if grep -qE '^(FAILED|ERROR|XPASS) ' $out.summary; then echo 0; else echo 1; fi >/logs/verifier/reward.txt
"""
_COMPOSE_FIELDS = {"build", "image", "container_name", "command", "environment", "volumes"}
"""Fields of its only service that just concern Terminal-Bench's own start."""


class _TaskYaml(BaseModel):
    """The supported part of `task.yaml`; the rest is descriptive."""

    model_config = ConfigDict(frozen=True, extra="allow")

    instruction: str
    max_agent_timeout_sec: float = Field(default=360, gt=0)
    max_test_timeout_sec: float = Field(default=60, gt=0)
    parser_name: str = "pytest"


def is_terminal_bench_task(folder: Path) -> bool:
    return os.path.lexists(folder / "task.yaml")


def read_terminal_bench_task(folder: SourcePath, choices: Choices) -> Imported:
    """Raises: InvalidRequest, naming the missing or unsupported field."""
    document = read_yaml(folder / "task.yaml")
    config = _config_of(document, folder / "task.yaml")
    if config.parser_name != "pytest":
        raise InvalidRequest(
            f"{folder.name}: its tests are read by parser {config.parser_name!r}; only pytest's can be."
        )
    service = _service(folder)
    environment = Environment(
        name=folder.name,
        context=_context(folder, service),
        env={**_variables(service), "TEST_DIR": "/tests"},
        limits={},
        folders=FOLDERS,
    )
    runtime, notes = environment.runtime(choices)
    body: dict[str, Any] = {
        "instruction": config.instruction,
        "runtime": runtime,
        "evaluator": _evaluator(folder, config),
        "timeout_seconds": config.max_agent_timeout_sec,
        "evaluation_timeout_seconds": config.max_test_timeout_sec + GRADING_MARGIN_S,
        "metadata": {"source": "terminal-bench", "task": folder.name, "instance": plain(document)},
    }
    if (folder / "solution.sh").has_file():
        files = {"/oracle/solution.sh": written(folder / "solution.sh", mode=0o755)}
        body["solution"] = solution(files, ["bash", "/oracle/solution.sh"], {})
    if choices.network is None:
        notes.append(f"{folder.name}: agent and tests reach the model only, unless --network full")
    return Imported(name=folder.name, body=body, notes=tuple(notes))


def _evaluator(folder: SourcePath, config: _TaskYaml) -> dict[str, Any]:
    files = tests_of(folder / "tests", "/tests")
    files["/tests/run-tests.sh"] = written(folder / "run-tests.sh", mode=0o755)
    clear = ["/tests", "/logs/verifier"]
    return script_evaluator(_RUN_TESTS, files, clear=clear, timeout_s=config.max_test_timeout_sec, env={})


def _config_of(document: Any, path: SourcePath) -> _TaskYaml:
    try:
        return _TaskYaml.model_validate(document)
    except ValidationError as error:
        raise InvalidRequest(f"{path}: {explain(error)}") from error


def _service(folder: SourcePath) -> dict[str, Any]:
    """Its container in docker-compose.yaml. Raises: InvalidRequest if the task has more than one."""
    path = folder / "docker-compose.yaml"
    if not path.has_file():
        return {}
    document: Any = read_yaml(path)
    services: Any = cast("dict[str, Any]", document).get("services") if isinstance(document, dict) else None
    if not isinstance(services, dict) or len(cast("dict[str, Any]", services)) != 1:
        raise InvalidRequest(f"{folder.name}: {path} has other than one service; a task is one runtime here.")
    (service,) = cast("dict[str, Any]", services).values()
    found = cast("dict[str, Any]", service) if isinstance(service, dict) else {}
    if more := set(found) - _COMPOSE_FIELDS:
        raise InvalidRequest(f"{folder.name}: {path} requests unsupported features: {', '.join(sorted(more))}.")
    return found


def _context(folder: SourcePath, service: dict[str, Any]) -> SourcePath:
    """The folder of the Dockerfile. Raises: InvalidRequest if it is outside the task."""
    build: Any = service.get("build", ".")
    named = str(cast("dict[str, Any]", build).get("context", ".")) if isinstance(build, dict) else str(build)
    return folder / named


def _variables(service: dict[str, Any]) -> dict[str, str]:
    """The variables with a literal value; the others are Terminal-Bench's."""
    given: Any = service.get("environment") or {}
    if isinstance(given, list):
        named = [str(pair).partition("=") for pair in cast("list[Any]", given)]
        given = {name: value for name, equals, value in named if equals}
    if not isinstance(given, dict):
        raise InvalidRequest(f"docker-compose.yaml: environment is {given!r}, neither a list nor a mapping.")
    pairs = {str(name): str(value) for name, value in cast("dict[Any, Any]", given).items()}
    return {name: value for name, value in pairs.items() if "${" not in value}


def _document(folder: SourcePath) -> Any:
    return read_yaml(folder / "task.yaml")


FORMAT = FolderFormat(is_terminal_bench_task, read_terminal_bench_task, _document)
