"""Task templates of ProRL Agent's data sources: `<data>/server/handlers/<data_source>.json`, kept by the operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest, StoreError
from gangline.domain.ids import validated_id

__all__ = ["no_templates", "templates_in"]


def no_templates(data_source: str) -> dict[str, Any]:
    """Raises: InvalidRequest, always."""
    raise InvalidRequest(f"no template for data_source {data_source[:140]!r}; the server has none.")


def templates_in(folder: Path) -> Callable[[str], dict[str, Any]]:
    """Reads a template each time, so that a changed one counts at once."""

    def template_of(data_source: str) -> dict[str, Any]:
        name = f"{validated_id(data_source, 'data_source')}.json"
        try:
            return msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            known = sorted(path.stem for path in folder.glob("*.json"))
            raise InvalidRequest(
                f"no template for data_source {data_source!r}. Known: {', '.join(known) or 'none'}."
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(f"the template {name} cannot be read: {error}") from error

    return template_of
