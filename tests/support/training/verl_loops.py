"""verl's module of agent loops in this process, without what it starts workers by."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.training.absent_modules import importable

__all__ = ["agent_loops"]


@contextmanager
def agent_loops(empty: Path) -> Iterator[Any]:
    """verl's module of agent loops, without what it starts workers by. empty: a folder."""
    absent = ("hydra", "omegaconf", "ray", "transfer_queue", "codetiming")
    before = set(sys.modules)
    with importable(empty, *absent), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module("verl.experimental.agent_loop.agent_loop")
    for name in [name for name in sys.modules if name not in before and name.startswith("verl")]:
        del sys.modules[name]
