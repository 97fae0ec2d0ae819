"""Pushes weights that a trainer wrote into its own folder."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from gangline.domain.errors import GanglineError
from gangline.train.weights.update import WeightUpdater

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0


async def push_folder(
    weights: WeightUpdater,
    source: Path,
    version: int,
    *,
    patience_s: float = 600.0,
    without: frozenset[str] = frozenset(),
) -> None:
    """Serve the weights in `source` as policy version `version`. The source files are kept.

    patience_s: how long engines, nodes and server may be unreachable. without: names of files that are not weights.
    Raises: as `WeightUpdater.push`, the error of the last attempt.
    """
    ends_at = time.monotonic() + patience_s
    while True:
        try:
            await weights.push(partial(_link, source, without), version)
            return
        except GanglineError as error:
            if not error.retryable or time.monotonic() > ends_at:
                raise
            _log.warning("weights.push_again version=%d error=%s", version, error)
        await asyncio.sleep(_AGAIN_S)


def _link(source: Path, without: frozenset[str], folder: Path) -> None:
    """Link the files into our folder, because the trainer removes its own."""
    for path in source.iterdir():
        if path.name in without:
            continue
        target = folder / path.name
        with suppress(OSError):  # another disk, or no support for links
            os.link(path, target)
            continue
        shutil.copyfile(path, target)
