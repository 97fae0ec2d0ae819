"""The families (`families_bench.py`) with SmolLM2 of 135 million parameters. About an hour and a half on two cores.

usage: families_135m_bench.py
"""

from __future__ import annotations

import json

import families_bench

__all__ = ["run"]


def run() -> families_bench.Figures:
    """Returns figure name -> {value, unit, note}."""
    return families_bench.run(families_bench.LARGE)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
