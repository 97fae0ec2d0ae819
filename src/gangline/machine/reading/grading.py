"""Grading in the common style: tests are uploaded after the agent's processes are gone, and a program runs them and
writes a number.
"""

from __future__ import annotations

from typing import Any

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.files import hidden_files, written_folder
from gangline.machine.reading.paths import SourcePath

GRADING_MARGIN_S = 60.0
"""Seconds of the evaluation in addition to the tests' own time: for clearing, uploading and reading."""
_LONGEST_FILES_BYTES = 48 << 20
"""The size limit of a submission is 64 MiB."""


def tests_of(folder: SourcePath, inside: str) -> dict[str, dict[str, Any]]:
    """Path inside -> file. Raises: InvalidRequest if there are none, or they are too large."""
    files = written_folder(folder, inside)
    if not files:
        raise InvalidRequest(f"{folder} holds no tests.")
    if sum(len(file["content"]) for file in files.values()) > _LONGEST_FILES_BYTES:
        raise InvalidRequest(f"{folder} is larger than {_LONGEST_FILES_BYTES >> 20} MiB: put its data into the image.")
    return files


def script_evaluator(
    command: str, files: dict[str, dict[str, Any]], *, clear: list[str], timeout_s: float, env: dict[str, str]
) -> dict[str, Any]:
    """The body's `evaluator`, which grades in the agent's own runtime, because these tests inspect it."""
    return {
        "strategy": "script",
        "config": {
            "command": command,
            "files": hidden_files(files),
            "clear": clear,
            "reward_file": ["/logs/verifier/reward.json", "/logs/verifier/reward.txt"],
            "timeout_seconds": timeout_s,
            "env": env,
        },
    }


def solution(files: dict[str, dict[str, Any]], command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """The body's `solution`: a program that is written first."""
    return {
        "command": command,
        "env": env,
        "prepare": [{"type": "write", "path": path, **file} for path, file in files.items()],
    }
