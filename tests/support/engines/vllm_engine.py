"""A real vLLM on this machine's CPU, as its own process from its own environment (`make vllm`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.requirements import need

__all__ = ["MODEL_FOLDER", "VLLM_FOLDER", "need_vllm", "running_server", "running_vllm"]

VLLM_FOLDER = Path(os.environ.get("GANGLINE_VLLM") or Path(__file__).parents[3] / ".venv-vllm")
MODEL_FOLDER = VLLM_FOLDER / "tiny-qwen3"
READY_WITHIN_S = 240

_ENVIRONMENT = {
    # Without it the package looks for a distribution named `vllm` to learn what it was built for.
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Its threads wait for each other by spinning: on two cores they would keep its HTTP server from both, for seconds.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The routes that pause, reload weights and resume.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
_OPTIONS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16"),
    *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
)
_PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


def need_vllm() -> None:
    need((VLLM_FOLDER / ".ready").is_file() and (MODEL_FOLDER / "config.json").is_file(), "no vLLM: make test-vllm")


@contextmanager
def running_vllm(
    log: Path, *, parsers: bool = True, model: Path = MODEL_FOLDER, options: Sequence[str] = ()
) -> Generator[str]:
    """The URL of a server of the model, the tiny Qwen3 unless given, named `tiny`, up to its end. `log` gets what it
    prints.

    parsers: it reads thinking and tool calls out of its replies. options: more of its own, which take precedence.
    """
    command = ("vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "tiny", *_OPTIONS)
    with running_server((*command, *(_PARSERS if parsers else ()), *options), log) as url:
        yield url


@contextmanager
def running_server(arguments: Sequence[str], log: Path, folder: Path | None = None) -> Generator[str]:
    """The URL of a server that is a module of vLLM's environment, and takes `--host` and `--port`.

    folder: where it runs.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (str(VLLM_FOLDER / "bin/python"), "-m", *arguments, "--host", "127.0.0.1", "--port", str(port))
    env = os.environ | _ENVIRONMENT
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=folder, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, log)
            yield url
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"{url} did not get ready; it said: ...{log.read_text(errors='replace')[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The server and the engine that it started: all of its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
        try:
            process.wait(timeout=20)
            break
        except subprocess.TimeoutExpired:
            continue
