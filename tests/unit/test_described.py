"""Docstrings of fields are those that pydantic finds, but no source is read before they are asked for."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest
from pydantic import BaseModel, ConfigDict, Field

from gangline.domain.described import descriptions
from gangline.domain.task import TaskRequest
from gangline.settings.machine import Settings
from gangline.wire.http.openapi import describe
from gangline.wire.http.routes import Route


class Plain(BaseModel):
    """Its own docstring is no field's."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    shown: int = 1
    """Of two
    lines.
    """
    bare: int = 2
    also: str = Field(default="", alias="other")
    """Under another name."""
    kind: ClassVar[str] = "k"
    """Of the class, which is no field."""

    def method(self) -> None:
        """Of a method."""


class Heir(Plain):
    own: Plain | None = None
    """A model in a model."""


class Bare(BaseModel):
    none: int = 0


@pytest.mark.parametrize("model", [Plain, Heir, Bare])
def test_they_are_those_that_pydantic_finds(model: type[BaseModel]) -> None:
    found = descriptions(model)
    for name, field in model.model_fields.items():
        assert found.get(name) == field.description


@pytest.mark.parametrize("model", [Settings, TaskRequest])
def test_openapi_has_them(model: type[BaseModel]) -> None:
    async def handler(_request: object) -> None: ...

    schemas = describe([Route("POST", "/x", handler, "Takes one.", body=model)], "t")["components"]["schemas"]  # type: ignore[arg-type]
    properties = schemas[model.__name__]["properties"]
    found = descriptions(model)
    assert len(found) > 10
    assert {name: properties[name].get("description") for name in found} == found


@pytest.mark.parametrize("loaded", ["gangline.node.node", "gangline.server.run", "gangline.train.run.experiment"])
def test_a_service_starts_without_reading_its_own_source(loaded: str) -> None:
    """It would take a tenth of the time until the service is ready."""
    read = "', '.join(name for name in linecache.cache if 'gangline' in name)"
    done = subprocess.run(
        [sys.executable, "-c", f"import linecache, sys, {loaded}; sys.exit({read} or 0)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
