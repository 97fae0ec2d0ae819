"""Programs that a bench waits for, with one thread each: engine, learner and sandboxes share few cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["PROGRAM", "printed_by"]

PROGRAM = str(Path(sys.executable).parent / "gangline")
TIMEOUT_S = 2 * 3600


def printed_by(*command: str) -> str:
    """Raises: CalledProcessError, TimeoutExpired."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_S, env=environment, text=True)
    return done.stdout
