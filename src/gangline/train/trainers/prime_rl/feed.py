"""The loop that runs alongside prime-rl's trainer: reads weights and writes rollouts as files.

It waits for `broadcasts/step_N/STABLE`, loads these weights into the engines with the gates closed, collects groups,
and writes `rollouts/step_{N+1}/rank_R.bin` with prime-rl's own sender. Batch N+1 is for the policy of step N.

Invariants: files of another run are neither trained on nor loaded, so a folder that contains any is refused. Groups
with tokens older than the setting allows are left out, logged, and replaced.

Source: prime-rl, github.com/PrimeIntellect-ai/prime-rl at 559b447, `trainer/rl/train.py` (order),
`transports/rollouts/filesystem.py`, `transports/weights/filesystem.py`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest, NodeError
from gangline.machine.durable import write_whole
from gangline.train.collecting.admission import is_fresh, version_spans
from gangline.train.collecting.groups import Group, trainable_traces
from gangline.train.learning.algorithms import Algorithm
from gangline.train.learning.masks import all_sampled
from gangline.train.learning.samples import Mask
from gangline.train.trainers.contract import GroupSource, TrainerRow
from gangline.train.trainers.prime_rl.samples import PrimeSample, PrimeSettings, pack, prime_rl, to_samples
from gangline.train.trainers.pushing import push_folder
from gangline.train.weights.update import WeightUpdater

_log = logging.getLogger(__name__)

_POLL_S = 0.2
_STEP = re.compile(r"step_(\d+)")
_STABLE = "STABLE"
_SOURCES = "sources.jsonl"


async def feed(
    output_dir: Path | str,
    collector: GroupSource,
    weights: WeightUpdater,
    settings: PrimeSettings,
    algorithm: Algorithm,
    *,
    mask: Mask = all_sampled,
    model_config: Any = None,
) -> None:
    """Start it before the trainer; it runs until the engines have the weights of the trainer's last step.

    output_dir: the trainer's, on a disk that both can access. Each `rollouts/step_N` also gets `sources.jsonl`: each
    row's trace, versions and rewards.

    Raises: InvalidRequest if the folder contains files of another run, or a broadcast is not a whole model. NodeError
    if a broadcast is late. Errors of collector, weights and conversion. The trainer then waits until it is stopped.
    """
    folder = Path(output_dir)
    await asyncio.to_thread(_require_no_leftovers, folder, settings.start_step)
    _log.info("prime_rl.ready output_dir=%s step=%d", folder, settings.start_step)
    sender = prime_rl("transports.rollouts.filesystem").FileSystemMicroBatchSender(
        folder, settings.data_ranks, settings.start_step + 1
    )
    for step in range(settings.start_step, settings.max_steps + 1):
        version = settings.first_version + step - settings.start_step
        broadcast = folder / "broadcasts" / f"step_{step}"
        await _wait_for(broadcast / _STABLE, settings.patience_s)
        await asyncio.to_thread(_require_whole_model, broadcast)
        await push_folder(
            weights, broadcast, version, patience_s=settings.engine_patience_s, without=frozenset({_STABLE})
        )
        if step == settings.max_steps:
            return
        groups = await _collect(collector, settings, version)
        samples = to_samples(groups, settings, algorithm, mask)
        grid = await asyncio.to_thread(pack, samples, settings, model_config=model_config)
        await asyncio.to_thread(_write_sources, folder / "rollouts" / f"step_{step + 1}", samples)
        await sender.send(grid)
        _log.info("prime_rl.batch_written step=%d version=%d rows=%d", step + 1, version, len(samples))


def _require_no_leftovers(folder: Path, start_step: int) -> None:
    """Raises: InvalidRequest."""
    left = [
        path
        for part, first in (("rollouts", start_step + 1), ("broadcasts", start_step))
        for number, path in _steps(folder / part)
        if number >= first
    ]
    if left:
        raise InvalidRequest(
            f"{folder} has steps that were there before this run: {', '.join(str(path) for path in left)}. The trainer "
            "would train on old rollouts, and the engines would get old weights. Start this before the trainer, in a "
            "new folder, or remove these."
        )


def _steps(folder: Path) -> Iterator[tuple[int, Path]]:
    """Numbers and paths of existing steps, in order."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := _STEP.fullmatch(path.name))]
    yield from sorted(found)


async def _wait_for(path: Path, patience_s: float | None) -> None:
    """Raises: NodeError."""
    try:
        async with asyncio.timeout(patience_s):
            while True:
                if await asyncio.to_thread(path.exists):
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise NodeError(f"prime-rl's trainer wrote no {path} within {patience_s:g} s: look at its log.") from None


def _require_whole_model(broadcast: Path) -> None:
    """Raises: InvalidRequest."""
    if (broadcast / "adapter_config.json").exists():
        raise InvalidRequest(
            f"{broadcast} is an adapter, and engines are given whole weights here: train without model.lora."
        )


def _write_sources(folder: Path, samples: Sequence[PrimeSample]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(_source(sample.row)) for sample in samples]
    write_whole(folder / _SOURCES, b"\n".join(lines) + b"\n")


def _source(row: TrainerRow) -> dict[str, Any]:
    return {
        "task_id": row.task_id,
        "session_id": row.session_id,
        "trace_id": row.trace_id,
        "reward": row.reward,
        "session_reward": row.session_reward,
        "num_tokens": len(row.prompt_ids) + len(row.response_ids),
        "versions": [(span.version, span.start, span.end) for span in version_spans(row.versions)],
    }


async def _collect(collector: GroupSource, settings: PrimeSettings, version: int) -> list[Group]:
    """Groups that are fresh enough for the trainer's weights."""
    groups = list[Group]()
    while missing := settings.groups_per_step - len(groups):
        for group in await collector.collect(missing):
            if _is_fresh(group, settings, version):
                groups.append(group)
            else:
                _log.warning("prime_rl.group_left_out task_id=%s version=%d reason=stale", group.task_id, version)
    return groups


def _is_fresh(group: Group, settings: PrimeSettings, version: int) -> bool:
    return all(is_fresh(trainable_traces(session), version, settings.staleness) for session in group.sessions)
