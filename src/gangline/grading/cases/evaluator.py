"""Evaluator `cases`: runs the agent's program on hidden inputs and compares its outputs with the expected ones.

The program runs in a clean runtime, once per case. Expected outputs and the comparison never leave the node: the
program receives one input at a time and returns an output, so there is nothing it could read, forge or disable. It can
only crash or confuse itself, which fails its cases. All processes are killed between cases.

A case is standard input and output, or arguments and result of a function (`function`). A driver in the program's
process calls the function and returns its result over a stream that the program's prints do not reach.

Failures of the agent count as failed cases: no program, a failed build, wrong or too much output, a crash, too much
time or memory. A clean runtime without the program's interpreter is our failure: EvaluatorError.

The rules for comparing outputs all take linear time.
"""

from __future__ import annotations

import json
import math
import re
import time
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.errors import CallerError, EvaluatorError
from gangline.domain.sandbox import ExecResult, Sandbox
from gangline.domain.task_values import Argv, FilePath, Seconds

_ARTIFACT = "cases.json"
_MAX_KEPT_CHARS = 16_384
"""Characters of output, input and error that the artifact keeps per case."""
_MAX_SHOWN_CASES = 20
_CHECK_TIMEOUT_S = 60.0
_LIMITED = 'ulimit -c 0; ulimit -v "$1" || exit 126; shift; exec "$@"'
Status = Literal["passed", "wrong", "crashed", "timed_out", "too_much_output", "not_run"]

_DRIVER = r"""
import importlib.util, json, os, sys
out = os.dup(1)
os.dup2(2, 1)
path, name = sys.argv[1:]
arguments = json.load(sys.stdin)
sys.path.insert(0, os.getcwd())
spec = importlib.util.spec_from_file_location("solution", path)
module = importlib.util.module_from_spec(spec)
sys.modules["solution"] = module
spec.loader.exec_module(module)
owner = getattr(module, "Solution", None)
function = getattr(owner() if hasattr(owner, name) else module, name)
data = json.dumps(function(*arguments)).encode()
while data:
    data = data[os.write(out, data):]
"""

Rule = Literal["exact", "trimmed", "tokens", "floats", "lines"]
"""`exact`: every byte. `trimmed`: lines without trailing whitespace, and without empty lines at the end. `tokens`:
words separated by whitespace. `floats`: words, where numbers may differ by the tolerance, whole numbers only by the
absolute one: by the relative one, 10000001 would be 10000000. `lines`: lines without whitespace around them, where a
line of numbers may write the same values otherwise.
"""
_WHOLE = re.compile(r"[+-]?[0-9]+")


def same_output(rule: Rule, expected: str, found: bytes, tolerance: float) -> bool:
    """tolerance: absolute and relative, for `floats`."""
    if rule == "exact":
        return expected.encode() == found
    text = found.decode(errors="replace")
    if rule == "trimmed":
        return _trimmed(expected) == _trimmed(text)
    if rule == "lines":
        ours, theirs = expected.strip().split("\n"), text.strip().split("\n")
        return len(ours) == len(theirs) and all(map(_is_same_line, ours, theirs))
    words, others = expected.split(), text.split()
    if rule == "tokens" or words == others:
        return words == others
    return len(words) == len(others) and all(
        _near(word, other, tolerance) for word, other in zip(words, others, strict=True)
    )


def same_value(rule: Rule, expected: Any, found: Any, tolerance: float) -> bool:
    """Whether two JSON values are equal. With `floats`, numbers may differ by the tolerance. Booleans are not
    numbers, except with `lines`, which compares as Python does.
    """
    if rule == "lines":
        return bool(expected == found)
    if isinstance(expected, list) and isinstance(found, list):
        ours, theirs = cast("list[Any]", expected), cast("list[Any]", found)
        return len(ours) == len(theirs) and all(
            same_value(rule, one, other, tolerance) for one, other in zip(ours, theirs, strict=True)
        )
    if isinstance(expected, dict) and isinstance(found, dict):
        ours, theirs = cast("dict[str, Any]", expected), cast("dict[str, Any]", found)
        return ours.keys() == theirs.keys() and all(
            same_value(rule, ours[name], theirs[name], tolerance) for name in ours
        )
    if isinstance(expected, bool) or isinstance(found, bool):
        return expected is found
    if rule == "floats" and isinstance(expected, int | float) and isinstance(found, int | float):
        return _are_near(expected, found, tolerance)
    return bool(expected == found)


