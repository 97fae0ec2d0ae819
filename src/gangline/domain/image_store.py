"""The images of an engine that can pull more of them, such as Docker's. Who pulls when is decided elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, Protocol

import msgspec

PullPolicy = Literal["never", "if_missing", "always"]
"""When a node pulls an image: never; when the engine lacks it; also when a registry may have a newer one."""


class HeldImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that an engine holds."""

    image_id: str
    """Starts exactly this image, even if its names change their meaning."""
    digest: str
    """`sha256:...` of its manifest in its registry; its id if it came from no registry."""
    size_bytes: int
    """As the engine states it, with layers that other images share."""
    tags: tuple[str, ...] = ()
    """Its names with a tag; empty if it has only a digest or an id."""


class ImageStore(Protocol):
    """Errors have the words of engine and registry. All methods raise InvalidRequest for a text that names no image,
    RuntimeFailed, and RuntimeUnavailable when there is no engine."""

    async def find(self, image: str) -> HeldImage | None:
        """Returns the image if the engine holds it."""
        ...

    async def pull(self, image: str) -> None:
        """Pull the image by its whole name, with the engine's own credentials. Cancelling it ends the pull.

        Raises: PullFailed if another try would fail as well; RuntimeFailed, whose words tell.
        """
        ...

    async def layers(self, image: str) -> Mapping[str, int]:
        """Returns layer -> bytes, with the same names for layers that images share; empty if they are unknown."""
        ...

    async def image_ids(self) -> Collection[str]:
        """Returns the id of every image that the engine holds."""
        ...

    async def remove_image(self, image: str) -> bool:
        """Remove a name or an id. Returns False if the engine keeps it, as it does while a container uses it."""
        ...
