"""What a table of the command line looks like in a terminal."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

__all__ = ["drawn"]


def drawn(table: RenderableType, width: int) -> list[str]:
    """Lines of a terminal of `width` columns, without colours."""
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, soft_wrap=True, color_system=None).print(table)
    return file.getvalue().splitlines()
