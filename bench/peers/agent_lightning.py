"""Agent Lightning's server (PyPI `agentlightning`) with its proxy.

    python agent_lightning.py ENGINE_URL PORT FOLDER NUM_SESSIONS

As its own command starts it, but quieter: no access log, no debug log. It keeps its events in memory; FOLDER is unused.
Runs in its own environment.
"""

import logging
import sys

import structlog
import uvicorn
from agentlightning.schemas import Model, Rollout, RolloutConfig, RolloutLifecycleStatus, RolloutMetadata
from agentlightning.server.app import create_app
from agentlightning.server.store import _events, _models, _rollouts

MODEL = "mock"


def main(engine_url: str, port: str, _folder: str, num_sessions: str) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    _models[MODEL] = {"engine": Model(model=MODEL, endpoint=f"{engine_url}/v1")}
    for number in range(int(num_sessions)):
        name = f"s{number}"
        status = RolloutLifecycleStatus(created_at=0.0, updated_at=0.0)
        _rollouts[name] = Rollout(
            rollout_id=name, input={}, is_train=True, config=RolloutConfig(), metadata=RolloutMetadata(), status=status
        )
        _events[name] = {}
    proxy = {"model_name": MODEL, "include_log_probs": True, "train": {"temperature": 1}, "val": {"temperature": 0.7}}
    app = create_app({"key": "", "default_proxy": proxy})
    uvicorn.run(app, host="127.0.0.1", port=int(port), access_log=False, log_level="warning", timeout_keep_alive=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
