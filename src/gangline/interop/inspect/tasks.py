"""Imports Inspect tasks, `inspect:FILE.py@TASK`: each sample becomes a task that Inspect's own scorer grades.

The task's solver is omitted, because the user chooses the agent. Changes that a solver makes to the sample, such as
formatting choices, are therefore refused if the scorer needs them. A Python with Inspect reads the task. Another
process of it scores each session: in a clean sandbox if the sample has no sandbox, else in the agent's, as a separate
user.

Also builds the programs of `in_sandbox/`, as commands of a Python that has Inspect and as files for a sandbox.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.files import hidden_files, own_file, written
from gangline.machine.reading.grading import GRADING_MARGIN_S
from gangline.machine.reading.imported import Candidate, Choices, Imported, ProgramSource, listed

_SCORING_S = 300.0
_SETUP = "/tmp/inspect-setup"
_SETUP_S = 300.0
_OUR_KINDS = ("local", "gangline")
_CONTAINERS = ("docker", "podman")

_HERE = Path(__file__).parent
_FOLDER = ".inspect"
"""Relative to the scorer's working folder."""
CONFIG_FILE = f"{_FOLDER}/config.json"
TASK_FOLDER = f"{_FOLDER}/task"
_SCORING = ("__init__", "commands", "conversation", "solution", "scoring")

_READ = "import sys; sys.path.append(sys.argv[1]); from in_sandbox.reading import main; main(sys.argv[2])"
_SCORE = (
    "import os, sys; folder = os.path.abspath(sys.argv[1]); sys.path.append(folder);"
    " from in_sandbox.scoring import main; main(folder)"
)


def reading(python: str, source: str) -> tuple[str, ...]:
    """The command that prints a task as JSON. source: as for `inspect eval`."""
    return (python, "-c", _READ, str(_HERE), source)


def scoring(python: str) -> tuple[str, ...]:
    """The command that scores a session, run in the folder of its files. It imports nothing that the agent wrote."""
    return (python, "-I", "-c", _SCORE, _FOLDER)


def scoring_files() -> dict[str, str]:
    """The program's files: path -> content."""
    return {f"{_FOLDER}/in_sandbox/{name}.py": (_HERE / "in_sandbox" / f"{name}.py").read_text() for name in _SCORING}


class InspectScorer(msgspec.Struct, frozen=True):
    """A scorer, as named in Inspect's logs."""

    name: str
    params: dict[str, Any] | None
    """None: they cannot be written as JSON."""
    module: str | None
    """File in the task's folder that defines it; None: it comes from a package."""


class _Rewards(msgspec.Struct, frozen=True):
    right: float | None = None
    nothing: float | None = None
    error: str | None = None


class _Sandbox(msgspec.Struct, frozen=True):
    type: str
    config: str | None


class InspectSample(msgspec.Struct, frozen=True):
    """One sample, with the contents of its files."""

    id: str | int
    input: str | list[dict[str, Any]]
    choices: list[str] | None
    target: str | list[str]
    metadata: dict[str, Any]
    files: dict[str, str]
    """Path -> content in base 64."""
    setup: str | None
    sandbox: _Sandbox | None
    rewards: _Rewards | None = None
    """Inspect's own rewards for the target as the answer and for an empty answer."""


