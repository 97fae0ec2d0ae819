"""rLLM's gateway (PyPI `rllm-model-gateway`).

    python rllm_gateway.py ENGINE_URL PORT FOLDER NUM_SESSIONS

As its own command starts it (traces to SQLite, written in the background), but without an access log. Runs in an
environment of its own.
"""

import sys

import uvicorn
from rllm_model_gateway.models import GatewayConfig, WorkerConfig
from rllm_model_gateway.server import create_app


def main(engine_url: str, port: str, folder: str, _num_sessions: str) -> None:
    config = GatewayConfig(db_path=f"{folder}/traces.db", workers=[WorkerConfig(worker_id="0", url=engine_url)])
    uvicorn.run(create_app(config), host="127.0.0.1", port=int(port), access_log=False, log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
