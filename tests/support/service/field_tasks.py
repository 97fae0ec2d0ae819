"""Small tasks as the field writes them: Harbor and Terminal-Bench folders, a repository with a SWE-bench row."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

COUNT = "/app/data/words.bin"
HARBOR_TOML = """
schema_version = "1.4"

[task]
name = "kennel/count-bytes"

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 90.0

[verifier]
timeout_sec = 45.0
env = { WANTED = "4" }

[environment]
cpus = 1
memory_mb = 512
network_mode = "no-network"
env = { SLED = "${GANGLINE_NO_SUCH_VARIABLE:-red}" }

[solution]
env = { ANSWER_FILE = "answer.txt" }
"""
HARBOR_TEST = """#!/bin/bash
# Planted files of the agent are gone; what it wrote in its working folder is here.
[ ! -e /tests/conftest.py ] || exit 1
cmp -s /tests/wanted.bin data/words.bin && [ "$(cat answer.txt 2>/dev/null)" = "$WANTED $SLED" ]
if [ $? = 0 ]; then reward=1; else reward=0; fi
echo "{\\"reward\\": $reward, \\"tests\\": 1}" > /logs/verifier/reward.json
exit 3
"""
HARBOR_SOLUTION = """#!/bin/bash
echo "$(wc -c < data/words.bin | tr -d ' ') $SLED" > "$ANSWER_FILE"
"""
WORDS = b"\xff\x00ab"


def write(path: Path, text: str | bytes, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def harbor_task(folder: Path, toml: str = HARBOR_TOML, **files: str) -> Path:
    """One that copies a file that is not text, and wants its number of bytes. `files`: path -> text."""
    write(folder / "task.toml", toml)
    write(folder / "instruction.md", "<!-- canary 123 -->\n\nWrite the number of bytes and the sled's colour.\n")
    write(folder / "environment" / "Dockerfile", "FROM debian:12\n# bytes\nWORKDIR /app\nCOPY data/ data/\n")
    write(folder / "environment" / "data" / "words.bin", WORDS)
    write(folder / "tests" / "test.sh", HARBOR_TEST)
    write(folder / "tests" / "wanted.bin", WORDS)
    write(folder / "solution" / "solve.sh", HARBOR_SOLUTION)
    for name, text in files.items():
        write(folder / name, text)
    return folder


TERMINAL_BENCH_YAML = """
instruction: |
  Create hello.txt with the word sled.
author_name: someone
difficulty: easy
tags: [files]
parser_name: pytest
max_agent_timeout_sec: 80
max_test_timeout_sec: 40
"""
TERMINAL_BENCH_COMPOSE = """
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}
    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
      - COLOUR=red
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
"""
TERMINAL_BENCH_TESTS = """
import os, pathlib, pytest

def test_the_word():
    assert pathlib.Path("/app/hello.txt").read_text().strip() == "sled"

def test_the_colour():
    assert os.environ["COLOUR"] == "red"

@pytest.mark.skip(reason="not now")
def test_later():
    raise AssertionError
"""


def terminal_bench_task(folder: Path, yaml: str = TERMINAL_BENCH_YAML, **files: str) -> Path:
    write(folder / "task.yaml", yaml)
    write(folder / "Dockerfile", "FROM ubuntu:24.04\nWORKDIR /app\n")
    write(folder / "docker-compose.yaml", TERMINAL_BENCH_COMPOSE)
    write(folder / "run-tests.sh", "#!/bin/bash\npython3 -m pytest -p no:cacheprovider $TEST_DIR/test_outputs.py -rA\n")
    write(folder / "tests" / "test_outputs.py", TERMINAL_BENCH_TESTS)
    write(folder / "solution.sh", "#!/bin/bash\necho sled > hello.txt\n")
    for name, text in files.items():
        write(folder / name, text)
    return folder


BROKEN = "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n"
FIXED = BROKEN.replace("a - b", "a + b")
OLD_TESTS = "from kennel import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
NEW_TESTS = (
    OLD_TESTS.replace("import double", "import add, double") + "\n\ndef test_add():\n    assert add(2, 3) == 5\n"
)


def git(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            **{
                f"GIT_{who}_{what}": "kennel@example.com"
                for who in ("AUTHOR", "COMMITTER")
                for what in ("NAME", "EMAIL")
            },
        },
    )
    return done.stdout


def repository(folder: Path) -> dict[str, Any]:
    """`folder` becomes a repository whose last commit is the fix; answers the row of the issue before it."""
    write(folder / "kennel.py", BROKEN)
    write(folder / "test_kennel.py", OLD_TESTS)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "Begin")
    base = git(folder, "rev-parse", "HEAD").strip()
    write(folder / "kennel.py", FIXED)
    write(folder / "test_kennel.py", NEW_TESTS)
    git(folder, "commit", "-q", "-a", "-m", "Fix add")
    git(folder, "tag", "v2")
    return {
        "instance_id": "dogs__kennel-1",
        "repo": "dogs/kennel",
        "base_commit": base,
        "problem_statement": "add(2, 3) is -1, {not} 5",
        "patch": git(folder, "diff", base, "--", "kennel.py"),
        "test_patch": git(folder, "diff", base, "--", "test_kennel.py"),
        "FAIL_TO_PASS": json.dumps(["test_kennel.py::test_add"]),
        "PASS_TO_PASS": json.dumps(["test_kennel.py::test_double"]),
        "version": "1.0",
    }
