"""The tool `editor`: one tool with commands to view and edit text files, in the form that models are trained on.

Source: Anthropic's text editor tool, the commands of SWE-agent's and OpenHands' editors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import BaseModel

from gangline.agents.tools.action_server import Files
from gangline.agents.tools.answers import Tree, View
from gangline.agents.tools.arguments import read, schema_of
from gangline.agents.tools.contract import NoConfig, Observation, Tool, ToolContext, ToolFailed
from gangline.domain.errors import ActionRefused

_T = TypeVar("_T")
_LINES_AROUND = 4


class _Edit(msgspec.Struct):
    command: Literal["view", "create", "str_replace", "insert", "undo_edit"]
    path: Annotated[str, Meta(description="File, or for view also a folder; absolute, or from the working folder.")]
    view_range: (
        Annotated[
            list[int],
            Meta(description="For view: first and last line, from 1; [50, -1] shows line 50 to the end."),
        ]
        | UnsetType
    ) = UNSET
    file_text: Annotated[str, Meta(description="For create: the whole content.")] | UnsetType = UNSET
    old_str: (
        Annotated[
            str,
            Meta(description="For str_replace: the text to replace, exactly as in the file. It must occur there once."),
        ]
        | UnsetType
    ) = UNSET
    new_str: (
        Annotated[str, Meta(description="For str_replace: the text in its place. For insert: the lines to insert.")]
        | UnsetType
    ) = UNSET
    insert_line: (
        Annotated[int, Meta(ge=0, description="For insert: the line after which to insert; 0 is the beginning.")]
        | UnsetType
    ) = UNSET


class EditorTool(Tool):
    """Views and edits files; an edit shows the surrounding lines."""

    Config: ClassVar[type[BaseModel]] = NoConfig
    name = "editor"
    description = (
        "View and edit text files. view shows a file with line numbers, or lists a folder; create writes a whole file,"
        " also over an existing one; str_replace replaces a text that occurs exactly once; insert adds lines after a"
        " line; undo_edit takes back the last edit of the file."
    )
    parameters = schema_of(_Edit)

    def __init__(self, config: NoConfig) -> None: ...

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        call = read(arguments, _Edit)
        files = (await context.action_server()).files
        match call.command:
            case "view":
                content = await _view(files, call, context.max_output_bytes)
            case "create":
                content = await _create(files, call)
            case "str_replace":
                content = await _replace(files, call)
            case "insert":
                content = await _insert(files, call)
            case "undo_edit":
                content = await _undo(files, call)
        return Observation(content=content)


async def _view(files: Files, call: _Edit, max_bytes: int) -> str:
    first, last = _range(call.view_range)
    try:
        view = await files.view(call.path, first_line=first, last_line=last, max_bytes=max_bytes)
    except ActionRefused as error:
        if error.reason != "is_folder":
            raise
        return _listed(await files.tree(call.path))
    return _numbered(view, last, max_bytes)


def _range(given: list[int] | UnsetType) -> tuple[int, int | None]:
    """First and last line, from 1; None: the end. Raises: ToolFailed."""
    if given is UNSET:
        return 1, None
    if len(given) != 2 or given[0] < 1 or (given[1] != -1 and given[1] < given[0]):
        raise ToolFailed("view_range has two numbers: the first line, from 1, and the last one, or -1 for the end")
    return given[0], None if given[1] == -1 else given[1]


def _numbered(view: View, last: int | None, max_bytes: int) -> str:
    """As many numbered lines as fit, and a note if requested lines are missing."""
    if not view.num_lines:
        return "[the file is empty]"
    shown: list[str] = []
    room = max_bytes - 128
    for number, text in enumerate(view.lines, view.first_line):
        line = f"{number:6}\t{text}\n"
        room -= len(line.encode(errors="replace"))
        if room < 0 and shown:
            break
        shown.append(line)
    end = view.first_line + len(shown) - 1
    if end < min(last or view.num_lines, view.num_lines):
        shown.append(f"[lines {view.first_line} to {end} of {view.num_lines}: give view_range for others]")
    return "".join(shown)


def _listed(tree: Tree) -> str:
    entries = [entry.path + ("/" if entry.kind == "folder" else "") for entry in tree.entries]
    return (
        "\n".join(entries) + ("" if tree.is_whole else "\n[there are more: view a folder inside]") or "[empty folder]"
    )


async def _create(files: Files, call: _Edit) -> str:
    change = await files.write(call.path, _given("file_text", call.file_text))
    return f"{call.path} was {'created' if change.is_new else 'replaced'}: {change.num_bytes} bytes"


async def _replace(files: Files, call: _Edit) -> str:
    new = "" if call.new_str is UNSET else call.new_str
    change = await files.replace(call.path, old=_given("old_str", call.old_str), new=new)
    return await _edited(files, call.path, change.line or 1, new)


async def _insert(files: Files, call: _Edit) -> str:
    text, after = _given("new_str", call.new_str), _given("insert_line", call.insert_line)
    await files.insert(call.path, text, after_line=after)
    return await _edited(files, call.path, after + 1, text)


async def _undo(files: Files, call: _Edit) -> str:
    change = await files.undo(call.path)
    done = "removed: it was new" if change.num_bytes is None else "set back to before its last edit"
    return f"{call.path} was {done}"


async def _edited(files: Files, path: str, line: int, text: str) -> str:
    """A note on an edit, with the surrounding lines."""
    first, last = max(1, line - _LINES_AROUND), line + text.count("\n") + _LINES_AROUND
    try:
        view = await files.view(path, first_line=first, last_line=last, max_bytes=4096)
    except ActionRefused:  # the file is now empty, or its front is gone
        return f"{path} was edited"
    return f"{path} was edited. Now:\n{view.numbered()}"


def _given(name: str, value: _T | UnsetType) -> _T:
    if value is UNSET:
        raise ToolFailed(f"this command needs {name}")
    return value
