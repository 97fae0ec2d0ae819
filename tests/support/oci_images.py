"""Images made by tests: layers of any content, in an OCI layout, pushed to a registry by skopeo."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

__all__ = ["Form", "Member", "file", "folder", "layer", "link", "node", "push_again", "pushed"]

Member = tuple[tarfile.TarInfo, bytes]
Form = Literal["oci", "docker", "zstd"]
"""`docker`: with Docker's own media types."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def _member(name: str, kind: bytes, mode: int, data: bytes = b"", target: str = "", owner: int = 0) -> Member:
    made = tarfile.TarInfo(name)
    made.type, made.mode, made.size, made.linkname = kind, mode, len(data), target
    made.uid = made.gid = owner
    return made, data


def file(name: str, data: bytes | str = b"", *, mode: int = 0o644, owner: int = 0) -> Member:
    return _member(name, tarfile.REGTYPE, mode, data.encode() if isinstance(data, str) else data, owner=owner)


def folder(name: str, *, mode: int = 0o755) -> Member:
    return _member(name, tarfile.DIRTYPE, mode)


def link(name: str, target: str, *, hard: bool = False) -> Member:
    return _member(name, tarfile.LNKTYPE if hard else tarfile.SYMTYPE, 0o777, target=target)


def node(name: str, kind: bytes, major: int = 1, minor: int = 3) -> Member:
    """A device or a pipe: `tarfile.CHRTYPE` and its like."""
    made, data = _member(name, kind, 0o666)
    made.devmajor, made.devminor = major, minor
    return made, data


def layer(members: Iterable[Member]) -> bytes:
    """A layer's tar archive."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return written.getvalue()


@lru_cache(maxsize=2)
def _compressed(archive: bytes, form: Form) -> bytes:
    """A test's base is in all of its images."""
    if form == "zstd":
        return subprocess.run(["zstd", "--stdout"], input=archive, capture_output=True, check=True).stdout
    return gzip.compress(archive, compresslevel=1, mtime=0)


class _Layout:
    def __init__(self, path: Path) -> None:
        self._path = path
        (path / "blobs" / "sha256").mkdir(parents=True)

    def blob(self, kind: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self._path / "blobs" / "sha256" / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def close(self, manifest: dict[str, Any]) -> None:
        named = {**manifest, "annotations": {"org.opencontainers.image.ref.name": "image"}}
        (self._path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
        (self._path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def push_again(image: str, number: int) -> None:
    """Push this image, of one layer, once more with that layer so many times. Its registry is in this network."""
    address, _, rest = image.partition("/")
    name, _, tag = rest.partition(":")
    url = f"http://{address}/v2/{name}/manifests/{tag}"
    kind = "application/vnd.oci.image.manifest.v1+json"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": kind})) as answer:
        manifest = json.load(answer)
    manifest["layers"] = manifest["layers"][:1] * number
    data = json.dumps({**manifest, "mediaType": kind}).encode()
    urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": kind}, method="PUT")).close()


def write_layout(path: Path, layers: Sequence[bytes], config: Mapping[str, Any], form: Form) -> None:
    """An OCI layout with one image, `image`."""
    layout = _Layout(path)
    how = "zstd" if form == "zstd" else "gzip"
    blobs = [layout.blob(f"layer.v1.tar+{how}", _compressed(one, form)) for one in layers]
    described = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": layout.blob("config.v1+json", json.dumps(described).encode()),
        "layers": blobs,
    }
    layout.close(layout.blob("manifest.v1+json", json.dumps(manifest).encode()))


def pushed(
    image: str,
    path: Path,
    layers: Sequence[bytes],
    config: Mapping[str, Any] | None = None,
    entering: Sequence[str] = (),
    form: Form = "oci",
) -> str:
    """Write the layout to `path`, push it under this name, and return the name. entering: start of a command line in
    the registry's network."""
    write_layout(path, layers, config or {}, form)
    options = ["--dest-tls-verify=false", *(["--format", "v2s2"] if form == "docker" else [])]
    argv = [*entering, "skopeo", "copy", "--quiet", *options, f"oci:{path}:image", f"docker://{image}"]
    subprocess.run(argv, check=True, capture_output=True)
    return image
