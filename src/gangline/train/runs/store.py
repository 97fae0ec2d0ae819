"""Reads the runs of a data folder: `runs list`, `runs show`, `runs compare`.

There is no database of runs: a run's folder is its record, so runs can be copied or removed as folders.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np

from gangline.domain.errors import InvalidRequest, NotFound
from gangline.train.runs.log import GrowingRecords
from gangline.train.runs.records import (
    CheckpointRecord,
    EvaluationRecord,
    Life,
    PairedDifference,
    Results,
    StepRecord,
    paired_difference,
)

_NOT_COMPARED = {"name", "seed", "report_to"}
"""Settings that do not distinguish arms."""
_NO_TABLES = ("service.", "tracking.")
"""Tables of settings that do not distinguish arms."""

_RECORDS = ("lineage.json", "metrics.jsonl", "evaluations.jsonl", "results.json")

State = Literal["running", "stopped", "done"]


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a list."""

    name: str
    state: State
    model: str
    algorithm: str
    control: str
    seed: int
    num_done: int
    """Steps."""
    num_steps: int
    started_at: str
    """Time of the first start, UTC, ISO 8601."""
    updated_at: str
    """Time of the last change of its records."""
    num_lives: int
    """Number of starts."""
    reward_mean: float | None
    """In the last step, over trained sessions."""
    first_evaluation: float | None
    last_evaluation: float | None
    """Mean rewards on held-out tasks."""
    held_out_difference: PairedDifference | None
    wall_s: float
    folder: str


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All records of a run."""

    summary: RunSummary
    settings: dict[str, Any]
    """Resolved settings, by dotted names."""
    lives: list[Life]
    records: list[StepRecord]
    evaluations: list[EvaluationRecord]
    results: Results | None
    """None until all steps are done."""
    checkpoints: list[CheckpointRecord] = []
    """All checkpoints it ever made; most are removed again."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that differ only in their seed."""

    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    """The settings in which arms differ, by dotted names; None for a setting that the arm lacks."""
    reward_mean: float | None
    """Mean of the runs' last evaluations."""
    deviation_of_seeds: float | None
    """Sample standard deviation between the runs; None for a single run."""
    difference: PairedDifference | None
    """Last evaluations compared with the first arm's, task by task, averaged over seeds; None for the first arm, and if
    the held-out tasks differ.
    """


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    arms: tuple[Arm, ...]
    """In the order in which their runs were given."""


def read_runs(data_dir: Path) -> list[Run]:
    """Every run of a data folder, latest first. Raises: InvalidRequest for a folder that cannot be read."""
    runs = (RunReader(folder).read() for folder in run_folders(data_dir))
    return sorted(runs, key=lambda run: run.summary.updated_at, reverse=True)


def run_folders(data_dir: Path) -> list[Path]:
    """Folders of all runs of a data folder, sorted by name."""
    return sorted(path.parent for path in (data_dir / "runs").glob("*/lineage.json"))


def read_run(data_dir: Path, name: str) -> Run:
    """name: name of a run, or the path of its folder. Raises: NotFound, InvalidRequest."""
    for folder in (data_dir / "runs" / name, Path(name)):
        if (folder / "lineage.json").exists():
            return RunReader(folder).read()
    there = [path.name for path in run_folders(data_dir)]
    raise NotFound(f"there is no run {name!r} in {data_dir / 'runs'}. There are: {', '.join(there) or 'none'}.")


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compares the other arms with the first run's arm."""
    by_settings: dict[bytes, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(_compared(run), []).append(run)
    arms = list(by_settings.values())
    names = _differing([mine[0].settings for mine in arms])
    return Comparison(
        arms=tuple(_arm(mine, names, None if mine is arms[0] else arms[0]) for mine in arms),
    )


def _arm(runs: Sequence[Run], names: Sequence[str], base: Sequence[Run] | None) -> Arm:
    rewards = [run.summary.last_evaluation for run in runs if run.summary.last_evaluation is not None]
    return Arm(
        runs=tuple(run.summary.name for run in runs),
        seeds=tuple(run.summary.seed for run in runs),
        settings={name: runs[0].settings.get(name) for name in names},
        reward_mean=float(np.mean(rewards)) if rewards else None,
        deviation_of_seeds=float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None,
        difference=None if base is None else _difference(base, runs),
    )


def _difference(base: Sequence[Run], runs: Sequence[Run]) -> PairedDifference | None:
    tasks = {run.lives[-1].held_out_digest for run in (*base, *runs)}
    before, after = _mean_evaluation(base), _mean_evaluation(runs)
    if len(tasks) > 1 or before is None or after is None or len(before.task_means) != len(after.task_means):
        return None
    return paired_difference(before, after)


def _mean_evaluation(runs: Sequence[Run]) -> EvaluationRecord | None:
    """The last evaluations combined into one: each task's mean over the runs."""
    last = [run.evaluations[-1] for run in runs if run.evaluations]
    if len(last) < len(runs):
        return None
    by_task = zip(*(one.task_means for one in last), strict=True)
    means = tuple(_mean_of([mean for mean in of_task if mean is not None]) for of_task in by_task)
    return msgspec.structs.replace(last[0], task_means=means)


def _mean_of(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _compared(run: Run) -> bytes:
    settings = {name: value for name, value in run.settings.items() if _is_compared(name)}
    return msgspec.json.encode(settings, order="deterministic")


def _is_compared(name: str) -> bool:
    return name not in _NOT_COMPARED and not name.startswith(_NO_TABLES)


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for setting in settings for name in setting if _is_compared(name)})
    return [name for name in names if any(setting.get(name) != settings[0].get(name) for setting in settings)]


