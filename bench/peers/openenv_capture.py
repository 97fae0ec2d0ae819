"""OpenEnv's capture server (PyPI `openenv`).

    python openenv_capture.py ENGINE_URL PORT FOLDER NUM_SESSIONS

As its own command starts it, but without an access log, and with the sessions `gls-bench-s0` and on, whose ids are
callers' keys. FOLDER is unused. Runs in its own environment.
"""

import sys

import uvicorn
from openenv.core.harness.capture.server import create_app


def main(engine_url: str, port: str, _folder: str, num_sessions: str) -> None:
    app = create_app(llm_url=engine_url, model="mock", engine="vllm", capture_level="tokens")
    for number in range(int(num_sessions)):
        app.state.registry.create(f"gls-bench-s{number}")
    uvicorn.run(app, host="127.0.0.1", port=int(port), access_log=False, log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
