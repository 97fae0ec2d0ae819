"""Columns of HumanEval (`prompt`, `test`, `entry_point`) and of MBPP (`test_list`), whose tests are Python code.

The tests run in the solution's process, as in the benchmarks' own runners (`in_sandbox/asserts.py`).

Sources: human-eval 463c980, `execution.py`; MBPP's README, whose prompt shows the tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

_LIMIT_S = 60
"""Seconds for all tests of a row. MBPP's own solution of task 123 takes seconds, and more on a busy machine."""
_FOLDER = ".tests"


class _HumanEval(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: str = Field(min_length=1)
    test: str = Field(pattern=r"def check\(")
    entry_point: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    canonical_solution: str = ""


class _Mbpp(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    test_list: tuple[str, ...] = Field(min_length=1)
    test_imports: tuple[str, ...] = ()
    prompt: str = ""
    text: str = ""
    """Full rows have this instead of `prompt`."""
    test_setup_code: str = ""
    code: str = ""


def humaneval_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """`problem`, `evaluator` and `solution`. Raises: ValidationError."""
    read = _HumanEval.model_validate(row)
    return {
        "problem": f"Complete the function `{read.entry_point}`.\n\n```python\n{read.prompt.strip()}\n```",
        "evaluator": _evaluator(read.prompt, f"{read.test}\n\ncheck({read.entry_point})\n"),
        "solution": _solution(read.prompt + read.canonical_solution if read.canonical_solution else ""),
    }


def mbpp_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """`problem`, `evaluator` and `solution`. Raises: ValidationError."""
    read = _Mbpp.model_validate(row)
    tests = "\n".join(read.test_list)
    asked = (read.prompt or read.text).strip()
    return {
        "problem": f"{asked}\n\nA function is asked for. It must pass these tests:\n\n```python\n{tests}\n```",
        "evaluator": _evaluator("\n".join([*read.test_imports, read.test_setup_code]), tests),
        "solution": _solution(read.code),
    }


def _solution(text: str) -> dict[str, Any] | None:
    return {"files": {"solution.py": text}} if text else None


def _evaluator(before: str, after: str) -> dict[str, Any]:
    program = resources.files("gangline.tasks.presets.in_sandbox").joinpath("asserts.py").read_text()
    tests = json.dumps({"before": before, "after": after, "seconds": _LIMIT_S})
    return {
        "strategy": "script",
        "refresh_runtime": True,
        "config": {
            "command": ["python3", "-I", f"{_FOLDER}/asserts.py"],
            "files": {f"{_FOLDER}/asserts.py": program, f"{_FOLDER}/tests.json": tests},
            "clear": [_FOLDER],
            "collect": ["solution.py"],
            "timeout_seconds": _LIMIT_S + 30,
        },
    }
