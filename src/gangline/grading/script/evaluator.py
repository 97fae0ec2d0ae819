"""Evaluator `script`: a command writes the reward.

With `refresh_runtime` it runs in a clean runtime, prepared like the agent's but never touched by the agent; only the
files of `collect` are copied over. Hidden files are written after the agent's processes are gone, and replace anything
in their place. In the agent's own runtime (`refresh_runtime` false) a grader must distrust all other files there.

The command can read `.gangline/trajectory.json` (see `transcript.py`), and must write one finite number to its reward
file. If it does not, that is an EvaluatorError, never 0; a control run shows whose failure it is. It has its own empty
HOME, because the agent's HOME may contain files that programs read at startup.

A control run grades files that this grader has graded before. If there are none, it grades nothing, and stand-ins for a
solution.

Most graders import or open the solution, and fail if it is missing or has invalid syntax. A control run only without
files would report them as broken. Either of the two shows that they work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.errors import CallerError, EvaluatorError, GanglineError, NotFound
from gangline.domain.sandbox import ExecResult, RuntimeUser, Sandbox
from gangline.domain.services import ServiceName
from gangline.domain.task import TextEncoding, decoded
from gangline.domain.task_values import AnyPath, Argv, Environment, FilePath, Line, Seconds, Size
from gangline.grading.script.collecting import (
    Archive,
    CollectCommand,
    Collected,
    collected,
    collected_of_services,
    run_commands,
)
from gangline.grading.solution_user import serving_solution
from gangline.grading.transcript import transcript
from gangline.grading.untrusted.graded_before import MAX_BYTES, GradedBefore

_FOLDER = ".gangline"
_TRAJECTORY = f"{_FOLDER}/trajectory.json"
_HOME = f"{_FOLDER}/home"
_MAX_REWARD_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 2_000
_MKDIR_TIMEOUT_S = 60.0

_TAR_TIMEOUT_S = 60.0
_TAR = 'tar -cf - --exclude=./.gangline . | head -c "$1"'

_MODULE = b"""
def _itself(*_args, **_kwargs):
    return _thing

class _Thing:
    __call__ = __getitem__ = __enter__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _itself
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _itself
    __neg__ = __pos__ = __abs__ = __round__ = __await__ = _itself
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda self, _other: False
    __ne__ = lambda self, _other: True
    __bool__ = lambda self: False
    __int__ = __index__ = __len__ = __hash__ = lambda self: 0
    __float__ = lambda self: 0.0
    __str__ = __repr__ = lambda self: ""
    __iter__ = lambda self: iter(())
    __exit__ = lambda self, *_error: None

    def __getattr__(self, name):
        return __getattr__(name)

_thing = _Thing()

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _thing
"""
"""A module that defines every name and gets every answer wrong."""


def stand_ins(paths: Iterable[str]) -> Collected:
    """Files for `paths` that are readable as their names suggest, and solve nothing."""
    kinds = {".py": _MODULE, ".json": b"{}"}
    return Collected(files={path: kinds.get(path[path.rfind(".") :], b"") for path in paths})


async def working_folder(runtime: Sandbox) -> Collected | None:
    """None if it is too large to be remembered, or unreadable."""
    command = ["sh", "-c", _TAR, "sh", str(MAX_BYTES)]
    try:
        taken = await runtime.exec(command, timeout_s=_TAR_TIMEOUT_S, max_output_bytes=MAX_BYTES)
    except GanglineError:
        return None
    is_whole = taken.ok and 0 < len(taken.stdout) < MAX_BYTES
    return Collected(archives={".": Archive(taken.stdout, ".")}) if is_whole else None


class HiddenFile(BaseModel):
    """A hidden file that is not plain text, or must be executable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    content: str
    encoding: TextEncoding = "utf-8"
    """How `content` encodes the bytes."""
    mode: int = Field(default=0o644, ge=0, le=0o777)

    @model_validator(mode="after")
    def _is_decodable(self) -> HiddenFile:
        decoded(self.content, self.encoding)
        return self


