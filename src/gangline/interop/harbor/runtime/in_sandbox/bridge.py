"""Serves Harbor's environments to a node: one JSON object per line on stdin and stdout. Runs in Harbor's Python.

Invariants:
- One event loop serves all environments for their whole life: their clients are bound to it.
- Requests for one environment may overlap, but all wait for its `start`, and so does `stop`.
- The end of stdin (the node is gone) stops every environment.

A request is `{"id", "do", "name", ...}`. Its answer has the same `id`, and `value`, or `error` with `kind`: `invalid`
if Harbor rejects the request itself. The first line is an answer with id 0.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harbor.environments.factory import EnvironmentFactory
from harbor.models.environment_type import EnvironmentType
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

_LINE_BYTES = 256 << 20
_NOT_SET_UP = (ValueError, TypeError, FileNotFoundError, ImportError, SystemExit)
"""Raised by Harbor's classes for a request, or on a machine, that an environment cannot serve."""


class _Bridge:
    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._environments: dict[str, Any] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def answered(self, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            answer["value"] = await getattr(self, f"do_{request['do']}")(request)
        except _NOT_SET_UP as error:
            answer |= {"error": f"{type(error).__name__}: {error}", "kind": "invalid"}
        except Exception as error:
            answer |= {"error": f"{type(error).__name__}: {error}", "kind": "failed"}
        self.say(answer)

    def say(self, answer: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the end of stdin follows
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()

    async def do_start(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._lock(request):
            environment, promised = await asyncio.to_thread(_made, request)
            self._environments[request["name"]] = environment
            await environment.start(force_build=False)
            return promised

    async def do_exec(self, request: dict[str, Any]) -> dict[str, Any]:
        """Output of classes that stream is sent in parts, before the answer."""
        environment = self._environments[request["name"]]

        async def pass_on(text: str, _stream: str) -> None:
            self.say({"id": request["id"], "part": text})

        with environment.scoped_output_callback(pass_on):
            result = await environment.exec(request["command"], cwd="/", timeout_sec=request["timeout_s"], user="root")
        return {"output": result.stdout or "", "complaint": result.stderr or "", "code": result.return_code}

    async def do_upload(self, request: dict[str, Any]) -> None:
        await self._environments[request["name"]].upload_file(request["source"], request["target"])

    async def do_stop(self, request: dict[str, Any]) -> None:
        """Stop the environment, including one started by another bridge if its class finds it by name."""
        async with self._lock(request):
            environment = self._environments.pop(request["name"], None)
            if environment is None:
                environment, _ = await asyncio.to_thread(_made, request)
            await environment.stop(delete=True)
        self._locks.pop(request["name"], None)

    def _lock(self, request: dict[str, Any]) -> asyncio.Lock:
        return self._locks.setdefault(request["name"], asyncio.Lock())

    async def stop_all(self) -> None:
        names = list(self._environments)
        await asyncio.gather(*(self.do_stop({"name": name}) for name in names), return_exceptions=True)


def _made(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An environment that is not started, and its class's capabilities. Blocking."""
    kind, folder = request["environment"], Path(request["folder"])
    path = kind if ":" in kind else None
    resources = EnvironmentFactory.resource_capabilities(None if path else EnvironmentType(kind), path)
    has_cpus, has_memory = (resources is not None and getattr(resources, f"{name}_limit") for name in ("cpu", "memory"))
    paths = TrialPaths(folder / "trial")
    paths.mkdir()
    definition = folder / "environment"
    definition.mkdir(exist_ok=True)
    given: dict[str, Any] = dict(
        environment_dir=definition,
        environment_name="gangline",
        session_id=request["name"],
        trial_paths=paths,
        task_env_config=EnvironmentConfig(
            docker_image=request["image"],
            cpus=request["cpus"] if has_cpus else None,
            memory_mb=request["memory_mb"] if has_memory else None,
        ),
        logger=logging.getLogger("harbor"),
        network_policy=NetworkPolicy(network_mode=NetworkMode(request["network"])),
        **request["options"],
    )
    if path is None:
        environment = EnvironmentFactory.create_environment(EnvironmentType(kind), **given)
    else:
        environment = EnvironmentFactory.create_environment_from_import_path(path, **given)
    return environment, {"limits_cpus": has_cpus, "limits_memory": has_memory}


async def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints must not be mistaken for an answer
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    bridge = _Bridge(answers)
    bridge.say({"id": 0, "value": version("harbor")})
    running: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(bridge.answered(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    await bridge.stop_all()


if __name__ == "__main__":
    asyncio.run(_serve())
