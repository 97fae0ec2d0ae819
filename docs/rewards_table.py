"""The page of rewards: how many tasks earned the same there and here. `make rewards` counts them.

    usage: rewards_table.py FILE

FILE has a line of JSON for each comparison, as tests/support/compared.py writes it.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "rewards.json"
_RUNNERS = {
    "Harbor, in Docker": "Harbor 0.25.0: its command line, its agents `oracle` and `nop`, its Docker environment",
    "Harbor, its Trial": "Harbor 0.25.0: its `Trial`, with folders under bubblewrap in the place of a container",
    "SWE-bench, version 5": "swebench 5.0.2: its harness in Docker, rows with a script of their own",
    "SWE-bench, version 4": "swebench 4.1.0: the same, rows without one",
    "Inspect": "inspect-ai 0.3.285: `eval` with its scorers",
    "verifiers": "verifiers 0.4.0: its task's rewards",
    "reasoning-gym": "reasoning-gym 0.1.25: `score_answer` of each dataset",
    "tau2-bench": "tau2-bench at a2c0247: its runner and evaluator, users and judges from a script",
    "NeMo Gym": "nemo-gym 0.7.0: an example server of its own, over its routes and as tools",
    "OpenEnv": "openenv 0.10: its client and server",
    "gymnasium": "gymnasium 1.4.0, stepped directly",
    "pettingzoo": "pettingzoo 1.27.0, stepped directly",
    "textarena": "textarena 0.7.4, stepped directly",
}
_INTRODUCTION = """\
# Rewards, compared with their home

A task that is taken over must earn what it earns where it comes from. `make rewards` gives the same tasks, with the
same answers or actions (right ones, and none), to the system that they come from and to Gangline. Tasks are generated
where data cannot be had. [Differences](../guides/tasks.md#rewards-as-at-home) are intended: tests name each of them.

"""


def rewards_table() -> str:
    """docs/reference/rewards.md"""
    found: dict[str, Any] = json.loads(_DATA.read_text())
    lines = ["| home | what judges | tasks | rewards | the same |", "|---" * 5 + "|"]
    total = [0, 0, 0]
    for runner, what in _RUNNERS.items():
        if (one := found["runners"].get(runner)) is None:
            continue
        numbers = [one["tasks"], one["rewards"], one["same"]]
        total = [before + more for before, more in zip(total, numbers, strict=True)]
        home, _, _ = runner.partition(",")
        lines.append(f"| {home} | {what} | {' | '.join(map(str, numbers))} |")
    lines.append(f"| all | | {' | '.join(map(str, total))} |")
    return _INTRODUCTION + "\n".join(lines) + f"\n\nMeasured on {found['date']}.\n"


def main() -> None:
    runners: dict[str, dict[tuple[str, str], bool]] = {}
    for line in Path(sys.argv[1]).read_text().splitlines():
        told = json.loads(line)
        runners.setdefault(told["runner"], {}).update({(task, done): same for task, done, same in told["rewards"]})
    counted = {
        name: {"tasks": len({task for task, _ in found}), "rewards": len(found), "same": sum(found.values())}
        for name, found in sorted(runners.items())
    }
    if unknown := counted.keys() - _RUNNERS.keys():
        raise SystemExit(f"say what these are, in {Path(__file__).name}: {', '.join(sorted(unknown))}")
    document = {"date": datetime.now(UTC).date().isoformat(), "runners": counted}
    _DATA.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
