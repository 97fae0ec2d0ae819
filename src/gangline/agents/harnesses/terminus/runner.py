# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Runs Harbor's agent terminus-2 on the machine itself. The adapter starts it inside the runtime, with the Python that
has Harbor.

Harbor's agents act on an environment that Harbor starts. Here that environment is the current sandbox, so starting and
stopping do nothing, and a command is a child process. The order comes on stdin (see `adapter.py`), the key from the
environment. The last line on stdout is the evidence: how the run ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.agent.context import AgentContext
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import EnvironmentPaths, TrialPaths


class ThisSandbox(BaseEnvironment):
    """The machine on which the runner runs. `user` is ignored: there is only one."""

    @staticmethod
    def type() -> str:
        return "gangline"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        pass

    async def stop(self, delete: bool) -> None:
        pass

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copyfile(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copyfile(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(source_dir, target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", command),
            cwd=cwd,
            env={**os.environ, **(self._merge_env(env) or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(timeout_sec):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return ExecResult(
            stdout=out.decode(errors="replace"), stderr=err.decode(errors="replace"), return_code=process.returncode
        )


async def run(order: dict[str, Any]) -> None:
    logs = Path(order["logs"])
    paths = TrialPaths(logs)
    paths.agent_dir.mkdir(parents=True)
    EnvironmentPaths.agent_dir = PurePosixPath(paths.agent_dir)
    environment = ThisSandbox(
        environment_dir=logs,
        environment_name="gangline",
        session_id=order["session_id"],
        trial_paths=paths,
        task_env_config=EnvironmentConfig(),
    )
    agent = Terminus2(logs_dir=paths.agent_dir, record_terminal_session=False, **order["agent"])
    await agent.setup(environment)
    await agent.run(order["instruction"], environment, AgentContext())


def main() -> int:
    order: dict[str, Any] = json.load(sys.stdin)
    error = ""
    try:
        asyncio.run(run(order))
    except Exception as failed:
        error = f"{type(failed).__name__}: {failed}"
    print(json.dumps({"type": "gangline.end", "error": error}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
