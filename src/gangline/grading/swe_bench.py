"""Evaluator `swe_bench`: runs hidden tests on the agent's patch in a clean runtime.

Only the agent's changes in the repository are graded. After its processes are gone, a patch is taken of its working
folder (`agent_patch.py`), kept as the artifact `patch.diff`, and applied in a clean runtime, except for files that
would run before the tests (`protected`). Then the files of the test patch replace any version of the agent's, and the
tests run. The reward is 1 if every test of `fail_to_pass` passes and every test of `pass_to_pass` still does, otherwise
0.

The code under test runs in the process of its tests, as in SWE-bench itself, so a patch can forge their results.

A patch that does not apply, is empty, or keeps tests from ending is the agent's fault. A test patch that does not apply
to the repository is ours.

Source: SWE-bench, "Can Language Models Resolve Real-World GitHub Issues?"; grading as in its harness 5.0.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gangline.agents.tools.in_sandbox.output import Output
from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.errors import EvaluatorError
from gangline.domain.sandbox import ExecResult, Sandbox
from gangline.domain.task_values import Seconds
from gangline.grading.agent_patch import (
    GIT_ENV,
    NO_CONFIG,
    Base,
    Patch,
    base_of,
    private_home,
    run,
    said,
    take_patch,
)
from gangline.grading.swe_bench_rows import PROTECTED, SweBenchRow, grading_of
from gangline.grading.untrusted.outcomes import Status
from gangline.grading.untrusted.patch_text import completed, names_of
from gangline.grading.untrusted.verdict_of_log import (
    MAX_SHOWN_TESTS,
    KeptLog,
    kept,
    unresolved,
    verdict,
    with_exit_line,
)
from gangline.settings.plugins import explain

_MAX_LOG_BYTES = 64 << 20
_MAX_SHOWN_CHARS = 2_000
_ARTIFACT = "patch.diff"
_EVAL_SCRIPT = "/tmp/gangline-eval.sh"
_RESTORE = """
base=$1; shift
for file do
  if git cat-file -e "$base:$file" 2>/dev/null; then git --literal-pathspecs checkout -q "$base" -- "$file"
  else rm -rf -- "$file"; fi || exit
