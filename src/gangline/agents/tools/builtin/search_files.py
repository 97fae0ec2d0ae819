"""The tool `search_files`: finds lines that match a pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import BaseModel, ConfigDict, Field

from gangline.agents.tools.arguments import read, schema_of
from gangline.agents.tools.contract import Observation, Tool, ToolContext


class SearchFilesConfig(BaseModel):
    """Settings of tool `search_files`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_matches: int = Field(default=100, ge=1, le=1000)
    """Maximum number of lines returned by one call."""


class _Search(msgspec.Struct):
    pattern: Annotated[str, Meta(description="Regular expression, matched line by line.")]
    path: Annotated[str, Meta(description="File or folder to search. Default: the working folder.")] = "."
    glob: Annotated[str, Meta(description="Only files whose name or path matches this, such as *.py.")] | UnsetType = (
        UNSET
    )


class SearchFilesTool(Tool):
    """Returns lines as `path:line: text`."""

    Config: ClassVar[type[BaseModel]] = SearchFilesConfig
    name = "search_files"
    description = "Find the lines in files that match a regular expression. Hidden files are searched too, .git is not."
    parameters = schema_of(_Search)

    def __init__(self, config: SearchFilesConfig) -> None:
        self._max_matches = config.max_matches

    async def run(self, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
        call = read(arguments, _Search)
        glob = None if call.glob is UNSET else call.glob
        files = (await context.action_server()).files
        found = await files.search(call.pattern, call.path, glob=glob, max_matches=self._max_matches)
        lines = [f"{match.path}:{match.line}: {match.text}" for match in found.matches]
        if not lines:
            lines = ["[no line matches]"]
        elif not found.is_whole:
            lines.append(f"[more than {len(lines)} lines match: narrow the search]")
        return Observation(content="\n".join(lines))
