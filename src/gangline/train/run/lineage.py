"""Lineage: the inputs of a run, stored with its output.

`experiment.json` is the resolved specification, `lineage.json` has one entry per start of the run, with digests of its
inputs and the runs that produced them, and `results.json` is the result. A folder belongs to one experiment on one set
of tasks; only its number of steps may grow.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gangline import __version__
from gangline.domain.errors import Conflict
from gangline.machine.durable import write_whole
from gangline.machine.private import make_private_folder
from gangline.settings import plugins
from gangline.train.run.experiment import Experiment, digest_of, resolved_settings
from gangline.train.runs.ancestry import parents_of, readable_runs
from gangline.train.runs.records import EvaluationRecord, Life, Results, StepRecord, paired_difference

_PACKAGES = ("torch", "transformers", "peft", "numpy", "safetensors")


def key_of(folder: Path) -> str:
    """The run's key; a new one if the run has not started yet."""
    lives = _lives(folder)
    return lives[0].key if lives else secrets.token_hex(3)


def begin_life(
    folder: Path,
    experiment: Experiment,
    *,
    key: str,
    tasks_digest: str,
    held_out_digest: str | None,
    model_folder: Path,
    first_step: int,
    checkpoint_digest: str = "",
) -> None:
    """Write specification and lineage. Raises: Conflict if the folder belongs to another experiment."""
    make_private_folder(folder)
    lives = _lives(folder)
    model_digest = weights_digest(model_folder)
    life = Life(
        key=key,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        first_step=first_step,
        experiment_digest=digest_of(experiment),
        tasks_digest=tasks_digest,
        held_out_digest=held_out_digest,
        model_digest=model_digest,
        checkpoint_digest=checkpoint_digest,
        parents=parents_of(experiment.name, {model_digest, checkpoint_digest}, readable_runs(folder.parent.parent)),
        gangline=__version__,
        commit=_commit(),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        packages=dict(_packages()),
        hooks={name: plugins.version("hook", name) for name in experiment.hooks.named.values()},
    )
    if lives and (differs := _differs(lives[-1], life)):
        raise Conflict(
            f"{folder} is a run of another experiment ({differs} changed). Give this one another name, or remove that "
            "folder."
        )
    lives.append(life)
    write_whole(folder / "lineage.json", msgspec.json.format(msgspec.json.encode(lives)))
    write_whole(folder / "experiment.json", msgspec.json.format(msgspec.json.encode(resolved_settings(experiment))))


def write_results(
    folder: Path,
    records: Sequence[StepRecord],
    evaluations: Sequence[EvaluationRecord],
    *,
    last_version: int,
    weights: Path,
) -> Results:
    """records: records of all steps, at least one."""
    part = max(len(records) // 5, 1)
    results = Results(
        num_steps=len(records),
        last_version=last_version,
        first_reward=sum(record.reward_mean for record in records[:part]) / part,
        last_reward=sum(record.reward_mean for record in records[-part:]) / part,
        first_evaluation=evaluations[0].reward_mean if evaluations else None,
        last_evaluation=evaluations[-1].reward_mean if evaluations else None,
        held_out_difference=paired_difference(evaluations[0], evaluations[-1]) if evaluations else None,
        wall_s=max(record.wall_s for record in (records[-1], *evaluations[-1:])),
        weights=str(weights),
        weights_digest=weights_digest(weights),
    )
    write_whole(folder / "results.json", msgspec.json.format(msgspec.json.encode(results)))
    return results


def _lives(folder: Path) -> list[Life]:
    path = folder / "lineage.json"
    return msgspec.json.decode(path.read_bytes(), type=list[Life]) if path.exists() else []


def _differs(before: Life, now: Life) -> str:
    named = {
        "the specification": "experiment_digest",
        "the tasks": "tasks_digest",
        "the held-out tasks": "held_out_digest",
        "the model": "model_digest",
    }
    return " and ".join(what for what, name in named.items() if getattr(before, name) != getattr(now, name))


def weights_digest(model_folder: Path) -> str:
    """Digest of a model's weights and configuration, without its tokenizer. Empty if the folder has no such files.
    Blocking.
    """
    digest = hashlib.sha256()
    paths = sorted([*model_folder.glob("*.safetensors"), *model_folder.glob("config.json")])
    if not paths:
        return ""
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _commit() -> str | None:
    where = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            cwd=where,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() if _is_ours(where) else None


def _is_ours(where: Path) -> bool:
    """An installed package may be inside an unrelated git checkout."""
    listed = ["git", "ls-files", "--error-unmatch", Path(__file__).name]
    return subprocess.run(listed, cwd=where, capture_output=True, timeout=10, check=False).returncode == 0


def _packages() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
