"""Runs verl's own command as a child process, after checking its settings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

from gangline.domain.errors import InvalidRequest, NodeError
from gangline.machine.private import open_private
from gangline.train.trainers.verl.experiment import VerlExperiment, arguments_of

METRICS = "verl_metrics.jsonl"
"""verl's own file in the run's folder, with `step` and `data` in each line."""
_LOG = "verl.log"
_TAIL_LINES = 12
_END_WITHIN_S = 20.0
_LOOK_EVERY_S = 1.0

Metrics = dict[str, Any]


def _environment(experiment: VerlExperiment, folder: Path, token: str | None) -> dict[str, str]:
    own = {"VERL_FILE_LOGGER_PATH": str(folder / METRICS), "HYDRA_FULL_ERROR": "1"}
    secret = {} if token is None else {"GANGLINE_TOKEN": token}
    return {**os.environ, **own, **experiment.environment, **secret}


async def checked(experiment: VerlExperiment, folder: Path, server_url: str) -> Metrics:
    """verl's whole configuration, after all of verl's checks. Takes seconds, because it imports verl.

    Raises: InvalidRequest with each of verl's errors, or if verl or Gangline are not installed there.
    """
    process = await asyncio.create_subprocess_exec(
        str(experiment.interpreter),
        *("-W", "ignore", "-m", "gangline.train.trainers.verl.check", *arguments_of(experiment, folder, server_url)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(experiment, folder, None),
    )
    try:
        output, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        why = "\n".join(complaint.decode(errors="replace").splitlines()[-_TAIL_LINES:])
        raise InvalidRequest(
            f"verl cannot check its configuration with {experiment.interpreter}: install gangline[verl] there.\n{why}"
        )
    found = json.loads(output.splitlines()[-1])
    if errors := cast("list[str]", found["errors"]):
        raise InvalidRequest("verl refuses the settings:\n" + "\n".join(f"- {error}" for error in errors))
    return found["config"]


async def train(
    experiment: VerlExperiment, folder: Path, server_url: str, token: str | None, on_step: Callable[[Metrics], None]
) -> list[Metrics]:
    """Run verl in `folder` until it ends. Returns the lines of its metrics; `on_step` receives each line as it is
    written.

    Raises: NodeError with the end of its log if it fails.
    """
    metrics = folder / METRICS
    metrics.unlink(missing_ok=True)  # verl starts a new file
    with open(folder / _LOG, "wb", opener=open_private) as log:  # noqa: ASYNC230 - once, before anything waits
        command = ("-W", "ignore", "-m", "verl.trainer.main_ppo", *arguments_of(experiment, folder, server_url))
        async with _running(experiment, folder, token, command, log) as process:
            num_seen = 0
            while process.returncode is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _LOOK_EVERY_S)
                found = await asyncio.to_thread(read_metrics, metrics)
                for one in found[num_seen:]:
                    on_step(one)
                num_seen = len(found)
    if process.returncode != 0:
        tail = (folder / _LOG).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        raise NodeError(f"verl ended with code {process.returncode}; see {folder / _LOG}:\n" + "\n".join(tail))
    return await asyncio.to_thread(read_metrics, metrics)


@asynccontextmanager
async def _running(
    experiment: VerlExperiment, folder: Path, token: str | None, command: tuple[str, ...], log: Any
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """verl's driver in its own session. Leaving the block ends it and its Ray processes."""
    process = await asyncio.create_subprocess_exec(
        str(experiment.interpreter),
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env=_environment(experiment, folder, token),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            try:
                await asyncio.wait_for(process.wait(), _END_WITHIN_S)
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def read_metrics(path: Path) -> list[Metrics]:
    """Complete lines of verl's metrics: `step` and the metrics by name."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []
    documents = [cast("Mapping[str, Any]", json.loads(line)) for line in lines]
    return [{"step": document["step"], **document["data"]} for document in documents]
