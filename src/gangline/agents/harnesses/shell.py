"""Harness `shell`: any command is an agent program.

The command finds all it needs in its environment or through placeholders (both of `harnesses/shared/environment.py`),
and has done its work when it exits with an expected code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gangline.agents.harnesses.shared.environment import (
    fill,
    fits_argument,
    mentions,
    provider_environment,
    shell_text,
    values_of,
)
from gangline.agents.harnesses.shared.evidence import describe_exit
from gangline.agents.harnesses.shared.missing_module import advice_on_import
from gangline.domain.contracts import Capability, HarnessContext, HarnessVerdict, Launch
from gangline.domain.errors import HarnessError
from gangline.domain.sandbox import ExecResult
from gangline.domain.task_values import Argv, Line, file_path


def _inside_workdir(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} is not a path inside the working folder")
    return name


def _shell_checked(command: str) -> str:
    shell_text(command)
    return command


_FileName = Annotated[str, AfterValidator(_inside_workdir), AfterValidator(file_path)]
_ShellCommand = Annotated[Line, AfterValidator(_shell_checked)]


class ShellConfig(BaseModel):
    """Settings of harness `shell`.

    `{instruction}`, `{model}`, `{base_url}`, `{api_key}`, `{session_id}` and `{max_turns}` are replaced in `command`,
    `stdin` and `file_templates`; other braces are kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: _ShellCommand | Argv
    """A string is run by `sh -c` (placeholders are quoted for you); a list is a program and its arguments."""
    stdin: str | None = None
    """The command's standard input; None: empty."""
    files: dict[_FileName, str] = Field(default_factory=dict)
    """Path in the working folder -> content, written unchanged before the command starts."""
    file_templates: dict[_FileName, str] = Field(default_factory=dict)
    """The same with placeholders replaced, for programs that read URL and key from a configuration file."""
    ok_exit_codes: tuple[int, ...] = (0,)
    """Exit codes that mean success; any other ends the session with `agent_error`."""


class ShellHarness:
    """Runs `config.command` in the runtime's working folder."""

    name: ClassVar[str] = "shell"
    takes: ClassVar[frozenset[Capability]] = frozenset({"environments"})
    Config: ClassVar[type[BaseModel]] = ShellConfig

    def __init__(self, config: ShellConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if the instruction does not fit the command line."""
        values = values_of(context)
        for path, content in self._config.files.items():
            await context.runtime.upload(path, content.encode())
        for path, template in self._config.file_templates.items():
            await context.runtime.upload(path, fill(template, values).encode())
        stdin = self._config.stdin
        return Launch(
            command=self._command(values),
            env=provider_environment(context),
            stdin=None if stdin is None else fill(stdin, values).encode(),
        )

    def judge(self, result: ExecResult) -> HarnessVerdict:
        if not result.timed_out and result.exit_code in self._config.ok_exit_codes:
            return HarnessVerdict(True)
        advice = advice_on_import(result.stderr)
        return HarnessVerdict(False, f"{describe_exit(result)}. {advice}" if advice else describe_exit(result))

    def _command(self, values: Mapping[str, str]) -> str | list[str]:
        command = self._config.command
        words = [command] if isinstance(command, str) else command
        if any(mentions(word, "instruction") for word in words) and not fits_argument(values["instruction"]):
            raise HarnessError(
                "the instruction holds a NUL or is too long for a command line: set `stdin` to '{instruction}', or "
                "write it through `file_templates`, and take {instruction} out of `command`"
            )
        return shell_text(command) if isinstance(command, str) else [fill(word, values) for word in command]
