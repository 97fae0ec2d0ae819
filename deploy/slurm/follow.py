#!/usr/bin/env python3
"""As many nodes of a Slurm job array as the sessions ask for: follow.py JOB [--least 1] [--most 16] [--slots 64]

Run it every minute, by scrontab or cron, with GANGLINE_SERVER and GANGLINE_TOKEN set. It sets how many tasks of the
array run at once, and drains the nodes with the least to do that are not needed, as `gangline drain` does.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess

HEARD_WITHIN_S = 15


def output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="id of the array")
    parser.add_argument("--least", type=int, default=1, help="nodes that stay; 0 holds the array")
    parser.add_argument("--most", type=int, default=16, help="nodes at once")
    parser.add_argument("--slots", type=int, default=64, help="--run-slots of a node")
    asked = parser.parse_args()

    status = json.loads(output("gangline", "status", "--json"))["status"]
    wanted = min(max(math.ceil(status["demand"] / asked.slots), asked.least), asked.most)
    own = [
        node
        for node in status["nodes"]
        if node["node_id"].startswith(f"slurm-{asked.job}-") and node["age_s"] < HEARD_WITHIN_S
    ]
    kept = sorted((node for node in own if not node["draining"]), key=lambda node: node["num_sessions"])
    surplus = kept[: max(len(kept) - wanted, 0)]
    draining = len(own) - len(kept) + len(surplus)
    if wanted + draining:  # to Slurm, 0 is no limit
        output("scontrol", "update", f"JobId={asked.job}", f"ArrayTaskThrottle={wanted + draining}")
    output("scontrol", "release" if wanted else "hold", asked.job)
    for node in surplus:
        output("gangline", "drain", "--node", node["url"])
    print(f"{status['demand']} sessions: {wanted} nodes wanted, {len(kept)} there, {draining} draining")


if __name__ == "__main__":
    main()
