"""Evaluator `script`: a command writes the reward.

With `refresh_runtime` it runs in a clean runtime, prepared like the agent's, that the agent never touched; only the
files of `collect` come over. Hidden files arrive after the agent's processes are gone, and replace whatever lies at
their place. In the agent's own runtime (`refresh_runtime` false) a grader must distrust what else lies there.

The command finds `.gangline/trajectory.json` (see `transcript.py`), and must leave one finite number in its reward
file. If it does not, the session has no reward: EvaluatorError, never 0.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, ClassVar, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.contracts import EvaluationContext, ExecResult, Reward, RuntimeHandle
from gangline.domain.errors import CallerError, EvaluatorError, NotFound
from gangline.evaluators.transcript import transcript

__all__ = ["ScriptConfig", "ScriptEvaluator"]

_FOLDER = ".gangline"
_TRAJECTORY = f"{_FOLDER}/trajectory.json"
_DEFAULT_REWARD_FILES = ("reward.json", "reward.txt")
_MAX_REWARD_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 2_000


class ScriptConfig(BaseModel):
    """Configuration of evaluator `script`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    command: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)]
    """Run in the working folder; a string goes to `sh -c`. A non-zero exit code is a broken grader, not a low
    reward."""
    files: dict[str, str] = Field(default_factory=dict)
    """Path -> content of hidden files, such as tests: written when the agent can no longer see them."""
    collect: tuple[str, ...] = ()
    """Files of the agent's runtime that are copied into the clean one; those that do not exist are left out."""
    reward_file: str | None = None
    """Where the command writes a number, or JSON `{"reward": number, ...}` whose other fields are kept as details; None
    is `reward.json`, or else `reward.txt`."""
    env: dict[str, str] = Field(default_factory=dict)
    timeout_seconds: float = Field(default=120, gt=0)
    max_collect_bytes: int = Field(default=16 << 20, gt=0)
    """For each collected file."""


class ScriptEvaluator:
    """Runs `config.command` and reads what it wrote."""

    name: ClassVar[str] = "script"
    Config: ClassVar[type[BaseModel]] = ScriptConfig

    def __init__(self, config: ScriptConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError when the command fails, is not done in time, or leaves no finite number."""
        runtime, missing = await self._grading_runtime(context)
        await self._write_inputs(runtime, context)
        result = await runtime.exec(
            self._config.command,
            env={"GANGLINE_TRAJECTORY": _TRAJECTORY, **self._config.env},
            timeout_s=self._config.timeout_seconds,
        )
        if not result.ok:
            raise EvaluatorError(f"the grading command {_how_it_ended(result, self._config.timeout_seconds)}")
        reward, details = await self._read_reward(runtime)
        details |= {"graded_in": "clean runtime" if context.refresh_runtime else "agent's runtime"}
        if missing:
            details["missing_files"] = missing
        if result.stdout or result.stderr:
            details["output"] = _tail(result.stdout + result.stderr)
        return Reward(reward=reward, details=details)

    async def _grading_runtime(self, context: EvaluationContext) -> tuple[RuntimeHandle, list[str]]:
        """The runtime to grade in, with the collected files, and the names of those that could not be collected."""
        if not context.refresh_runtime:
            await context.runtime.kill()  # nothing of the agent's may watch hidden files arrive
            return context.runtime, []
        collected, missing = await self._collect(context.runtime)
        runtime = await context.fresh_runtime()
        for path, data in collected.items():
            await runtime.upload(path, data)
        return runtime, missing

    async def _collect(self, runtime: RuntimeHandle) -> tuple[dict[str, bytes], list[str]]:
        collected: dict[str, bytes] = {}
        missing: list[str] = []
        for path in self._config.collect:
            try:
                collected[path] = await runtime.download(path, max_bytes=self._config.max_collect_bytes)
            except CallerError as error:  # no such file, too large, a link: the agent's doing
                missing.append(f"{path}: {error.message}")
        return collected, missing

    async def _write_inputs(self, runtime: RuntimeHandle, context: EvaluationContext) -> None:
        """Clear the places of all inputs and of the reward, whatever lies there, and write the inputs."""
        places = [_FOLDER, *self._reward_files(), *self._config.files]
        cleared = await runtime.exec(["rm", "-rf", "--", *places], timeout_s=self._config.timeout_seconds)
        if not cleared.ok:
            raise EvaluatorError(
                f"could not clear the grader's places: rm {_how_it_ended(cleared, self._config.timeout_seconds)}"
            )
        await runtime.upload(_TRAJECTORY, msgspec.json.encode(transcript(context)))
        for path, content in self._config.files.items():
            await runtime.upload(path, content.encode())

    async def _read_reward(self, runtime: RuntimeHandle) -> tuple[float, dict[str, Any]]:
        for path in self._reward_files():
            try:
                return _parse_reward(path, await runtime.download(path, max_bytes=_MAX_REWARD_BYTES))
            except NotFound:
                continue
            except CallerError as error:
                raise EvaluatorError(f"the grader's {path} cannot be read: {error.message}") from error
        raise EvaluatorError(f"the grading command ended well but wrote no {' or '.join(self._reward_files())}")

    def _reward_files(self) -> tuple[str, ...]:
        return (self._config.reward_file,) if self._config.reward_file else _DEFAULT_REWARD_FILES


def _parse_reward(path: str, data: bytes) -> tuple[float, dict[str, Any]]:
    """Raises: EvaluatorError."""
    text = data.decode(errors="replace").strip()
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise EvaluatorError(f"the grader's {path} holds neither a number nor JSON: {text[:200]!r}") from None
    details: dict[str, Any] = {}
    if isinstance(value, dict):
        details = dict(cast(dict[str, Any], value))
        value = details.pop("reward", None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise EvaluatorError(f"the grader's {path} holds no finite number as its reward: {text[:200]!r}")
    return float(value), details


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False


def _how_it_ended(result: ExecResult, timeout_s: float) -> str:
    if result.timed_out:
        return f"was not done in {timeout_s:g} s; output: {_tail(result.stdout + result.stderr)!r}"
    end = f"exited with {result.exit_code}" if result.signal is None else f"was killed by signal {result.signal}"
    return f"{end}; output: {_tail(result.stdout + result.stderr)!r}"


def _tail(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-_MAX_SHOWN_CHARS:]
