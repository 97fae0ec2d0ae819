"""Options of where the server's data is, and how much of it is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from gangline.server.run import Storage

__all__ = ["DatabaseOption", "KeepDaysOption", "KeepGbOption", "ResultsOption", "StorageChoice"]

_DAY_S = 86_400.0

DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database",
        help="postgresql://USER@HOST/NAME; a password comes from PGPASSWORD or ~/.pgpass. Default: GANGLINE_DATABASE, "
        "else SQLite in the data folder.",
        show_default=False,
    ),
]
ResultsOption = Annotated[
    str | None,
    typer.Option(
        "--results",
        help="Folder or fsspec URL (s3://BUCKET/PATH) for results. Default: in the data folder. Servers that share a "
        "database must share it.",
        show_default=False,
    ),
]
KeepDaysOption = Annotated[
    float | None,
    typer.Option("--keep-days", min=0, help="Forget tasks that ended so long ago. Default: never.", show_default=False),
]
KeepGbOption = Annotated[
    float | None,
    typer.Option(
        "--keep-gb",
        min=0,
        help="Forget the oldest ended tasks while results have more gigabytes. Default: no limit.",
        show_default=False,
    ),
]


class StorageChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The options as they were given."""

    database: str | None = None
    results: str | None = None
    keep_days: float | None = None
    keep_gb: float | None = None

    def storage(self) -> Storage:
        from gangline.server.run import Storage
        from gangline.store.sql.retention import Keep

        keep = Keep(
            for_s=None if self.keep_days is None else self.keep_days * _DAY_S,
            max_bytes=None if self.keep_gb is None else int(self.keep_gb * 1e9),
        )
        return Storage(database_url=self.database, results_url=self.results, keep=keep)

    def arguments(self) -> tuple[str, ...]:
        """For a server in another process; the database, which may hold a password, goes through its environment."""
        given = {"--results": self.results, "--keep-days": self.keep_days, "--keep-gb": self.keep_gb}
        return tuple(text for name, value in given.items() if value is not None for text in (name, str(value)))

    def environment(self) -> dict[str, str]:
        return {} if self.database is None else {"GANGLINE_DATABASE": self.database}

    def checked(self) -> StorageChoice:
        """Raises: InvalidRequest."""
        if self.database is not None and "://" not in self.database:
            raise InvalidRequest("--database is a URL, such as postgresql://USER@HOST/NAME; for SQLite give --data.")
        return self
