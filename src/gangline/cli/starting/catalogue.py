"""The templates of `gangline init`: folders of files that are copied, one over the other."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["TEMPLATES", "Template"]

_FOLDER = Path(__file__).with_name("templates")


class Template(NamedTuple):
    """The files of a folder, and the requirements of its agent."""

    purpose: str
    folders: tuple[str, ...]
    """Folders in `templates/`; files of a later one replace those of the same name."""
    packages: Mapping[str, str]
    """Imported module -> package on PyPI, of the agent or its tools."""
    harness: str | None = None
    """Harness whose program must be installed; None where the agent is a file of the folder."""
    suits_small_model: bool = True

    def files(self) -> dict[str, Path]:
        """Name -> file to copy."""
        found = {path.name: path for folder in self.folders for path in (_FOLDER / folder).iterdir() if path.is_file()}
        return dict(sorted(found.items()))

    def missing_packages(self) -> list[str]:
        """Those that the Python of this process, which agents use unless they have one of their own, does not have."""
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
