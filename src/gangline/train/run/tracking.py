"""Experiment trackers: TensorBoard, Weights & Biases, Trackio and MLflow, through accelerate's tracker classes.

A run's own record is `metrics.jsonl`; trackers receive copies. A tracker that fails during a run is dropped with a
warning, and the run continues. A step repeated after a kill may appear twice in Trackio and MLflow.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.machine.durable import write_whole
from gangline.settings.installation import package_command
from gangline.train.options import TrainingOptions
from gangline.train.runs.records import EvaluationRecord, StepRecord

_log = logging.getLogger("gangline.trainer")

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


class TrackingSettings(TrainingOptions):
    """Settings of trackers. Their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, ...) apply as usual."""

    project: str = "gangline"
    """Project or experiment that the run belongs to."""
    options: Mapping[TrackerName, Mapping[str, Any]] = {}
    """Tracker -> further arguments of its `init`, such as {wandb: {entity: my-team}}."""


class Tracker(Protocol):
    """The used part of accelerate's trackers."""

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None) -> None: ...

    def finish(self) -> None: ...


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raises: InvalidRequest if a tracker's package is not installed."""
    for name in names:
        package = _PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise InvalidRequest(f"report_to: {name} needs the package {package}: {package_command(package)}")


class Tracking:
    """Reports every step and evaluation to all trackers of a run. Use as a context manager."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @classmethod
    def start(
        cls,
        names: Sequence[TrackerName],
        settings: TrackingSettings,
        *,
        folder: Path,
        run: str,
        config: Mapping[str, Any],
        last_step: int,
    ) -> Self:
        """folder: the run's folder. run: its name and key, used by trackers to continue it. config: resolved settings.
        last_step: step of the checkpoint that the run continues from; 0 for a new run.

        Raises: InvalidRequest if a tracker cannot be started, for example without a login.
        """
        check_trackers(names)
        started = dict[str, Tracker]()
        for name in names:
            tracker = _make(name, settings, folder, run, last_step)
            try:
                with contextlib.redirect_stdout(sys.stderr):  # stdout belongs to the command
                    tracker.start()
                if last_step == 0 and name != "tensorboard":  # TensorBoard would create a separate run for them
                    tracker.store_init_configuration(dict(_flat(config)))
            except Exception as error:  # each tracker raises its own errors
                for other in started.values():
                    other.finish()
                raise InvalidRequest(f"report_to: {name} could not be started: {error}") from error
            started[name] = tracker
            if name == "mlflow":
                _keep_run_id(folder, tracker)
        return cls(started)

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(dict(record.scalars()), step=record.step)
            except Exception as error:  # a tracker must not end a run
                _log.warning("trainer.tracker_lost tracker=%s error=%s", name, error)
                del self._trackers[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        for name, tracker in self._trackers.items():
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    _finish(name, tracker)
            except Exception as error:  # a tracker must not end a run
                _log.warning("trainer.tracker_lost tracker=%s error=%s", name, error)


def _finish(name: str, tracker: Tracker) -> None:
    """Avoids that Trackio finishes its run again, with output, when the process ends."""
    if name == "trackio":
        import trackio  # noqa: PLC0415 - its name is in `report_to`

        trackio.finish()
    else:
        tracker.finish()


def _make(name: TrackerName, settings: TrackingSettings, folder: Path, run: str, last_step: int) -> Tracker:
    from accelerate import PartialState, tracking  # noqa: PLC0415 - of the extra `training`

    PartialState()  # accelerate's trackers need it to log
    project, options = settings.project, dict(settings.options.get(name, {}))
    if name == "tensorboard":
        found: Any = tracking.TensorBoardTracker("tensorboard", folder, purge_step=last_step + 1, **options)
    elif name == "wandb":
        found = tracking.WandBTracker(
            project, **{"name": run, "id": run, "resume": "allow", "dir": str(folder), **options}
        )
    elif name == "trackio":
        found = tracking.TrackioTracker(
            project, **{"name": run, "resume": "allow", "embed": False, "auto_log_cpu": False, **options}
        )
    else:
        found = tracking.MLflowTracker(project, run_name=run, run_id=_run_id(folder), **options)
    return cast("Tracker", found)


def _run_id(folder: Path) -> str | None:
    path = folder / "mlflow.json"
    return msgspec.json.decode(path.read_bytes(), type=str) if path.exists() else None


def _keep_run_id(folder: Path, tracker: Any) -> None:
    """Store the id that MLflow chose, so that a restarted run continues under it."""
    write_whole(folder / "mlflow.json", msgspec.json.encode(tracker.tracker.info.run_id))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, bool | int | float | str) else str(value)
