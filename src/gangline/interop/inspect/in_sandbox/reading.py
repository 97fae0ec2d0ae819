"""Reads a task with Inspect's own loader and prints it as JSON: its scorer, and its samples with their files.

The source is named as for `inspect eval`. Unsupported parts are reported; the caller decides.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from .scoring import scored


def main(source: str) -> None:
    """Print to stdout; prints of the task's module go to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        found = asyncio.run(_read(source))
    json.dump(found, sys.stdout)


async def _read(source: str) -> dict[str, Any]:
    tasks = import_module("inspect_ai._eval.loader").load_tasks([source])
    if len(tasks) != 1:
        named = ", ".join(task.name for task in tasks) or "none"
        sys.exit(f"holds {len(tasks)} tasks ({named}): name one as {source.partition('@')[0]}@TASK")
    (task,) = tasks
    util: Any = import_module("inspect_ai._eval.task.util")
    file = util.task_file(task)
    with contextlib.chdir(util.task_run_dir(task)):
        scorers = [_scorer(one, file) for one in task.scorer or ()]
        spec = import_module("inspect_ai._eval.loader").resolve_task_sandbox(task, None)
        samples = [await _sample(task, one, number, spec, scorers) for number, one in enumerate(task.dataset, 1)]
    return {
        "name": task.name,
        "file": None if file is None else str(Path.cwd() / file),
        "time_limit": task.time_limit,
        "unsupported": [name for name in ("setup", "cleanup") if getattr(task, name, None) is not None],
        "left_out": _solvers(task),
        "scorers": scorers,
        "samples": samples,
    }


def _scorer(scorer: Any, file: str | None) -> dict[str, Any]:
    registry: Any = import_module("inspect_ai._util.registry")
    name = registry.registry_info(scorer).name
    own = file is not None and "/" not in name
    params: Any = registry.registry_params(scorer)
    try:
        json.dumps(params)
    except TypeError:
        params = None
    return {"name": name, "params": params, "module": Path(file).name if own and file is not None else None}


def _solvers(task: Any) -> list[str]:
    registry: Any = import_module("inspect_ai._util.registry")
    chain = cast("Sequence[Any]", task.solver if isinstance(task.solver, Sequence) else [task.solver])
    return [registry.registry_log_name(one) for one in chain if registry.is_registry_object(one)]


async def _sample(task: Any, sample: Any, number: int, spec: Any, scorers: list[dict[str, Any]]) -> dict[str, Any]:
    home: Any = import_module("inspect_ai._eval.task.sandbox")
    sandbox = await home.resolve_sandbox(spec, sample, task.name)
    files = {
        path: base64.b64encode(await home.read_sandboxenv_file(contents)).decode()
        for path, contents in home.resolve_sample_files(sample.files or {}).items()
    }
    setup = None if not sample.setup else (await home.read_sandboxenv_file(sample.setup)).decode()
    found: dict[str, Any] = {
        "id": number if sample.id is None else sample.id,
        "input": _input(sample.input),
        "choices": sample.choices,
        "target": sample.target,
        "metadata": json.loads(json.dumps(sample.metadata or {}, default=str)),
        "files": files,
        "setup": setup,
        "sandbox": None if sandbox is None else {"type": sandbox.type, "config": _shown(sandbox.config)},
    }
    if sandbox is None and len(scorers) == 1 and isinstance(found["input"], str) and scorers[0]["params"] is not None:
        found["rewards"] = await _rewards(found, scorers[0])
    return found


def _input(given: Any) -> Any:
    """The text, if the input is one text or one user message with a text; else the messages."""
    if isinstance(given, str):
        return given
    only = given[0] if len(given) == 1 else None
    if only is not None and only.role == "user" and isinstance(only.content, str):
        return only.content
    return [message.model_dump(mode="json", exclude_none=True) for message in given]


def _shown(config: Any) -> str | None:
    return None if config is None else config if isinstance(config, str) else type(config).__name__


async def _rewards(sample: Mapping[str, Any], scorer: Mapping[str, Any]) -> dict[str, Any]:
    """Inspect's rewards for the target as the answer and for an empty answer; or the reason why there are none."""
    target = sample["target"] if isinstance(sample["target"], str) else sample["target"][0]
    config = {"scorer": scorer, "sample": sample}
    try:
        right, nothing = [await scored(config, (), answer) for answer in (target, "")]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"right": right["reward"], "nothing": nothing["reward"]}