def state_of_files(folder: Path) -> tuple[object, ...]:
    """Changes whenever a `RunReader` would return a different run."""
    found = [folder / name for name in (*_RECORDS, "experiment.json") if (folder / name).exists()]
    return (_is_locked(folder / "run.lock"), *((one.name, one.stat().st_mtime_ns, one.stat().st_size) for one in found))


class RunReader:
    """Reads one run's folder repeatedly while its trainer writes it. Records already read are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = GrowingRecords(folder / "metrics.jsonl", StepRecord)
        self._evaluations = GrowingRecords(folder / "evaluations.jsonl", EvaluationRecord)
        self._checkpoints = GrowingRecords(folder / "checkpoints.jsonl", CheckpointRecord)

    def read(self) -> Run:
        """Raises: InvalidRequest."""
        try:
            return self._read(self._folder)
        except (OSError, msgspec.MsgspecError, LookupError, TypeError) as error:
            raise InvalidRequest(
                f"{self._folder} is not the folder of a run that this version can read: {error}."
            ) from error

    def _read(self, folder: Path) -> Run:
        lives = msgspec.json.decode((folder / "lineage.json").read_bytes(), type=list[Life])
        experiment = msgspec.json.decode((folder / "experiment.json").read_bytes(), type=dict[str, Any])
        records, evaluations = self._records.read(), self._evaluations.read()
        checkpoints = self._checkpoints.read()
        path = folder / "results.json"
        results = msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else None
        return Run(
            summary=_summary(folder, experiment, lives, records, evaluations, results),
            settings=dict(_flat(experiment)),
            lives=lives,
            records=records,
            evaluations=evaluations,
            results=results,
            checkpoints=checkpoints,
        )


def _summary(
    folder: Path,
    experiment: Mapping[str, Any],
    lives: Sequence[Life],
    records: Sequence[StepRecord],
    evaluations: Sequence[EvaluationRecord],
    results: Results | None,
) -> RunSummary:
    num_steps, done = experiment["schedule"]["steps"], len(records)
    difference = paired_difference(evaluations[0], evaluations[-1]) if len(evaluations) > 1 else None
    return RunSummary(
        name=experiment["name"],
        state="running" if _is_locked(folder / "run.lock") else "done" if results and done >= num_steps else "stopped",
        model=experiment["model"],
        algorithm=experiment["algorithm"]["name"],
        control=experiment["control"],
        seed=experiment["seed"],
        num_done=done,
        num_steps=num_steps,
        started_at=lives[0].started_at,
        updated_at=_updated_at(folder),
        num_lives=len(lives),
        reward_mean=records[-1].reward_mean if records else None,
        first_evaluation=evaluations[0].reward_mean if evaluations else None,
        last_evaluation=evaluations[-1].reward_mean if evaluations else None,
        held_out_difference=difference,
        wall_s=max((one.wall_s for one in (*records[-1:], *evaluations[-1:])), default=0.0),
        folder=str(folder),
    )


def _updated_at(folder: Path) -> str:
    newest = max((folder / name).stat().st_mtime for name in _RECORDS if (folder / name).exists())
    return datetime.fromtimestamp(newest, UTC).isoformat(timespec="seconds")


def _is_locked(path: Path) -> bool:
    """Whether a trainer holds the run's lock. Reads the kernel's list, because trying the lock could make a trainer
    fail.
    """
    if sys.platform != "linux" or not path.exists():  # trainers run on Linux
        return False
    inode = path.stat().st_ino
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode) for fields in locks)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value
