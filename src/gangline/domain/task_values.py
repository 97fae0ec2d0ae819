"""Checks values of a task at submit: values that reach a kernel, which no machine could accept, and template arguments.

The latter are arguments of chat templates that a task may choose: their names and values, and the names that operators
allow by default. The default names control how much a model thinks and which thinking stays in its prompt, in the terms
of published templates. A task can never set names that carry the conversation or are options of the renderer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

MAX_SECONDS = 366 * 24 * 3600
MAX_VARIABLE_BYTES = 128 << 10
"""Linux's limit for one variable, including its name, or for one argument (MAX_ARG_STRLEN)."""
MAX_ENVIRONMENT_BYTES = 1 << 20
_NAME = re.compile(r"[^=\x00-\x20\x7f]+")
_UNEXPANDED = re.compile(r"\$\{?PATH\b")

HARMLESS = (
    "clear_thinking",
    "drop_thinking",
    "enable_thinking",
    "keep_past_thinking",
    "keep_thinking",
    "low_effort",
    "medium_effort",
    "preserve_thinking",
    "preserved_thinking",
    "reasoning",
    "reasoning_effort",
    "reasoning_strength",
    "thinking",
    "thinking_budget",
    "thinking_effort",
    "thinking_mode",
    "thinking_option",
    "truncate_history_thinking",
)
_OF_THE_CALL = frozenset(
    {"add_generation_prompt", "audio", "chat_template", "continue_final_message", "conversation", "custom_tools"}
    | {"documents", "functions", "images", "max_length", "messages", "padding", "processor_kwargs", "raise_exception"}
    | {"response_format", "strftime_now", "tokenize", "tokenizer_kwargs", "tool_choice", "tools", "truncation"}
    | {"videos"}
)


def why_not_an_argument(names: Iterable[str]) -> str | None:
    """Returns why the first invalid name may not be chosen by a client, task or operator; None if all may be chosen."""
    for name in names:
        if not name.isidentifier() or len(name) > 64 or name.startswith(("_", "return_")):
            return f"{name[:100]!r} is not the name of a template's argument: such as enable_thinking"
        if name in _OF_THE_CALL or name.endswith("_token"):
            return f"{name!r} belongs to the call or to the renderer, and cannot be chosen"
    return None


def _chosen(arguments: dict[str, TemplateValue]) -> dict[str, TemplateValue]:
    if (why := why_not_an_argument(arguments)) is not None:
        raise ValueError(why)
    return arguments


_Text: TypeAlias = Annotated[str, Field(max_length=4096)]
TemplateValue: TypeAlias = (
    bool
    | Annotated[int, Field(ge=-(2**63), lt=2**63)]
    | Annotated[float, Field(allow_inf_nan=False, ge=-1e15, le=1e15)]
    | _Text
    | Annotated[list[_Text], Field(max_length=64)]
)
TemplateArguments: TypeAlias = Annotated[dict[str, TemplateValue], Field(max_length=32), AfterValidator(_chosen)]


def _environment(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:200]!r} is not a valid name of a variable: leave out `=`, blanks and controls")
        if "\0" in value:
            raise ValueError(
                f"{name[:200]} has a NUL character, which no variable can hold: write it to a file in prepare"
            )
        if len(f"{name}={value}".encode()) >= MAX_VARIABLE_BYTES:
            raise ValueError(
                f"{name[:200]} is longer than the {MAX_VARIABLE_BYTES} bytes of a variable: write it to a file"
            )
    if sum(len(f"{name}={value}".encode()) for name, value in env.items()) > MAX_ENVIRONMENT_BYTES:
        raise ValueError(f"all variables together take more than {MAX_ENVIRONMENT_BYTES} bytes: write some to a file")
    if (path := env.get("PATH")) is not None:
        _check_search_path(path)
    return env


def _check_search_path(path: str) -> None:
    """Raises: ValueError."""
    if _UNEXPANDED.search(path):
        raise ValueError("PATH is taken as it is, and $PATH is not expanded in it: write all folders out")
    if all(PurePosixPath(folder).name != "bin" for folder in path.split(":")):  # an image may have its own, as Nix's do
        raise ValueError("PATH has no folder named bin, so that no sh is found: add /usr/local/bin:/usr/bin:/bin")


def _path(path: str) -> str:
    if not path or "\0" in path or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path[:200]!r} is not a path in the sandbox: leave out `..` and NUL, and name something")
    return path


def file_path(path: str) -> str:
    """Raises: ValueError when it cannot be a file in a sandbox."""
    if _path(path).endswith(("/", "/.")) or path == ".":
        raise ValueError(f"{path[:200]!r} is a folder: name the file")
    return path


def _folder_path(path: str) -> str:
    if not _path(path).startswith("/") or not PurePosixPath(path).name:
        raise ValueError(f"{path[:200]!r} must be an absolute path, and not /: write one such as /workspace")
    return path


def _command(line: str) -> str:
    if "\0" in line:
        raise ValueError("a command cannot have a NUL character: write it to a file")
    if len(line.encode()) >= MAX_VARIABLE_BYTES:
        raise ValueError(f"a command is at most {MAX_VARIABLE_BYTES - 1} bytes long: write a file, and run that")
    return line


def _argv(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words[0]:
        raise ValueError("the first word of a command names its program, and is empty")
    return words


def _image(image: str) -> str:
    if image != image.strip() or not image.isprintable():
        raise ValueError(f"{image[:200]!r} is not an image: leave out blanks around it, and control characters")
    return image


Command = Annotated[str, AfterValidator(_command)]
"""A line for `sh -c`, or one argument of a program."""
Line = Annotated[Command, Field(min_length=1)]
"""A line for `sh -c` that is not empty."""
Argv = Annotated[tuple[Command, ...], Field(min_length=1), AfterValidator(_argv)]
"""A program and its arguments."""
Environment = Annotated[dict[str, str], AfterValidator(_environment)]
"""Variables of a command."""
FilePath = Annotated[str, AfterValidator(file_path)]
"""A file in a sandbox, relative to the working folder or absolute."""
AnyPath = Annotated[str, AfterValidator(_path)]
"""A file or folder in a sandbox, relative to the working folder or absolute."""
FolderPath = Annotated[str, AfterValidator(_folder_path)]
"""An absolute folder in a sandbox."""
HostFolder = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]
"""An absolute folder of the node's machine."""
Image = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_image)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
"""A time that a machine's clock can measure."""
Size = Annotated[int, Field(gt=0, lt=2**63)]
"""A number of bytes or other units that a kernel can count."""
