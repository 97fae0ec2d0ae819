"""An engine's words for an image that it has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.sandbox.containers.runtime import DockerRuntime
from gangline.settings.machine import Settings


@pytest.mark.parametrize(
    "words",
    [
        "Error: No such image: debian:12",
        "Error: debian:12: image not known",
        "Error: layer not known",  # podman, while another process removes the image
    ],
)
async def test_an_image_that_is_not_here_or_being_removed_is_not_found(tmp_path: Path, words: str) -> None:
    engine = tmp_path / "docker"
    engine.write_text(f"#!/bin/sh\necho '{words}' >&2; exit 1\n")
    engine.chmod(0o755)
    store = DockerRuntime(Settings(docker=(str(engine),))).image_store
    assert store is not None
    assert await store.find("debian:12") is None