done
"""
_BACK = """
base=$1; shift
git ls-files -z --deleted -- "$@" | xargs -0 -r git checkout -q "$base" --
"""


class SweBenchConfig(BaseModel):
    """Configuration of evaluator `swe_bench`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repo_dir: str = Field(default=".", min_length=1)
    """Folder of the repository, relative to the working folder or absolute inside the runtime."""
    patch_command: str | None = Field(default=None, min_length=1)
    """Command that prints the agent's patch, run by `sh -c` in the agent's working folder once its processes are gone.
    None: the changes in `repo_dir`. With it, only the clean runtime needs a repository in `repo_dir`.
    """
    instance: dict[str, Any] | None = None
    """A row of a SWE-bench style dataset (or its JSON, as a string). Grading settings not given here are read from
    it.
    """
    fail_to_pass: tuple[str, ...] = ()
    """Names of tests that must pass, as in the log."""
    pass_to_pass: tuple[str, ...] = ()
    """Names of tests that must still pass, or be skipped."""
    expected_statuses: dict[str, Status] = Field(default_factory=dict)
    """Replaces both, as in R2E-Gym: the log must contain exactly these tests with these statuses."""
    exit_code_line: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Replaces both, as in OpenSWE: the last line `NAME=CODE` of the log with this name decides, and 0 means
    resolved.
    """
    ignore_timings: bool = False
    """Ignore durations in names of tests, such as `[1.3 ms]`."""
    test_patch: str = ""
    """Applied before the tests run."""
    test_command: str | None = None
    """Runs the tests, in `repo_dir`, by `sh -c`."""
    eval_script: str | None = None
    """Replaces both: a dataset's own bash script, which applies the test patch and runs the tests."""
    log_parser: str = "pytest"
    """`pytest`, `unittest`, `r2e`, `status_lines` (lines `PASSED NAME`, also FAILED, ERROR and SKIPPED), or the name of
    a parser of the `swebench` package, which must then be installed on the node.
    """
    timeout_seconds: Seconds = 1800
    """Time limit of the tests in seconds."""
    max_patch_bytes: int = Field(default=16 << 20, gt=0)
    protected: tuple[str, ...] = PROTECTED
    """Names, with `*`, of files kept as in the repository even if the agent's patch changes them, because they run
    before the tests or could replace them. `reward_details.not_applied` lists such files of the patch.
    """

    @model_validator(mode="before")
    @classmethod
    def _read_instance(cls, given: Any) -> Any:
        """Raises: ValueError, InvalidRequest if the row cannot be graded."""
        own = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        if (instance := own.get("instance")) is None:
            return cast("Any", given)
        try:
            row = json.loads(instance) if isinstance(instance, str) else instance
            read = grading_of(
                SweBenchRow.model_validate(row),
                test_command=own.get("test_command"),
                log_parser=own.get("log_parser"),
            )
        except ValidationError as error:
            raise ValueError(f"instance: {explain(error)}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"instance: neither an object nor JSON of one: {error}") from error
        return read | own | {"instance": row}

    @model_validator(mode="after")
    def _runs_something(self) -> SweBenchConfig:
        if bool(self.fail_to_pass) + bool(self.expected_statuses) + (self.exit_code_line is not None) != 1:
            raise ValueError("give one of `fail_to_pass`, `expected_statuses` and `exit_code_line`")
        if (self.test_command is None) == (self.eval_script is None):
            raise ValueError("give either `test_command` or `eval_script`")
        if self.eval_script is not None and self.test_patch:
            raise ValueError("`eval_script` brings its own test patch: leave out `test_patch`")
        return self


class SweBenchEvaluator:
    """Applies the agent's changes and the hidden tests, and runs the tests."""

    name: ClassVar[str] = "swe_bench"
    Config: ClassVar[type[BaseModel]] = SweBenchConfig
    grades_clean: ClassVar[bool] = True
    is_controlled: ClassVar[bool] = True

    def __init__(self, config: SweBenchConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError if the clean runtime has no such repository, the agent's changes cannot be read, or
        the test patch does not apply.
        """
        await context.runtime.kill()
        clean = await context.fresh_runtime()
        base = await base_of(clean, self._config.repo_dir)
        patch, why = await self._patch(context, clean, base)
        context.artifacts[_ARTIFACT] = patch.data
        details: dict[str, Any] = {
            "patch": patch.data.decode(errors="replace")[:_MAX_SHOWN_CHARS],
            "patch_bytes": len(patch.data),
        }
        if patch.left_out:
            details["left_out"] = patch.left_out
        if not patch.is_whole:
            context.artifacts[f"{_ARTIFACT}.cut"] = f"The first {len(patch.data)} bytes are kept.\n".encode()
            details["patch_truncated"] = True
            why = f"the agent's patch is longer than {self._config.max_patch_bytes} bytes"
        if not context.is_control:
            if why is None and not patch.data.strip():
                why = "the agent changed nothing"
            if why is None:
                why = await self._apply(clean, patch.data, base.commit, details)
            if why is not None:
                return unresolved(why, details)
        await self._bring_tests(clean, base.commit)
        return await verdict(self._config, *await self._run_tests(clean), details)

    async def _git(self, runtime: Sandbox, command: list[str], **how: Any) -> ExecResult:
        """Run in the repository's folder. Raises: EvaluatorError on a timeout."""
        return await run(runtime, command, cwd=self._config.repo_dir, **how)

    async def _patch(self, context: EvaluationContext, clean: Sandbox, base: Base) -> tuple[Patch, str | None]:
        """The agent's changes since `base`, and the reason not to grade them, if any.

        Raises: EvaluatorError if they cannot be determined, or that takes too long.
        """
        if _ARTIFACT in context.kept:
            return Patch(context.kept[_ARTIFACT], True, ""), None
        runtime, limit, own = context.runtime, self._config.max_patch_bytes, self._config.patch_command
        if own is None:
            return await take_patch(runtime, clean, self._config.repo_dir, base, limit), None
        env = NO_CONFIG | {"HOME": await private_home(runtime)}
        result = await run(runtime, ["sh", "-c", own], cwd=None, env=env, limit=limit)
        why = None if result.ok else f"the patch command failed with exit code {result.exit_code}: {said(result)}"
        patch = completed(result.stdout.decode(errors="surrogateescape")).encode(errors="surrogateescape")
        return Patch(result.stdout if result.truncated else patch, not result.truncated, ""), why

    async def _apply(self, clean: Sandbox, patch: bytes, base: str, details: dict[str, Any]) -> str | None:
        """Returns why it does not apply, or None."""
        patterns = [pattern for name in self._config.protected for pattern in (name, f"*/{name}")]
        excluded = [f"--exclude={pattern}" for pattern in patterns]
        applied = await self._git(clean, ["git", "apply", "--whitespace=nowarn", *excluded, "-"], stdin=patch)
        if not applied.ok:
            return f"the agent's patch does not apply: {said(applied)}"
        back = await self._git(clean, ["sh", "-c", _BACK, "sh", base, *patterns])  # restores renamed files
        if not back.ok:
            raise EvaluatorError(f"protected files cannot be brought back: {said(back)}")
        touched = names_of(patch.decode(errors="replace"))
        names = [name for name in touched if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if names:
            details["not_applied"] = names[:MAX_SHOWN_TESTS]
        return None

    async def _bring_tests(self, runtime: Sandbox, base: str) -> None:
        patch = completed(self._config.test_patch)
        if not patch:
            return
        restored = await self._git(runtime, ["sh", "-c", _RESTORE, "sh", base, *names_of(patch)])
        applied = await self._git(
            runtime, ["git", "apply", "--whitespace=nowarn", "-"], stdin=patch.encode(errors="surrogateescape")
        )
        if not (restored.ok and applied.ok):
            raise EvaluatorError(f"the test patch does not apply to {base[:12]}: {said(restored)} {said(applied)}")

    async def _run_tests(self, runtime: Sandbox) -> tuple[ExecResult, KeptLog]:
        config, output = self._config, Output(_MAX_LOG_BYTES)
        if config.eval_script is not None:
            await runtime.upload(_EVAL_SCRIPT, with_exit_line(config.eval_script).encode())
        command = config.test_command or f"bash {_EVAL_SCRIPT}"
        ended = await runtime.exec(
            f"exec 2>&1\n{command}",
            cwd=self._config.repo_dir,
            env=GIT_ENV,
            timeout_s=config.timeout_seconds,
            on_output=lambda _stream, piece: output.add(piece),
            max_output_bytes=1,
        )
        return ended, kept(output)
