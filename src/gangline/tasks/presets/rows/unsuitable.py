"""The error for a valid row that a preset cannot grade."""

from __future__ import annotations

from gangline.domain.errors import InvalidRequest


class RowUnsuitable(InvalidRequest):
    """The row has the required columns, but no answer or test that the preset can grade by. Importers omit it."""

    code = "row_unsuitable"
