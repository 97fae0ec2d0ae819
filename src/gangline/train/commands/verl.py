"""Experiments whose trainer is verl: `gangline train validate` and `gangline train run` for them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.cli.service.bring_up import run_service
from gangline.cli.service.up import plan_of
from gangline.cli.terminal.output import notes
from gangline.machine.private import make_private_folder
from gangline.wire.client.running import find_service

if TYPE_CHECKING:
    from gangline.train.trainers.verl.experiment import VerlExperiment
    from gangline.wire.client.running import Running

_NOT_STARTED = "http://127.0.0.1:8700"
"""Placeholder address of the server while settings are checked."""

Tasks = Sequence[Mapping[str, Any]]


async def check_verl(experiment: VerlExperiment, tasks: Tasks, held_out: Tasks) -> dict[str, Any]:
    """verl's whole configuration. Raises: InvalidRequest with verl's own errors."""
    from gangline.train.trainers.verl.experiment import write_data
    from gangline.train.trainers.verl.launch import checked

    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), tasks, held_out)
        return await checked(experiment, Path(folder), experiment.service.url or _NOT_STARTED)


async def train_with_verl(
    experiment: VerlExperiment, tasks: Tasks, held_out: Tasks, data_dir: Path
) -> list[dict[str, Any]]:
    """Check the settings, then train through a running service or one started for the run.

    Returns the lines of verl's metrics. Raises: InvalidRequest, NodeError if verl fails, errors of the service.
    """
    from gangline.train.trainers.verl.experiment import write_data
    from gangline.train.trainers.verl.launch import checked, train

    folder = data_dir / "runs" / experiment.name
    make_private_folder(data_dir / "runs")
    make_private_folder(folder)
    write_data(folder, tasks, held_out)
    await checked(experiment, folder, experiment.service.url or _NOT_STARTED)

    async def body(server_url: str, token: str | None) -> list[dict[str, Any]]:
        notes().print(f"[bold]Starting[/] verl; its log is {folder / 'verl.log'}")
        return await train(experiment, folder, server_url, token, _show)

    if experiment.service.url is not None:
        address = find_service(data_dir, experiment.service.url)
        return await body(address.server_url, address.control_token)
    plan = plan_of(experiment.service.resolved(None, data_dir))
    notes().print(f"[bold]Starting[/] server and node; logs in {plan.data_dir / 'logs'}")

    async def with_live(live: Running) -> list[dict[str, Any]]:
        return await body(plan.server.public_url or live.server_url, live.control_token)

    return await run_service(plan, with_live)


def _show(metrics: Mapping[str, Any]) -> None:
    """Print one line: the step, its mean reward, and validation metrics."""
    shown = {"reward": metrics.get("critic/score/mean"), "probs diff": metrics.get("training/rollout_probs_diff_max")}
    shown |= {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    parts = (f"{name} {value:.4g}" for name, value in shown.items() if isinstance(value, int | float))
    notes().print(f"step {metrics['step']}: {', '.join(parts)}", markup=False, soft_wrap=True)
