"""A row that its dataset means, but that this preset cannot grade."""

from __future__ import annotations

from gangline.domain.errors import InvalidRequest

__all__ = ["RowUnsuitable"]


class RowUnsuitable(InvalidRequest):
    """The row has its columns, and no answer or test that the preset can grade by. Files of tasks leave it out."""

    code = "row_unsuitable"
