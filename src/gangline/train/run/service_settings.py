"""The service of an experiment: a running one, or one started for the run with the settings of `gangline up`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gangline.settings.node import NodeSettings
from gangline.settings.service import (
    UP_DEFAULTS,
    ClusterSettings,
    Resolved,
    ServerSettings,
    UpSettings,
    resolve,
)
from gangline.train.options import TrainingOptions

_TABLES = ("server", "node", "cluster", "up")


class ServiceSettings(TrainingOptions):
    """The tables `server`, `node`, `cluster` and `up` are as in gangline.toml, and take precedence over it and the
    environment.
    """

    url: str | None = None
    """URL of a running server, whose token is in GANGLINE_TOKEN; None starts a service for the run."""
    server: ServerSettings = ServerSettings()
    node: NodeSettings = NodeSettings()
    """`engines` defaults to the embedded engine with the experiment's model, unless set here or elsewhere."""
    cluster: ClusterSettings = ClusterSettings()
    up: UpSettings = UpSettings()
    weights: Path | None = None
    """Folder for new weights that trainer and engines can both access. None: in the run's folder."""
    keep_weights: int = Field(default=2, ge=1)
    """Folders of pushed weights kept on disk; while one is written, one more."""
    update_mode: Literal["drain", "keep"] = "drain"
    """Treatment of calls in flight when new weights arrive: they finish first, or continue under the new weights."""

    def resolved(self, model: str | None, data_dir: Path | None = None) -> Resolved:
        """All settings of the service started for the run, including gangline.toml and the environment.

        model: the experiment's, for the embedded engine; None if the trainer brings the engines. data_dir: None uses
        the default. Raises: InvalidRequest.
        """
        options = dict(self._given()) | ({} if data_dir is None else {"data_dir": data_dir})
        engines = () if model is None else (f"embedded:{model}",)
        defaults = {**UP_DEFAULTS, "node.engines": engines, "node.engines_later": model is None}
        return resolve(options, defaults=defaults)

    def _given(self) -> Iterator[tuple[str, Any]]:
        for table in _TABLES:
            settings = getattr(self, table)
            for name in sorted(settings.model_fields_set):
                yield f"{table}.{name}", getattr(settings, name)

    @model_validator(mode="after")
    def _belongs_to_one_service(self) -> Self:
        if self.url is not None and (given := [key for key, _ in self._given()]):
            raise ValueError(
                f"{', '.join(given)}: of a service that the run starts, and url names one that runs. Leave out one."
            )
        return self
