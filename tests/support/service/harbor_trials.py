"""Run by Harbor's Python: `harbor_trials.py TASK WORK AGENT` prints Harbor's own rewards of a trial as JSON.

Its environment executes in folders of this machine: bubblewrap shows them at the places that a container would have.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

_SHOWN = ("app", "tests", "logs", "solution", "tmp")
_READ = ("usr", "etc", "bin", "lib", "lib64", "sbin")


class FolderEnvironment(BaseEnvironment):
    """A container without Docker. What its Dockerfile copies from `data` is in `/app/data`."""

    @staticmethod
    def type() -> str:
        return "folder"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None: ...

    @property
    def _root(self) -> Path:
        return Path(self.trial_paths.trial_dir).parent / f"root.{self.session_id}"

    def _host(self, inside: str) -> Path:
        return self._root / str(inside).lstrip("/")

    async def start(self, force_build: bool) -> None:
        for name in (*_SHOWN, "logs/agent", "logs/verifier", "logs/artifacts"):
            (self._root / name).mkdir(parents=True)
        if (self.environment_dir / "data").is_dir():
            shutil.copytree(self.environment_dir / "data", self._root / "app" / "data")

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        self._host(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._host(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._host(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._host(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._host(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        own = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", **self.task_env_config.env, **(self._merge_env(env) or {})}
        words = ["bwrap", "--die-with-parent", "--unshare-pid", "--proc", "/proc", "--dev", "/dev", "--clearenv"]
        for name in _READ:
            if Path("/", name).exists():
                words += ["--ro-bind", f"/{name}", f"/{name}"]
        for name in _SHOWN:
            words += ["--bind", str(self._root / name), f"/{name}"]
        for name, value in own.items():
            words += ["--setenv", name, value]
        words += ["--chdir", cwd or self.task_env_config.workdir or "/app", "bash", "-c", command]
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)


async def main(task: Path, work: Path, agent: str) -> dict[str, Any]:
    config = TrialConfig(
        task=TaskConfig(path=task),
        trial_name="trial",
        trials_dir=work,
        agent=AgentConfig(name=agent),
        environment=EnvironmentConfig(import_path="harbor_trials:FolderEnvironment"),
    )
    result = await (await Trial.create(config)).run()
    steps = result.step_results or []
    return {
        "rewards": None if result.verifier_result is None else result.verifier_result.rewards,
        "steps": [None if one.verifier_result is None else one.verifier_result.rewards for one in steps],
        "errors": [None if one.exception_info is None else one.exception_info.exception_type for one in steps],
        "error": None if result.exception_info is None else result.exception_info.exception_message,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))))
