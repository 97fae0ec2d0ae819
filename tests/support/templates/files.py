"""Chat templates as packages ship them: TRL's, of its wheel, and llama.cpp's, of the sdist of llama-cpp-python."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

__all__ = ["LLAMA_CPP", "templates"]

LLAMA_CPP = Path(__file__).parents[3] / ".venv" / "chat-templates"
"""`make test-templates` puts them there."""


@cache
def templates() -> dict[str, str]:
    """`trl/NAME` or `llama.cpp/NAME` -> text. Without TRL's variants for training, which no engine serves."""
    found = importlib.util.find_spec("trl")
    folder = Path() if found is None or found.origin is None else Path(found.origin).parent / "chat_templates"
    trl = list(folder.glob("*.jinja"))
    files = {f"trl/{path.stem}": path for path in sorted(trl) if not path.stem.endswith("_training")}
    files |= {f"llama.cpp/{path.stem}": path for path in sorted(LLAMA_CPP.glob("*.jinja"))}
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
