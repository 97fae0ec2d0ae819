"""Tasks of a preset, of the rows of its dataset's file."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.importers.imported import Imported
from gangline.importers.rows import read_rows
from gangline.presets.preset import Preset
from gangline.presets.rows.unsuitable import RowUnsuitable

__all__ = ["read_preset_rows"]


def read_preset_rows(path: Path, preset: Preset, limit: int | None = None) -> list[Imported | RowUnsuitable]:
    """The tasks of the first `limit` rows; None is all rows. A row that the preset cannot grade is its error.

    Raises: InvalidRequest, naming the file, the row and the field.
    """
    found: list[Imported | RowUnsuitable] = []
    for where, row in islice(read_rows(path), limit):
        if not isinstance(row, Mapping):
            raise InvalidRequest(f"{where}: is no object")
        try:
            body = preset.task(cast("Mapping[str, Any]", row))
        except RowUnsuitable as error:
            found.append(RowUnsuitable(f"{where}: {error.message}"))
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error.message}") from error
        else:
            found.append(Imported(name=where, body=body))
    if not found:
        raise InvalidRequest(f"{path}: holds no row.")
    return found
