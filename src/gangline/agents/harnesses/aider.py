"""Harness `aider`: the pair programmer of Python package `aider-chat`. It has no tools: the model writes edits as text.

aider rewrites its history at every turn: file contents, the repository map and a reminder of the rules move behind
earlier messages. So no call continues another one: each is a separate chain, with an exact context.

aider exits with 0 even if its model calls failed. Success is read from its local event log, which the launch command
writes to stderr. Its files are in the session's private HOME, except `.aider.tags.cache.v4` in the working folder,
which is written unless `map_tokens` is 0.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.harnesses.installation import Program, ProgramVersion, check_program
from gangline.agents.harnesses.shared.evidence import describe_exit, json_events, object_in
from gangline.agents.harnesses.shared.litellm import litellm_environment, litellm_model
from gangline.domain.contracts import HarnessContext, HarnessVerdict, Launch
from gangline.domain.sandbox import ExecResult

_PROGRAM = Program(
    harness="aider", command="aider", source="pypi", package="aider-chat", version="0.86.2", oldest=(3, 10)
)

_FOLDER = ".aider"
_EVENTS = f"{_FOLDER}/events.jsonl"
_CHAT = f"{_FOLDER}/chat.md"
_DONE = "Completed --message-file"
_ERROR = re.compile(r"^litellm\..*", re.MULTILINE)

# $1 is the event file; the rest is aider with its arguments.
_LAUNCH = """
events=$1; shift
"$@"; code=$?
cat "$events" >&2
exit $code
"""

_QUIET = (
    "--yes-always",
    "--no-stream",
    "--no-pretty",
    "--no-fancy-input",
    "--no-check-update",
    "--no-show-release-notes",
    "--no-show-model-warnings",
    "--no-analytics",
    "--no-gitignore",
    "--no-detect-urls",
    "--no-suggest-shell-commands",  # it would not run any: they need a confirmation that --yes-always does not give
)


class AiderConfig(BaseModel):
    """Settings of harness `aider`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: ProgramVersion = _PROGRAM.version
    """Required version; None: any."""
    edit_format: str | None = "diff"
    """Format of the model's edits: `diff`, `whole`, `udiff` ...; None: aider's default."""
    files: tuple[str, ...] = ()
    """Files, relative to the working folder, that are in the chat from the start. Others are added when they are
    mentioned.
    """
    git: bool = True
    """Whether aider uses git. A working folder without a repository gets one."""
    auto_commits: bool = True
    """Whether each edit is committed, with a message that the model writes in a separate call."""
    test_command: str | None = None
    """Run after each edit. If it fails, its output is the next message. aider tries three times."""
    map_tokens: int = Field(default=1024, ge=0)
    """Tokens of the repository map; 0: no map."""
    context_window: int = Field(default=32_768, gt=0)
    """Context size of the model in tokens; aider summarises old messages before it is full."""
    arguments: tuple[str, ...] = ()
    """Additional command-line arguments of aider."""


class AiderHarness:
    """Configures, starts and judges aider."""

    name: ClassVar[str] = "aider"
    Config: ClassVar[type[BaseModel]] = AiderConfig
    program: ClassVar[Program] = _PROGRAM
    logs: ClassVar[tuple[str, ...]] = (_EVENTS, _CHAT)

    def __init__(self, config: AiderConfig) -> None:
        self._config = config

    async def prepare(self, context: HarnessContext) -> Launch:
        """Raises: HarnessError if aider is missing, does not start, or has the wrong version."""
        runtime = context.runtime
        await check_program(runtime, self.program, self._config.version)
        home = runtime.home
        message, metadata = f"{home}/{_FOLDER}/message.txt", f"{home}/{_FOLDER}/models.json"
        await runtime.upload(message, _no_command(context.instruction).encode())
        await runtime.upload(metadata, json.dumps(self._metadata(litellm_model(context))).encode())
        command = ["aider", *self._arguments(litellm_model(context))]
        command += ["--message-file", message, "--model-metadata-file", metadata]
        command += ["--analytics-log", f"{home}/{_EVENTS}", "--chat-history-file", f"{home}/{_CHAT}"]
        command += ["--input-history-file", f"{home}/{_FOLDER}/input.txt", *self._config.arguments, "--"]
        command += self._config.files
        return Launch(
            command=["sh", "-c", _LAUNCH, "sh", f"{home}/{_EVENTS}", *command], env=litellm_environment(context)
        )

    def judge(self, result: ExecResult) -> HarnessVerdict:
        if result.timed_out or result.exit_code != 0:
            return HarnessVerdict(False, describe_exit(result))
        asked = answered = is_done = False
        errors = _ERROR.findall(result.stdout.decode(errors="replace"))
        reason = f": {errors[-1][:300]}" if errors else ""
        for event in json_events(result.stderr, key="event"):
            name, properties = event["event"], object_in(event, "properties")
            if name == "message_send_starting":
                asked, answered = True, False
            elif name == "message_send":
                answered = True
            elif name == "message_send_exception":
                reason = f": {properties.get('exception', '')}"[:300]
            is_done = name == "exit" and properties.get("reason") == _DONE
        if not asked:
            return HarnessVerdict(False, "aider ended without asking its model")
        if not answered and not result.truncated:
            return HarnessVerdict(False, f"aider's last model call failed{reason}")
        if not is_done and not result.truncated:
            return HarnessVerdict(False, "aider's events stop before the end of its run")
        return HarnessVerdict(True)

    def _arguments(self, model: str) -> list[str]:
        config = self._config
        arguments = ["--model", model, "--weak-model", model, *_QUIET, "--map-tokens", str(config.map_tokens)]
        arguments += [] if config.edit_format is None else ["--edit-format", config.edit_format]
        arguments += [] if config.git else ["--no-git"]
        arguments += [] if config.auto_commits else ["--no-auto-commits"]
        if config.test_command is not None:
            arguments += ["--auto-test", "--test-cmd", config.test_command]
        return arguments

    def _metadata(self, model: str) -> dict[str, Any]:
        window = self._config.context_window
        return {model: {"max_input_tokens": window, "max_tokens": window, "litellm_provider": "openai", "mode": "chat"}}


def _no_command(instruction: str) -> str:
    """The instruction, changed if aider would read it as a command because it begins with `/` or `!`."""
    return f"\n{instruction}" if instruction.startswith(("/", "!")) else instruction
