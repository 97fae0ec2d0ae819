"""A Ray cluster of several machines on this one: `python ray_cluster.py`, each machine an address of loopback.

`python ray_cluster.py NUM` has a head without room, and Ray's own autoscaler, which starts up to NUM machines of one
CPU and ends those that were idle for six seconds.

It is asked by lines of JSON on stdin, and answers each with one on stdout:
{"do": "add", "host": "127.0.0.3", "cpus": 1}    a machine more
{"do": "kill", "host": "127.0.0.3"}              `kill -9` of all that Ray runs there
{"do": "settle"}                                 wait until Ray knows which machines are alive
{"do": "kill_raylet_of_head"}                    the process of Ray that places there; the cluster goes on
{"do": "actors"}                                 [[state, pid], ...] of all that there ever were
{"do": "free"}                                   whether nothing of the cluster is in use
{"do": "alive"}                                  addresses of the machines, without the head's
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

HEAD = "127.0.0.2"
"""Ray takes 127.0.0.1 for the machine's outer address."""
HEAD_ID = "f" * 51 + "00000"
"""As Ray's provider for tests calls it."""
PORT = 6390


NOTHING_TO_RUN = (
    "cluster_synced_files",
    "head_setup_commands",
    "head_start_ray_commands",
    "initialization_commands",
    "setup_commands",
    "worker_setup_commands",
    "worker_start_ray_commands",
)
SMALL: dict[str, Any] = {"object_store_memory": 80_000_000}


def autoscaling(num: int) -> dict[str, Any]:
    """Arguments of a head with Ray's autoscaler, as `ray up` and KubeRay run it, over a provider of our machines."""
    tests = str(Path(__file__).parents[2])
    os.environ |= {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
    }
    worker = {"resources": {"CPU": 1, **SMALL}, "node_config": {}, "min_workers": 0, "max_workers": num}
    config = {
        "cluster_name": "tests",
        "max_workers": num,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "external",
            "module": "support.service.ray_provider.LoopbackMachines",
            "gcs_address": f"{HEAD}:{PORT}",
            "launch_multiple": True,
            "head_node_id": HEAD_ID,
        },
        **{name: [] for name in NOTHING_TO_RUN},
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": worker,
        },
    }
    file = Path(tempfile.mkdtemp()) / "autoscaling.json"
    file.write_text(json.dumps(config))
    return {
        "num_cpus": 0,
        "autoscaling_config": str(file),
        "gcs_server_port": PORT,
        "env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID},
    }


def end_machines(session_folder: str) -> None:
    """Those of the autoscaler, which outlive the head's processes."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if session_folder.encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def main() -> None:
    import ray
    from ray._private import state
    from ray.cluster_utils import Cluster

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    head = autoscaling(int(sys.argv[1])) if sys.argv[1:] else {"num_cpus": 2}
    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={"node_ip_address": HEAD, "include_dashboard": False, **SMALL, **head},
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
                machines[host] = cluster.add_node(node_ip_address=host, num_cpus=asked["cpus"], **SMALL)
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
            case "alive":
                answer = [one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]]
                answer.remove(HEAD)
            case other:
                raise ValueError(other)
        print(json.dumps(answer), file=out)
    ray.shutdown()
    session_folder = cluster.head_node.get_session_dir_path()
    cluster.shutdown()
    end_machines(session_folder)


if __name__ == "__main__":
    main()
