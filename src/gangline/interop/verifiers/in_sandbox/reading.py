"""Reads a taskset with its own loader and prints it as JSON: its tasks' data, and which hooks they have.

Unsupported parts are reported; the caller decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from .hooks import rewarded, task_of
from .trace import answered, trace_of


def main(asked: str) -> None:
    """asked: JSON `{"taskset": id, "folder": of its module or null, "limit": number or null}`. Prints to stdout; the
    taskset's own prints go to stderr.
    """
    with contextlib.redirect_stdout(sys.stderr):
        found = _read(json.loads(asked))
    json.dump(found, sys.stdout)


def _read(asked: Mapping[str, Any]) -> dict[str, Any]:
    if asked["folder"] is not None:
        sys.path.insert(0, asked["folder"])
    loaders: Any = import_module("verifiers.v1.utils.loaders")
    name: str = asked["taskset"]
    config = loaders.taskset_config_type(name)(id=name)
    taskset = loaders.load_taskset(config)
    if taskset.INFINITE and asked["limit"] is None:
        sys.exit("it has no end: give --limit, and no --filter")
    tasks: list[Any] = list(itertools.islice(taskset, asked["limit"]))
    module = sys.modules[type(taskset).__module__]
    return {
        "name": name,
        "file": str(Path(import_module(module.__name__.partition(".")[0]).__file__ or "").resolve()),
        "tasks": [asyncio.run(_task(task)) for task in tasks],
    }


async def _task(task: Any) -> dict[str, Any]:
    base: Any = import_module("verifiers.v1").Task
    kind = cast("Any", type(task))
    data: dict[str, Any] = task.data.model_dump(mode="json")
    config = {
        "module": kind.__module__,
        "class": kind.__qualname__,
        "data": data,
        "config": task.config.model_dump(mode="json"),
    }
    has_runtime = kind.finalize is not base.finalize or any(map(_takes_runtime, _signals(task)))
    found = {
        **config,
        "prompt": _prompt(task.data.prompt),
        "has_setup": kind.setup is not base.setup,
        "has_runtime": has_runtime,
        "obstacles": list(_obstacles(task, base)),
    }
    if not found["obstacles"] and not has_runtime and isinstance(answer := data.get("answer"), str):
        found["rewards"] = await _rewards(config, answer)
    return found


def _signals(task: Any) -> list[Any]:
    return [*task.hooks("metric"), *task.hooks("reward")]


def _takes_runtime(hook: Any) -> bool:
    return "runtime" in inspect.signature(hook).parameters


def _prompt(prompt: Any) -> str | None:
    """The text of a prompt that consists of one text; None for others."""
    if prompt is None or isinstance(prompt, str):
        return prompt
    only = prompt[0] if len(prompt) == 1 else None
    return only.content if only is not None and only.role == "user" and isinstance(only.content, str) else None


def _obstacles(task: Any, base: Any) -> Iterator[str]:
    kind = cast("Any", type(task))
    data = task.data
    if kind.toolsets(task.config):
        yield "its tools are servers that only verifiers starts"
    if task.hooks("stop"):
        yield "it has its own rules for when to stop"
    if task.plugged_judges():
        yield "a model judges it"
    if task.runtime_env():
        yield "it gives its processes variables that are not part of its data"
    for name in ("stage_verifier", "validate_environment"):
        if getattr(kind, name, None) is not getattr(base, name, None):
            yield f"its hook `{name}` has no counterpart"
    for name in ("agent_user", "skills", "artifacts", "network_block"):
        if getattr(data, name, None):
            yield f"its field `{name}` has no counterpart"
    if not task.hooks("reward"):
        yield "it has no reward"


async def _rewards(config: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """Rewards for the field `answer` as the reply and for an empty reply; or the reason why there are none."""
    try:
        found = [
            (await rewarded(task, answered(trace_of(task, None), text), None))["reward"]
            for text in (answer, "")
            for task in [task_of(config)]
        ]
    except Exception as error:  # the task's own: reported with its task
        return {"error": f"{type(error).__name__}: {error}"}
    return {"right": found[0], "nothing": found[1]}