class InspectTask(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `in_sandbox/reading.py`."""

    name: str
    file: str | None
    time_limit: float | None
    unsupported: list[str]
    """Fields of the task that are not supported here."""
    left_out: list[str]
    """Names of its solvers."""
    scorers: list[InspectScorer]
    samples: list[InspectSample]


def read_inspect_task(source: str, choices: Choices) -> InspectTask:
    """Run Inspect's own loader. Raises: InvalidRequest, also for an unsupported task."""
    python = _python(choices)
    command = reading(str(python / "bin" / "python3"), source)
    task = listed(command, InspectTask, f"{source}: Inspect could not read it")
    if why := list(_obstacles(task, python)):
        raise InvalidRequest(f"{source}: cannot be taken over: {'; '.join(why)}.")
    return task


def _python(choices: Choices) -> Path:
    """The environment with Inspect. Raises: InvalidRequest."""
    if choices.python is not None:
        return Path(choices.python).absolute()
    if importlib.util.find_spec("inspect_ai") is not None:
        return Path(sys.prefix)
    raise InvalidRequest(
        "tasks of Inspect are read and scored by Inspect itself: make an environment (python3 -m venv /opt/inspect && "
        "/opt/inspect/bin/pip install inspect-ai) and name it with --python /opt/inspect."
    )


def _obstacles(task: InspectTask, python: Path) -> Generator[str]:
    yield from (f"its `{name}` is a program that only Inspect runs" for name in task.unsupported)
    if task.file is None or Path(task.file).is_relative_to(python):
        yield f"agents see the Python environment that it is in ({python}): name a file outside of it"
    if len(task.scorers) != 1:
        yield f"it has {len(task.scorers)} scorers, and a session has one reward"
    for scorer in task.scorers:
        if scorer.params is None:
            yield f"parameters of scorer `{scorer.name}` have no form in JSON"


def read_inspect_sample(task: InspectTask, sample: InspectSample, choices: Choices) -> Imported:
    """Raises: InvalidRequest, naming the unsupported field."""
    name = f"{task.name}-{sample.id}"
    if why := list(_unfit(sample)):
        raise InvalidRequest(f"{name}: cannot be taken over: {'; '.join(why)}.")
    runtime, notes = _runtime(name, sample, choices)
    body: dict[str, Any] = {
        "instruction": sample.input,
        "runtime": runtime,
        "evaluator": _evaluator(task, sample, runtime),
        "evaluation_timeout_seconds": _SCORING_S + GRADING_MARGIN_S,
        "metadata": {"source": "inspect", "task": name, "instance": msgspec.to_builtins(sample)},
    }
    if task.time_limit is not None:
        body["timeout_seconds"] = task.time_limit
    if sample.rewards is not None and sample.rewards.right == 1:
        answer = sample.target if isinstance(sample.target, str) else sample.target[0]
        body["solution"] = {"answer": answer, "floor": sample.rewards.nothing}
    notes.append(f"{task.name}: your agent stands for its solver ({', '.join(task.left_out) or 'unnamed'})")
    return Imported(name=name, body=body, notes=tuple(notes))


def _unfit(sample: InspectSample) -> Generator[str]:
    if not isinstance(sample.input, str):
        yield "`input` is other than one text of the user"
    if sample.choices:
        yield "`choices` are for a solver, which marks them for its scorer"
    if sample.rewards is not None and sample.rewards.error is not None:
        yield f"its scorer fails without Inspect's runner ({sample.rewards.error})"
    for path in sample.files if sample.sandbox is not None else ():
        if ":" in path:
            yield f"file {path!r} is for another sandbox than `default`"


def _runtime(name: str, sample: InspectSample, choices: Choices) -> tuple[dict[str, Any], list[str]]:
    """Raises: InvalidRequest if the chosen runtime cannot replace the sample's sandbox."""
    body: dict[str, Any] = {"network": choices.network or "proxy"}
    chosen = {"backend": choices.runtime, "image": choices.image}
    body |= {field: value for field, value in chosen.items() if value is not None}
    notes: list[str] = []
    if body.get("backend") in _CONTAINERS:
        notes.append(f"{name}: its image must have inspect-ai in the Python that `python3` is")
    else:
        body["python"] = str(_python(choices))
    if sample.sandbox is None:
        return body, notes
    if sample.sandbox.type not in _OUR_KINDS or sample.sandbox.config is not None:
        wanted = sample.sandbox.type + (f" ({sample.sandbox.config})" if sample.sandbox.config else "")
        if choices.runtime is None and choices.image is None:
            raise InvalidRequest(
                f"{name}: its sandbox is {wanted}: choose what stands for it, by --runtime and --image."
            )
        notes.append(f"{name}: the chosen runtime stands for its sandbox {wanted}")
    actions: list[dict[str, Any]] = [
        {"type": "write", "path": path, "content": content, "encoding": "base64"}
        for path, content in sample.files.items()
    ]
    if sample.setup is not None:
        script = sample.setup if sample.setup.lstrip().startswith("#!") else f"#!/usr/bin/env bash\n\n{sample.setup}"
        actions.append({"type": "write", "path": _SETUP, "content": script, "mode": 0o755})
        actions.append({"type": "exec", "command": f"{_SETUP} && rm {_SETUP}", "timeout_seconds": _SETUP_S})
    return {**body, "prepare": actions}, notes


def _evaluator(task: InspectTask, sample: InspectSample, runtime: Mapping[str, Any]) -> dict[str, Any]:
    (scorer,) = task.scorers
    own = {"id": sample.id, "input": sample.input, "target": sample.target, "metadata": sample.metadata}
    has_sandbox = sample.sandbox is not None
    config = {"scorer": msgspec.to_builtins(scorer), "sample": own, "sandbox": has_sandbox}
    python = f"{runtime['python']}/bin/python3" if "python" in runtime else "python3"
    given: dict[str, Any] = {
        "command": list(scoring(python)),
        "files": {**scoring_files(), **_modules(task, scorer), CONFIG_FILE: json.dumps(config)},
        "clear": [".inspect"],
        "timeout_seconds": _SCORING_S,
    }
    if has_sandbox:
        return {"strategy": "script", "config": {**given, "separate": True}}
    return {"strategy": "script", "config": given, "refresh_runtime": True}


def _modules(task: InspectTask, scorer: InspectScorer) -> dict[str, Any]:
    """The Python files in the folder of the scorer's module, hidden from the agent. Raises: InvalidRequest for a
    link.
    """
    if scorer.module is None or task.file is None:
        return {}
    files = sorted(Path(task.file).parent.glob("*.py"))
    return hidden_files({f"{TASK_FOLDER}/{path.name}": written(own_file(path)) for path in files})


def _candidates(source: str, choices: Choices, limit: int | None) -> Generator[Candidate]:
    task = read_inspect_task(source, choices)
    for sample in task.samples:
        read = partial(read_inspect_sample, task, sample, choices)
        yield Candidate(f"{task.name}-{sample.id}", msgspec.to_builtins(sample), read)


SOURCE = ProgramSource("inspect:", _candidates)
