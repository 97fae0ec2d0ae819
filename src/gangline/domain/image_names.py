"""Names of images, so that a task's can be compared with a node's, and a compact form for many of them. Pure.

An image with a path is in a folder of the node's machine. Any other is an engine's own, in the folder `""`.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

MAX_IMAGES = 2000
"""Most images of one folder that a node reports. A folder with more is not reported."""

_DIGEST_CHARS = 8
_ID = re.compile(r"(?:sha256:)?([0-9a-f]{12})[0-9a-f]{0,52}")
_ID_CHARS = 12
_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(:\d+)?(/[A-Za-z0-9._-]+)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?", re.ASCII
)
_IMPLIED = re.compile(r"^(?:(?:index\.)?docker\.io/|localhost/)?(?:library/)?")


def is_image_name(text: str) -> bool:
    """Whether it is the name of an image, or an id: never an option, a path, or another place."""
    return _NAME.fullmatch(text) is not None


def located(image: str) -> tuple[str, str]:
    """Returns the image's folder and its name there."""
    if image.startswith("/"):
        folder, name = posixpath.split(posixpath.normpath(image))
        return folder, name
    return "", _canonical(image)


def _canonical(image: str) -> str:
    """Returns a name in engines' form: with its tag, without the default registry and folder; or a short id."""
    if (found := _ID.fullmatch(image)) is not None:
        return found[1]
    return _tagged(_IMPLIED.sub("", image))


def _tagged(image: str) -> str:
    """A digest replaces the tag."""
    whole, at, digest = image.partition("@")
    repository, colon, tag = whole.rpartition(":")
    has_tag = bool(colon) and "/" not in tag
    if at:
        return f"{repository if has_tag else whole}@{digest}"
    return whole if has_tag else f"{whole}:latest"


def is_local(image: str) -> bool:
    """Whether it is in no registry by this name: an engine's own, or built by `gangline image build`."""
    return image.startswith(("localhost/", "sha256:", "gangline/"))


def full_name(image: str) -> str:
    """Returns a name with registry and tag, as every engine reads it: `docker.io/library/debian:12` for `debian:12`. A
    digest replaces the tag."""
    image = re.sub("^(index\\.)?docker\\.io/", "", image)
    first, slash, _ = image.partition("/")
    if slash and (set(".:") & set(first) or first == "localhost"):
        return _tagged(image)
    return _tagged(f"docker.io/{image}" if slash else f"docker.io/library/{image}")


def mirrored(name: str, mirrors: Mapping[str, str]) -> str:
    """Returns the name under which a mirror has an image; unchanged without one.

    name: a full one. mirrors: registry, or registry and folder -> what replaces it; the longest fits best.
    """
    fitting = [prefix for prefix in mirrors if name.startswith(f"{prefix.rstrip('/')}/")]
    if not fitting:
        return name
    prefix = max(fitting, key=len)
    return f"{mirrors[prefix].rstrip('/')}/{name[len(prefix.rstrip('/')) + 1 :]}"


def engine_names(listed: Iterable[tuple[str, str, str, str]], *, short: bool = False) -> set[str]:
    """Returns every name by which an engine's images can be requested.

    listed: repository, tag, digest and id of each, or `<none>`. short: the engine also finds an image of any registry
    by the end of its name.
    """
    names: set[str] = set()
    for repository, tag, digest, image_id in listed:
        names.add(image_id.removeprefix("sha256:")[:_ID_CHARS])
        ends = (f":{tag}" if tag != "<none>" else "", f"@{digest}" if digest != "<none>" else "")
        whole = [] if repository == "<none>" else [repository + end for end in ends if end]
        names.update(_canonical(one) for one in whole)
        if short:
            names.update(_canonical(piece) for one in whole for piece in _ends(one))
    return names


def _ends(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[at:]) for at in range(1, len(parts))]


def packed(names: Collection[str]) -> str:
    """Returns an eight-character digest for each name, which allows a lookup but does not reveal the names."""
    return "".join(sorted(_digest(name) for name in names))


def has_image(digests: str, name: str) -> bool:
    """digests: from `packed`. With 2,000 names, one in two million other names is a false positive."""
    return _digest(name) in _digests(digests)


@lru_cache(maxsize=1024)
def _digests(joined: str) -> frozenset[str]:
    return frozenset(joined[at : at + _DIGEST_CHARS] for at in range(0, len(joined), _DIGEST_CHARS))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode(errors="replace")).hexdigest()[:_DIGEST_CHARS]
