"""Columns of Eurus-2-RL-Data, for its rows with `ability: code`; and of LiveCodeBench, HumanEval and MBPP, which have
readers of their own.

`reward_model.ground_truth` is JSON: `inputs` and `outputs`, one pair per test, and `fn_name` if a function is called;
or an object, also with `input` and `output` (CodeContests); or a list of `{input, output}` (LiveCodeBench). Without
`fn_name` they are standard input and output, each a text or a list of lines. With `fn_name` an input is a list of
arguments, or a text with one argument as JSON per line, and an output is a value or its JSON.

Columns of HumanEval (`prompt`, `test`, `entry_point`) and of MBPP (`test_list`), whose tests are Python code.

The tests run in the solution's process, as in the benchmarks' own runners (`in_sandbox/asserts.py`).

Sources: human-eval 463c980, `execution.py`; MBPP's README, whose prompt shows the tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gangline.domain.errors import InvalidRequest
from gangline.settings.plugins import explain
from gangline.tasks.presets.rows.livecodebench import PRIVATE, LiveCodeBenchRow, livecodebench_evaluator
from gangline.tasks.presets.rows.unsuitable import RowUnsuitable
from gangline.tasks.presets.rows.verl import VerlRow, question_of

_WHERE = "reward_model.ground_truth"
_ASKS_FOR_TEXT = "Write Python code to solve the problem. Present the code in"
"""Start of the final part of Eurus-2's prompts, which asks for the program in the answer."""


class _Tests(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    inputs: list[Any] = Field(min_length=1)
    outputs: list[Any] = Field(min_length=1)
    fn_name: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")


def code_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """`problem`, `cases` for evaluator `cases`, and `function`, which is null for standard input and output; or
    `evaluator`, which replaces the template's, and `solution`.

    Raises: ValidationError, InvalidRequest, RowUnsuitable.
    """
    if "entry_point" in row and "test" in row:
        return humaneval_fields(row)
    if "test_list" in row:
        return mbpp_fields(row)
    if PRIVATE in row:
        published = LiveCodeBenchRow.model_validate(row)
        fields = _fields(published.problem(), _tests(published.tests()))
        return fields | {"evaluator": livecodebench_evaluator(fields["cases"], fields["function"])}
    verl = VerlRow.model_validate(row)
    if verl.ability not in (None, "code"):
        raise RowUnsuitable(f"ability: {verl.ability!r} is not `code`")
    problem = question_of(verl).partition(_ASKS_FOR_TEXT)[0].rstrip()
    return _fields(problem, _tests(verl.reward_model.ground_truth))


def _fields(problem: str, tests: _Tests) -> dict[str, Any]:
    if len(tests.inputs) != len(tests.outputs):
        raise InvalidRequest(f"{_WHERE}: has {len(tests.inputs)} inputs and {len(tests.outputs)} outputs")
    if tests.fn_name is not None:
        problem += f"\n\nThe tests call the function `{tests.fn_name}` of the file."
    case = _standard_case if tests.fn_name is None else _function_case
    pairs = enumerate(zip(tests.inputs, tests.outputs, strict=True))
    return {
        "problem": problem,
        "cases": [case(number, given, wanted) for number, (given, wanted) in pairs],
        "function": tests.fn_name,
    }


def _tests(given: Any) -> _Tests:
    try:
        found: Any = json.loads(given) if isinstance(given, str) else given
        if isinstance(found, list):  # LiveCodeBench: one test per entry
            found = _of_pairs(cast("list[Any]", found))
        elif isinstance(found, dict) and "input" in found:  # CodeContests
            named = cast("dict[str, Any]", found)
            return _Tests.model_validate({"inputs": named["input"], "outputs": named.get("output")})
        return _Tests.model_validate(found)
    except ValidationError as error:
        raise InvalidRequest(f"{_WHERE}: {explain(error)}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{_WHERE}: is not valid JSON: {error}") from error


def _of_pairs(tests: list[Any]) -> dict[str, Any]:
    if not all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests):
        raise RowUnsuitable(f"{_WHERE}: is a list, but not of tests with input and output")
    if any(test.get("testtype") == "functional" for test in tests):
        raise RowUnsuitable(f"{_WHERE}: calls a function, and does not name it: give `inputs`, `outputs` and `fn_name`")
    return {f"{name}s": [test[name] for test in tests] for name in ("input", "output")}


def _standard_case(number: int, given: Any, wanted: Any) -> dict[str, Any]:
    return {"input": _lines(number, "inputs", given), "output": _lines(number, "outputs", wanted)}


def _lines(number: int, name: str, value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):  # pyright: ignore[reportUnknownVariableType]
        return "\n".join(value)  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(value, str):
        raise InvalidRequest(f"{_WHERE}: {name}.{number} is neither a text nor a list of lines")
    return value


def _function_case(number: int, given: Any, wanted: Any) -> dict[str, Any]:
    try:
        arguments = _arguments(given) if isinstance(given, str) else given
        result = json.loads(wanted) if isinstance(wanted, str) else wanted
    except ValueError as error:
        raise InvalidRequest(f"{_WHERE}: test {number} of a function is not valid JSON: {error}") from error
    if not isinstance(arguments, list):
        raise InvalidRequest(f"{_WHERE}: inputs.{number} is not a list of arguments")
    return {"arguments": arguments, "result": result}


def _arguments(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


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
