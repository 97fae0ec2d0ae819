"""Lists images in folders of this machine, for runtimes whose images are paths."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from gangline.sandbox.shared.threads import run_to_end
from gangline.settings.machine import Settings


def built_images(settings: Settings) -> Path:
    """Folder of the images made by `gangline image build`."""
    return settings.cache_dir / "images"


async def images_in(settings: Settings) -> Mapping[str, Collection[str]]:
    """Folder -> names in it. A missing folder is empty; an unreadable one is left out."""
    return await run_to_end(_listed, (*settings.image_folders, built_images(settings)))


def _listed(folders: Collection[Path]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for folder in map(os.path.abspath, folders):
        try:
            found[folder] = os.listdir(folder)
        except FileNotFoundError:
            found[folder] = []
        except OSError:
            continue
    return found
