"""Imports verifiers tasks, `verifiers:TASKSET`: each task of the taskset becomes a task whose own hooks prepare and
reward it.

The taskset is a module that the environment with verifiers can import, or a file or folder. A Python with verifiers
reads it. Other processes of it run the hooks in the sandbox: in the agent's, as a separate user, if a hook asks for the
runtime; else in a clean one.

Also builds the programs of `in_sandbox/`, as commands of a Python that has verifiers and as files for a sandbox.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.files import hidden_files, own_file, written
from gangline.machine.reading.grading import GRADING_MARGIN_S
from gangline.machine.reading.imported import Candidate, Choices, Imported, ProgramSource, listed

_HOOKS_S = 600.0
_GB = 1 << 30
_CONTAINERS = ("docker", "podman")

_HERE = Path(__file__).parent
FOLDER = ".verifiers"
"""Relative to the program's working folder."""
CONFIG_FILE = f"{FOLDER}/config.json"
TASKSET_FOLDER = f"{FOLDER}/taskset"
_MODULES = ("__init__", "box", "trace", "hooks")

_READ = "import sys; sys.path.append(sys.argv[1]); from in_sandbox.reading import main; main(sys.argv[2])"
_RUN = (
    "import os, sys; folder = os.path.abspath(sys.argv[1]); sys.path.append(folder);"
    " from in_sandbox.hooks import main; main(folder, sys.argv[2])"
)


def reading(python: str, asked: Mapping[str, Any]) -> tuple[str, ...]:
    """The command that prints a taskset as JSON. asked: see `in_sandbox/reading.py`."""
    return (python, "-c", _READ, str(_HERE), json.dumps(asked))


def running(python: str, stage: str) -> tuple[str, ...]:
    """The command that runs a task's hooks of a stage (`setup`, `score`), in the folder of its files. It imports
    nothing that the agent wrote.
    """
    return (python, "-I", "-c", _RUN, FOLDER, stage)


def program_files() -> dict[str, str]:
    """The program's files: path -> content."""
    return {f"{FOLDER}/in_sandbox/{name}.py": (_HERE / "in_sandbox" / f"{name}.py").read_text() for name in _MODULES}


class _Rewards(msgspec.Struct, frozen=True):
    right: float | None = None
    nothing: float | None = None
    error: str | None = None


class _Timeouts(msgspec.Struct, frozen=True):
    setup: float | None = None
    agent: float | None = None
    scoring: float | None = None


class _Resources(msgspec.Struct, frozen=True):
    cpu: float | None = None
    memory: float | None = None
    gpu: str | None = None
    disk: float | None = None


class _Data(msgspec.Struct, frozen=True):
    """The fields of `TaskData` that are used."""

    idx: int
    id: str | None = None
    name: str | None = None
    system_prompt: str | None = None
    image: str | None = None
    workdir: str | None = None
    network_allow: tuple[str, ...] = ("*",)
    timeout: _Timeouts = _Timeouts()
    resources: _Resources = _Resources()


class VerifiersTask(msgspec.Struct, frozen=True, rename={"kind": "class"}):
    """One task, as printed by `in_sandbox/reading.py`."""

    module: str
    kind: str
    data: dict[str, Any]
    config: dict[str, Any]
    prompt: str | None
    has_setup: bool
    has_runtime: bool
    obstacles: list[str]
    rewards: _Rewards | None = None

    def fields(self) -> _Data:
        return msgspec.convert(self.data, _Data)


class VerifiersTaskset(msgspec.Struct, frozen=True):
    """The output of `in_sandbox/reading.py`."""

    name: str
    file: str
    tasks: list[VerifiersTask]


def read_verifiers_taskset(source: str, choices: Choices, limit: int | None) -> VerifiersTaskset:
    """Run the taskset's own loader. Raises: InvalidRequest."""
    python = _python(choices)
    path = Path(source)
    is_file = path.exists() and ("/" in source or path.suffix == ".py")
    name, folder = (path.stem, str(path.resolve().parent)) if is_file else (source, None)
    command = reading(str(python / "bin" / "python3"), {"taskset": name, "folder": folder, "limit": limit})
    taskset = listed(command, VerifiersTaskset, f"{source}: verifiers could not read it")
    if Path(taskset.file).is_relative_to(python.resolve()):
        raise InvalidRequest(
            f"{source}: agents see the Python environment that it is installed in ({python}). Install it elsewhere "
            f"(pip install --no-deps --target FOLDER {source}), and name verifiers:FOLDER/MODULE."
        )
    return taskset


def _python(choices: Choices) -> Path:
    """The environment with verifiers. Raises: InvalidRequest."""
    if choices.python is None:
        raise InvalidRequest(
            "tasks of verifiers are read and rewarded by verifiers itself: make an environment (python3 -m venv "
            "/opt/verifiers && /opt/verifiers/bin/pip install verifiers==0.4.0) and name it: --python /opt/verifiers."
        )
    return Path(choices.python).absolute()


def name_of_task(taskset: VerifiersTaskset, task: VerifiersTask) -> str:
    data = task.fields()
    return f"{taskset.name.rpartition('/')[2]}-{data.id or data.name or data.idx}"