class ScriptConfig(BaseModel):
    """Configuration of evaluator `script`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Line | Argv
    """Run in the working folder; a string is passed to `sh -c`. A non-zero exit code means that grading failed, not a
    low reward: see `on_failure`.
    """
    separate: bool = False
    """Run the command as a separate user with its own HOME; relative paths of `files`, `clear` and `reward_file` are in
    that HOME. Processes of the solution's user cannot read it, write the reward or end the command, and
    `$GANGLINE_SOLUTION COMMAND...` runs a command as that user, in `$GANGLINE_WORKDIR`. Code that the command imports
    itself is not isolated. Needs a runtime with such a user, and `python3` in it.
    """
    files: dict[FilePath, str | HiddenFile] = Field(default_factory=dict)
    """Path -> content of hidden files, such as tests, which are written once the agent can no longer see them."""
    clear: tuple[AnyPath, ...] = ()
    """Folders to empty first, even if the agent filled them: the targets of hidden files, and the folder for the
    command's findings.
    """
    collect: tuple[FilePath, ...] = ()
    """The solution's files, copied from the agent's runtime into the clean one; missing files are skipped. List them
    even if grading in the agent's own runtime: if grading fails, a control run puts stand-ins there to show that the
    grader works.
    """
    collect_folders: dict[AnyPath, tuple[str, ...]] = Field(default_factory=dict)
    """Folders to copy in the same way, with modes and links -> patterns to exclude, as for `tar --exclude`. Both
    runtimes need `tar`.
    """
    collect_services: dict[ServiceName, dict[Annotated[str, Field(pattern=r"^/[^\x00]+$")], tuple[str, ...]]] = Field(
        default_factory=dict
    )
    """Services of the agent's runtime -> absolute paths of files and folders in their containers, copied to the same
    paths -> patterns to exclude.
    """
    collect_commands: tuple[CollectCommand, ...] = ()
    """Commands run first in the agent's runtime, after its processes are gone, to write files to collect. Failures are
    reported in the reward's details.
    """
    reward_file: FilePath | Annotated[tuple[FilePath, ...], Field(min_length=1)] = ("reward.json", "reward.txt")
    """Where the command writes a number, or JSON `{"reward": number, ...}`. Other fields are kept as details, except
    `trace_rewards` (trace id -> reward) and `turn_scores` (completion id -> score). Of several files, the first that
    exists is used.
    """
    env: Environment = Field(default_factory=dict)
    timeout_seconds: Seconds = 120
    max_collect_bytes: Size = 16 << 20
    """Limit for each collected file and folder."""


@dataclass(frozen=True)
class _Place:
    """Where a grader works, and as which user."""

    runtime: Sandbox
    user: RuntimeUser
    folder: str
    home: str

    def at(self, path: str) -> str:
        return str(PurePosixPath(self.folder, path))

    async def clear(self, path: str) -> None:
        """Raises: EvaluatorError."""
        try:
            await self.runtime.clear(self.at(path))
        except CallerError as error:
            raise EvaluatorError(f"could not clear the grader's {path}: {error.message}") from error

    async def make(self, folders: Sequence[str], user: RuntimeUser | None = None) -> None:
        """Raises: EvaluatorError."""
        made = await self.runtime.exec(
            ["mkdir", "-p", "--", *map(self.at, folders)], timeout_s=_MKDIR_TIMEOUT_S, user=user or self.user
        )
        if not made.ok:
            raise EvaluatorError(f"could not make the grader's folders: mkdir {_how_it_ended(made, _MKDIR_TIMEOUT_S)}")

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self.runtime.upload(self.at(path), data, mode=mode)


class ScriptEvaluator:
    """Runs `config.command` and reads its reward file."""

    name: ClassVar[str] = "script"
    Config: ClassVar[type[BaseModel]] = ScriptConfig
    grades_clean: ClassVar[bool] = True
    is_controlled: ClassVar[bool] = True

    def __init__(self, config: ScriptConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError if the command fails, times out, or leaves no finite number."""
        runtime, found, lacks = await self._grading_runtime(context)
        before = GradedBefore(context, self._config)
        if context.is_control:
            return await self._controlled(context, runtime, found, before)
        reward = await self._graded(context, runtime, lacks)
        if not before and (graded := found or await working_folder(runtime)) is not None:
            before.keep(msgspec.msgpack.encode(graded))
        return reward

    async def _controlled(
        self, context: EvaluationContext, runtime: Sandbox, found: Collected | None, before: GradedBefore
    ) -> Reward:
        """Grade another session's remembered files; if there are none, grade nothing and then stand-ins.

        Many graders return 0 for these two early, and break later, so they are weaker evidence than files graded
        before. Raises: EvaluatorError if none of them gets a reward.
        """
        data = before.get()
        remembered = None if data is None else msgspec.msgpack.decode(data, type=Collected)
        here = {} if found is None else found.files
        missing = [path for path in self._config.collect if path not in here]
        failure: EvaluatorError | None = None
        unsolved = [Collected(), stand_ins(missing)] if missing else [Collected()]
        for material in unsolved if remembered is None else [remembered]:
            await runtime.kill()
            await material.bring(runtime)
            try:
                return await self._graded(context, runtime, {})
            except EvaluatorError as error:
                failure = failure or error
        before.forget()
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame: a cycle that would keep the session's files in memory

    async def _graded(self, context: EvaluationContext, runtime: Sandbox, lacks: dict[str, list[str]]) -> Reward:
        """Raises: EvaluatorError."""
        place = self._place(runtime)
        await self._write_inputs(place, context)
        result = await self._run(place)
        if not result.ok:
            raise EvaluatorError(f"the grading command {_how_it_ended(result, self._config.timeout_seconds)}")
        found = await self._read_reward(place)
        details = found.details | {"graded_in": "clean runtime" if context.refresh_runtime else "agent's runtime"}
        details |= lacks
        if result.stdout or result.stderr:
            details["output"] = _tail(result.stdout + result.stderr)
        return msgspec.structs.replace(found, details=details)

    async def tidy(self, runtime: Sandbox) -> None:
        """Remove hidden files and findings. Raises: EvaluatorError."""
        place = self._place(runtime)
        if place.user == "grader":
            await place.clear(place.folder)
        for path in (f"{runtime.workdir}/{_FOLDER}", *self._own_paths()):
            await place.clear(path)

    async def _grading_runtime(
        self, context: EvaluationContext
    ) -> tuple[Sandbox, Collected | None, dict[str, list[str]]]:
        """The runtime to grade in, the files that were brought there, and details about those that could not be.

        The files are None if the runtime is the agent's.
        """
        config = self._config
        if not context.refresh_runtime:
            await context.runtime.kill()  # no process of the agent may see the hidden files arrive
        services = context.services_of(context.runtime)
        commands = config.collect_commands
        failed = await run_commands(context.runtime, commands, services) if commands else []
        if not context.refresh_runtime:
            return context.runtime, None, _given(failed_commands=failed)
        found = await collected(context.runtime, config.collect, config.collect_folders, config.max_collect_bytes)
        await collected_of_services(services, config.collect_services, config.max_collect_bytes, found)
        runtime = await context.fresh_runtime()
        missing = found.missing + await found.bring(runtime)
        return runtime, found, _given(failed_commands=failed, missing_files=missing)

    def _place(self, runtime: Sandbox) -> _Place:
        """Raises: EvaluatorError if the runtime has no user for a grader."""
        if not self._config.separate:
            return _Place(runtime, "agent", runtime.workdir, f"{runtime.workdir}/{_HOME}")
        if runtime.grader_home is None:
            raise EvaluatorError(
                "`separate` needs a runtime with a second user, which this one is not: run the node as root, with "
                "runtime `sandbox`, `apptainer`, `docker` or `podman`"
            )
        return _Place(runtime, "grader", runtime.grader_home, runtime.grader_home)

    async def _write_inputs(self, place: _Place, context: EvaluationContext) -> None:
        """Clear the places of all inputs and of the reward completely, then write the inputs."""
        if place.user == "grader":
            await place.clear(place.folder)
            await place.clear(f"{place.runtime.workdir}/{_FOLDER}")
            await place.make([f"{place.runtime.workdir}/{_FOLDER}"], user="agent")
        for path in self._own_paths():
            await place.clear(path)
        await place.make([_HOME, *self._config.clear])
        await place.write(_TRAJECTORY, msgspec.json.encode(transcript(context)))
        for path, given in self._config.files.items():
            file = HiddenFile(content=given) if isinstance(given, str) else given
            await place.write(path, decoded(file.content, file.encoding), mode=file.mode)

    async def _run(self, place: _Place) -> ExecResult:
        async with AsyncExitStack() as stack:
            own = {"HOME": place.home, "GANGLINE_TRAJECTORY": _TRAJECTORY}
            if place.user == "grader":
                own |= await stack.enter_async_context(serving_solution(place.runtime))
            return await place.runtime.exec(
                self._config.command,
                cwd=place.folder,
                env=own | self._config.env,
                timeout_s=self._config.timeout_seconds,
                user=place.user,
            )

    async def _read_reward(self, place: _Place) -> Reward:
        for path in self._reward_files():
            try:
                return _parse_reward(path, await place.runtime.download(place.at(path), max_bytes=_MAX_REWARD_BYTES))
            except NotFound:
                continue
            except CallerError as error:
                raise EvaluatorError(f"the grader's {path} cannot be read: {error.message}") from error
        raise EvaluatorError(f"the grading command ended well but wrote no {' or '.join(self._reward_files())}")

    def _own_paths(self) -> tuple[str, ...]:
        """Paths of its inputs and of the reward."""
        return (*self._config.clear, _FOLDER, *self._reward_files(), *self._config.files)

    def _reward_files(self) -> tuple[str, ...]:
        named = self._config.reward_file
        return (named,) if isinstance(named, str) else named