def _trimmed(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n").split("\n")


def _is_same_line(line: str, other: str) -> bool:
    """Source: LiveCodeBench 28fef95, `grade_stdio`."""
    if line.strip() == other.strip():
        return True
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(word) for word in other.split()]
    except InvalidOperation:
        return False


def _near(word: str, other: str, tolerance: float) -> bool:
    if word == other:
        return True
    try:
        if _WHOLE.fullmatch(word) and _WHOLE.fullmatch(other):
            return abs(Decimal(word) - Decimal(other)) <= tolerance
        return _are_near(float(word), float(other), tolerance)
    except (ValueError, ArithmeticError):
        return False


def _are_near(expected: float, found: float, tolerance: float) -> bool:
    if isinstance(expected, int) and isinstance(found, int):
        return abs(expected - found) <= tolerance
    try:
        return math.isclose(expected, found, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond the range of floats
        return expected == found


class Case(BaseModel):
    """One input and its expected output. `function` decides which fields are required."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    input: str | None = None
    """Standard input."""
    output: str | None = None
    """Expected standard output."""
    arguments: list[Any] | None = None
    """Positional arguments of the function, as JSON."""
    result: Any = None
    """Expected result, as JSON; a tuple is a list."""
    weight: float = Field(default=1.0, gt=0)


class CasesConfig(BaseModel):
    """Configuration of evaluator `cases`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cases: Annotated[tuple[Case, ...], Field(min_length=1, max_length=10_000)]
    solution: FilePath = "solution.py"
    """The agent's program file, relative to its working folder."""
    collect: tuple[FilePath, ...] = ()
    """Further files of the agent that the program needs. Missing files are skipped."""
    command: Argv | None = None
    """Command that runs the program in the working folder. None: `python3` and the solution."""
    build: Argv | None = None
    """Command run once before the cases, such as a compiler. If it fails, all cases fail."""
    function: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of a Python function of the solution, or of a method of its class `Solution`. None: cases are standard input
    and output."""
    compare: Rule = "trimmed"
    """How outputs are compared. Results of functions are compared as JSON values, with the tolerance for `floats`."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Absolute and relative difference that `floats` allows; of two whole numbers only the absolute one."""
    partial: bool = False
    """The reward is the weight of the passed cases divided by the total weight. Otherwise it is 1 if all cases pass and
    0 if one fails, and the cases after the first failure do not run.
    """
    case_timeout_seconds: Seconds = 10
    case_memory_bytes: int = Field(default=1 << 30, ge=16 << 20, lt=2**63)
    """Address space of each process of a case."""
    timeout_seconds: Seconds = 240
    """Time for the build and all cases. Cases not reached in that time fail."""
    max_output_bytes: int = Field(default=1 << 20, gt=0)
    """Output limit of one case; more fails it. At least twice what the case expects."""
    max_solution_bytes: int = Field(default=4 << 20, gt=0)
    """Maximum bytes of the solution and of each collected file."""

    @model_validator(mode="after")
    def _cases_fit(self) -> Self:
        wanted, other = (
            (("input", "output"), ("arguments", "result"))
            if self.function is None
            else (("arguments", "result"), ("input", "output"))
        )
        for number, case in enumerate(self.cases):
            missing = [name for name in wanted if name not in case.model_fields_set]
            foreign = [name for name in other if name in case.model_fields_set]
            if missing or foreign:
                kind = "standard input and output" if self.function is None else "a function"
                raise ValueError(f"cases.{number}: a case of {kind} has {' and '.join(wanted)}, and no other fields")
        if self.function is not None and self.command is not None:
            raise ValueError("`function` is called by python3: leave out `command`")
        return self


class CasesEvaluator:
    """Runs the program on each case and compares the outputs on the node."""

    name: ClassVar[str] = "cases"
    Config: ClassVar[type[BaseModel]] = CasesConfig
    grades_clean: ClassVar[bool] = True

    def __init__(self, config: CasesConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError if the clean runtime cannot run such a program."""
        config = self._config
        await context.runtime.kill()
        files, missing = await self._collected(context.runtime)
        details: dict[str, Any] = {"missing_files": missing} if missing else {}
        if config.solution not in files:
            return Reward(reward=0.0, details=details | {"why": "there is no program"})
        runtime = await context.fresh_runtime()
        await self._require_interpreter(runtime)
        for path, data in files.items():
            await runtime.upload(path, data)
        ends_at = time.monotonic() + config.timeout_seconds
        if config.build is not None:
            built = await runtime.exec(list(config.build), timeout_s=config.timeout_seconds)
            await runtime.kill()
            if not built.ok:
                output = (built.stderr or built.stdout).decode(errors="replace")[-2000:]
                return Reward(reward=0.0, details=details | {"why": "the build failed", "output": output})
        found = await self._run_all(runtime, ends_at)
        context.artifacts[_ARTIFACT] = json.dumps(found, indent=1).encode()
        return self._graded(found, details)

    async def _collected(self, runtime: Sandbox) -> tuple[dict[str, bytes], list[str]]:
        files: dict[str, bytes] = {}
        missing: list[str] = []
        for path in (self._config.solution, *self._config.collect):
            try:
                files[path] = await runtime.download(path, max_bytes=self._config.max_solution_bytes)
            except CallerError as error:  # no such file, too large, a link: caused by the agent
                missing.append(f"{path}: {error.message}")
        return files, missing

    async def _require_interpreter(self, runtime: Sandbox) -> None:
        """Raises: EvaluatorError."""
        program = (self._config.build or self._config.command or ("python3",))[0]
        if "/" in program:
            return
        found = await runtime.exec(["sh", "-c", 'command -v -- "$1"', "sh", program], timeout_s=_CHECK_TIMEOUT_S)
        if not found.ok:
            raise EvaluatorError(f"the clean runtime has no program {program!r}, which the cases need")

    async def _run_all(self, runtime: Sandbox, ends_at: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        failed = False
        for case in self._config.cases:
            left_s = ends_at - time.monotonic()
            if left_s <= 0 or (failed and not self._config.partial):
                found.append({"status": "not_run"})
                continue
            result = await self._run(runtime, case, min(left_s, self._config.case_timeout_seconds))
            await runtime.kill()
            status = self._status(case, result)
            failed |= status != "passed"
            found.append(_record(case, status, result))
        return found

    async def _run(self, runtime: Sandbox, case: Case, timeout_s: float) -> ExecResult:
        config = self._config
        if config.function is not None:
            command = ("python3", "-I", "-c", _DRIVER, config.solution, config.function)
            stdin = json.dumps(case.arguments).encode()
        else:
            command = config.command or ("python3", config.solution)
            stdin = (case.input or "").encode()
        return await runtime.exec(
            ["sh", "-c", _LIMITED, "sh", str(config.case_memory_bytes >> 10), *command],
            stdin=stdin,
            timeout_s=timeout_s,
            max_output_bytes=_max_output_bytes(config, case),
        )

    def _status(self, case: Case, result: ExecResult) -> Status:
        config = self._config
        if result.timed_out:
            return "timed_out"
        if not result.ok:
            return "crashed"
        if len(result.stdout) >= _max_output_bytes(config, case):
            return "too_much_output"
        if config.function is None:
            is_same = same_output(config.compare, case.output or "", result.stdout, config.tolerance)
        else:
            try:
                value = json.loads(result.stdout)
                is_same = same_value(config.compare, case.result, value, config.tolerance)
            except (ValueError, RecursionError):
                return "crashed"
        return "passed" if is_same else "wrong"

    def _graded(self, found: list[dict[str, Any]], details: dict[str, Any]) -> Reward:
        weights = [case.weight for case in self._config.cases]
        passed = [one["status"] == "passed" for one in found]
        share = sum(weight for weight, ok in zip(weights, passed, strict=True) if ok) / sum(weights)
        failures = [{"case": number, "status": one["status"]} for number, one in enumerate(found) if not passed[number]]
        details |= {"passed": f"{sum(passed)}/{len(passed)}", "failures": failures[:_MAX_SHOWN_CASES]}
        return Reward(reward=share if self._config.partial else float(all(passed)), details=details)


def _record(case: Case, status: Status, result: ExecResult) -> dict[str, Any]:
    """The evidence of one case. Truncated text is marked as such."""
    asked = case.model_dump(exclude_unset=True, exclude={"weight"})
    return {
        "status": status,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "duration_s": round(result.duration_s, 3),
        "stdout": _kept(result.stdout.decode(errors="replace")),
        "stderr": _kept(result.stderr.decode(errors="replace")),
        **{name: _kept(value) if isinstance(value, str) else value for name, value in asked.items()},
    }


def _kept(text: str) -> str:
    left_out = len(text) - _MAX_KEPT_CHARS
    return text if left_out <= 0 else f"{text[:_MAX_KEPT_CHARS]}\n[{left_out} characters left out]"


def _max_output_bytes(config: CasesConfig, case: Case) -> int:
    """What is expected always fits, however it is spaced."""
    wanted = (case.output or "") if config.function is None else json.dumps(case.result)
    return max(config.max_output_bytes, 2 * len(wanted.encode()) + 4096)
