"""A Ray cluster of several machines on this one: `python ray_cluster.py`, each machine an address of loopback.

It is asked by lines of JSON on stdin, and answers each with one on stdout:
{"do": "add", "host": "127.0.0.3", "cpus": 1}    a machine more
{"do": "kill", "host": "127.0.0.3"}              `kill -9` of all that Ray runs there
{"do": "settle"}                                 wait until Ray knows which machines are alive
{"do": "kill_raylet_of_head"}                    the process of Ray that places there; the cluster goes on
{"do": "actors"}                                 [[state, pid], ...] of all that there ever were
{"do": "free"}                                   whether nothing of the cluster is in use
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

HEAD = "127.0.0.2"
"""Ray takes 127.0.0.1 for the machine's outer address."""


def main() -> None:
    import ray
    from ray._private import state
    from ray.cluster_utils import Cluster

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    small: dict[str, Any] = {"object_store_memory": 80_000_000}
    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={"node_ip_address": HEAD, "num_cpus": 2, "include_dashboard": False, **small},
    )
    machines: dict[str, Any] = {}
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False, namespace="tests")
    print(json.dumps(cluster.address), file=out)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = None
        match asked["do"]:
            case "add":
                host = asked["host"]
                machines[host] = cluster.add_node(node_ip_address=host, num_cpus=asked["cpus"], **small)
            case "kill":
                cluster.remove_node(machines.pop(asked["host"]), allow_graceful=False)
            case "settle":
                cluster.wait_for_nodes(timeout=120)
            case "kill_raylet_of_head":
                cluster.head_node.kill_raylet(check_alive=False)
            case "actors":
                answer = [[one["State"], one["Pid"]] for one in state.actors().values()]
            case "free":
                answer = ray.available_resources() == ray.cluster_resources()
            case other:
                raise ValueError(other)
        print(json.dumps(answer), file=out)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