def read_verifiers_task(taskset: VerifiersTaskset, task: VerifiersTask, choices: Choices) -> Imported:
    """Raises: InvalidRequest, naming the unsupported parts."""
    name, data = name_of_task(taskset, task), task.fields()
    if why := [*task.obstacles, *_unfit(task, data, choices)]:
        raise InvalidRequest(f"{name}: cannot be taken over: {'; '.join(why)}.")
    assert task.prompt is not None
    files = {
        **program_files(),
        **_modules(Path(taskset.file)),
        CONFIG_FILE: json.dumps({**msgspec.to_builtins(task), "rewards": None}),
    }
    runtime, notes = _runtime(name, task, data, files, choices)
    scoring_s = data.timeout.scoring or _HOOKS_S
    body: dict[str, Any] = {
        "instruction": "\n\n".join(text for text in (data.system_prompt, task.prompt) if text),
        "runtime": runtime,
        "evaluator": _evaluator(task, files, runtime, scoring_s),
        "evaluation_timeout_seconds": scoring_s + GRADING_MARGIN_S,
        "metadata": {"source": "verifiers", "task": name, "instance": task.data},
    }
    if data.timeout.agent is not None:
        body["timeout_seconds"] = data.timeout.agent
    rewards = task.rewards
    if rewards is not None and rewards.right is not None and rewards.right > (rewards.nothing or 0.0):
        body["solution"] = {"answer": task.data["answer"], "reward": rewards.right, "floor": rewards.nothing}
    return Imported(name=name, body=body, notes=tuple(notes))


def _unfit(task: VerifiersTask, data: _Data, choices: Choices) -> Generator[str]:
    if task.prompt is None:
        yield "`prompt` is other than one text of the user"
    if data.network_allow not in ((), ("*",)) and choices.network is None:
        yield "`network_allow` names addresses: choose what stands for it, by --network"
    if data.resources.gpu is not None:
        yield "it needs a GPU in its sandbox"
    if data.image is not None and choices.runtime is None and choices.image is None:
        yield f"its image is {data.image}: choose what stands for it, by --runtime docker or --image FOLDER"
    if task.rewards is not None and task.rewards.error is not None:
        yield f"its reward fails ({task.rewards.error})"


def _runtime(
    name: str, task: VerifiersTask, data: _Data, files: dict[str, Any], choices: Choices
) -> tuple[dict[str, Any], list[str]]:
    body: dict[str, Any] = {"backend": choices.runtime or "sandbox", "network": choices.network or "proxy"}
    notes: list[str] = []
    if body["backend"] in _CONTAINERS:
        body["image"] = choices.image or data.image
        notes.append(f"{name}: its image must have verifiers in the Python that `python3` is")
    else:
        body["python"] = str(_python(choices))
        body |= {} if choices.image is None else {"image": choices.image}
    if data.network_allow == ("*",) and body["network"] == "proxy":
        notes.append(f"{name}: agents reach the model alone, not the internet: --network full opens it")
    if data.workdir is not None:
        body["workdir"] = data.workdir
    limits = {
        "cpus": data.resources.cpu,
        "memory_bytes": data.resources.memory and int(data.resources.memory * _GB),
        "disk_bytes": data.resources.disk and int(data.resources.disk * _GB),
    }
    if given := {field: value for field, value in limits.items() if value is not None}:
        body["limits"] = given
    if task.has_setup:
        body["prepare"] = _setup(files, body, data.timeout.setup or _HOOKS_S)
    return body, notes


def _setup(files: dict[str, Any], runtime: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Prepare actions that run the hook; the program's files are removed afterwards."""
    command = shlex.join(running(_interpreter(runtime), "setup"))
    writes = [
        {"type": "write", "path": path, **({"content": file} if isinstance(file, str) else file)}
        for path, file in files.items()
    ]
    ending = {"type": "exec", "command": f"{command} && rm -r {FOLDER}", "timeout_seconds": timeout_s}
    return [*writes, ending]


def _evaluator(task: VerifiersTask, files: dict[str, Any], runtime: dict[str, Any], scoring_s: float) -> dict[str, Any]:
    given: dict[str, Any] = {
        "command": list(running(_interpreter(runtime), "score")),
        "files": files,
        "clear": [FOLDER],
        "timeout_seconds": scoring_s,
    }
    if task.has_runtime:
        return {"strategy": "script", "config": {**given, "separate": True}}
    return {"strategy": "script", "config": given, "refresh_runtime": True}


def _interpreter(runtime: dict[str, Any]) -> str:
    return f"{runtime['python']}/bin/python3" if "python" in runtime else "python3"


def _modules(file: Path) -> dict[str, Any]:
    """The taskset's package, or the Python files in the folder of its single file. Raises: InvalidRequest for a
    link.
    """
    root = file.parent.parent if file.name == "__init__.py" else file.parent
    is_package = file.name == "__init__.py"
    found = file.parent.rglob("*") if is_package else root.glob("*.py")
    own = sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)
    return hidden_files({f"{TASKSET_FOLDER}/{path.relative_to(root)}": written(own_file(path)) for path in own})


def _candidates(source: str, choices: Choices, limit: int | None) -> Generator[Candidate]:
    taskset = read_verifiers_taskset(source, choices, limit)
    for task in taskset.tasks:
        read = partial(read_verifiers_task, taskset, task, choices)
        yield Candidate(name_of_task(taskset, task), task.data, read)


SOURCE = ProgramSource("verifiers:", _candidates)