def _given(**lists: list[str]) -> dict[str, list[str]]:
    return {name: found for name, found in lists.items() if found}


_FORMS = 'Write a number, such as 0.5, or {"reward": 0.5}; 1 and 0 for true and false.'


def _parse_reward(path: str, data: bytes) -> Reward:
    """Raises: EvaluatorError."""
    text = data.decode("utf-8-sig", errors="replace").strip()
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise EvaluatorError(f"the grader's {path} holds neither a number nor JSON: {text[:200]!r}. {_FORMS}") from None
    details: dict[str, Any] = {}
    parts: dict[str, dict[str, float]] = {}
    if isinstance(value, dict):
        details = dict(cast(dict[str, Any], value))
        parts["values"] = {name: float(number) for name, number in details.items() if _is_number(number)}
        for field in ("trace_rewards", "turn_scores"):
            parts[field] = _numbers(path, field, details.pop(field, {}))
        value = details.pop("reward", None) if "reward" in details or len(details) != 1 else details.popitem()[1]
    if not _is_number(value):
        raise EvaluatorError(f"the grader's {path} holds no finite number as its reward: {text[:200]!r}. {_FORMS}")
    return Reward(reward=float(value), details=details, **parts)


def _numbers(path: str, field: str, value: Any) -> dict[str, float]:
    """Raises: EvaluatorError."""
    if not isinstance(value, dict) or not all(map(_is_number, cast("dict[str, Any]", value).values())):
        raise EvaluatorError(f"the grader's {path}: {field} must be an object of ids and finite numbers")
    return {name: float(number) for name, number in cast("dict[str, Any]", value).items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False


def _how_it_ended(result: ExecResult, timeout_s: float) -> str:
    if result.timed_out:
        return f"was not done in {timeout_s:g} s; output: {_tail(result.stdout + result.stderr)!r}"
    end = f"exited with {result.exit_code}" if result.signal is None else f"was killed by signal {result.signal}"
    end = f"was {result.memory_kill}" if result.memory_kill else end
    return f"{end}; output: {_tail(result.stdout + result.stderr)!r}"


def _tail(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-_MAX_SHOWN_CHARS:]
