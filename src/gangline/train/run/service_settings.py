"""The service of an experiment: one that runs, or one that the run starts, with the settings of `gangline up`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

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

__all__ = ["ServiceSettings"]

_TABLES = ("server", "node", "cluster", "up")


class ServiceSettings(TrainingOptions):
    """Tables `server`, `node`, `cluster` and `up` are those of gangline.toml, and win over it and the environment."""

    url: str | None = None
    """URL of a running server, whose token is in GANGLINE_TOKEN; None starts a service for the run."""
    server: ServerSettings = ServerSettings()
    node: NodeSettings = NodeSettings()
    """`engines`, where not given here or elsewhere: the embedded engine with the model."""
    cluster: ClusterSettings = ClusterSettings()
    up: UpSettings = UpSettings()
    weights: Path | None = None
    """Folder that trainer and engines both reach, for new weights. None: in the run's folder."""
    update_mode: Literal["drain", "keep"] = "drain"
    """The treatment of calls in flight when new weights come: they end first, or continue under the new ones."""

    def resolved(self, model: str | None, data_dir: Path | None = None) -> Resolved:
        """All settings of the service that the run starts, those from gangline.toml and the environment included.

        model: of the experiment, for the embedded engine; None where the trainer brings the engines. data_dir: None is
        the usual one. Raises: InvalidRequest.
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
