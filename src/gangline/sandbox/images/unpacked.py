"""Images from registries as folders: root file systems for sandboxes of a machine that has no container engine.

skopeo pulls, with the credentials and registries that podman also uses, and umoci unpacks. Each image is unpacked once;
compressed layers are shared by digest.

Laws
- Layers are unpacked in namespaces of their own, where only the new folder can be written: umoci follows no link out of
  it, but a white-out of `..` removes what lies beside it.
- Nothing of an image runs. Its files belong to the node's user; a device becomes an empty file. Nobody else may enter
  the folder of all images, so that set-user-id files lend nothing to other users of the machine.
- An image whose files are too large, or too many, is refused while it is unpacked.
- The list of images changes only under a lock, and an image in use stays: its users lock its folder.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import AsyncGenerator, Collection, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import ImageMissing, InvalidRequest, PullFailed, RuntimeFailed, RuntimeUnavailable
from gangline.domain.image_names import full_name, is_image_name, located
from gangline.domain.image_store import HeldImage
from gangline.domain.task import LimitsSpec
from gangline.machine.durable import locked, write_whole
from gangline.machine.programs import program
from gangline.sandbox.commands.holder import PATH
from gangline.sandbox.shared.disk import DiskWatch, counted
from gangline.sandbox.shared.environment import engine_environment, image_variables
from gangline.sandbox.shared.removal import remove_tree
from gangline.sandbox.shared.threads import run_to_end

_PROGRAMS = ("skopeo", "umoci")
INSTALL = "apt-get install -y skopeo umoci"
_PULL_S = 3600.0
LIMITS = LimitsSpec(disk_bytes=64 << 30, max_files=2_000_000)
"""The largest unpacked image."""
_MAX_LAYERS = 500
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ID = re.compile("(?:sha256:)?([0-9a-f]{64})")
_FATAL = re.compile(r'level=fatal msg="(?:Error parsing image name \\"[^"]*\\": )?(.*)"', re.DOTALL)
"""The line by which skopeo ends."""
_NO_ROOM = re.compile("no space left on device|disk quota exceeded", re.IGNORECASE)


class UnpackedImage(msgspec.Struct, kw_only=True):
    """An image on this machine."""

    image_id: str
    """SHA-256 of its configuration."""
    names: dict[str, str]
    """Full name -> digest of the manifest that it had in its registry."""
    env: dict[str, str]
    blobs: dict[str, int]
    """SHA-256 of each file in `blobs` -> bytes."""
    layers: dict[str, int]
    """Those of them that are layers; and the unpacked files, which are shared with no other image."""


class _OciConfig(msgspec.Struct):
    Env: list[str] | None = None


class _OciImage(msgspec.Struct):
    config: _OciConfig | None = None


class _OciBlob(msgspec.Struct):
    digest: str
    size: int


class _OciLayers(msgspec.Struct, kw_only=True):
    layers: list[_OciBlob] = []


class _OciManifest(_OciLayers, kw_only=True):
    config: _OciBlob


class UnpackedImages:
    """See `ImageStore`. Long because it has every step from a registry to a folder, and back to nothing."""

    def __init__(self, folder: Path, limits: LimitsSpec | None = None) -> None:
        """limits: `disk_bytes` and `max_files` of one unpacked image; None: `LIMITS`."""
        self._folder = folder
        self._limits = limits or LIMITS

    @property
    def is_usable(self) -> bool:
        return all(shutil.which(name, path=PATH) for name in _PROGRAMS)

    def held(self) -> dict[str, UnpackedImage]:
        """Returns id -> image. Blocking. Raises: RuntimeFailed."""
        try:
            told = msgspec.json.decode((self._folder / "images.json").read_bytes(), type=dict[str, UnpackedImage])
            return {name: one for name, one in told.items() if self._root(name).is_dir()}
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            raise RuntimeFailed(f"the list of unpacked images in {self._folder} cannot be read: {error}.") from error

    def _root(self, image_id: str) -> Path:
        return self._folder / "roots" / image_id

    def names(self) -> set[str]:
        """Returns every name by which an image can be requested. Blocking. Raises: RuntimeFailed."""
        held = self.held()
        return {located(name)[1] for one in held.values() for name in (one.image_id, *one.names)}

    @contextmanager
    def used(self, image: str) -> Generator[tuple[Path, UnpackedImage]]:
        """The folder of an image, which stays until the end of the block. Blocking. Raises: ImageMissing."""
        found = _named(self.held(), image)
        if found is None:
            why = "and this node does not pull it" if self.is_usable else f"and images need skopeo and umoci: {INSTALL}"
            raise ImageMissing(f"the image {image!r} is not on this machine, {why}.")
        root = self._root(found.image_id)
        try:
            lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ImageMissing(f"the image {image!r} has been removed.") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if found.image_id not in self.held():
                raise ImageMissing(f"the image {image!r} has been removed.")
            yield root, found
        finally:
            os.close(lock)

    # -- ImageStore ----------------------------------------------------------------------------------------------

    async def find(self, image: str) -> HeldImage | None:
        found = _named(await asyncio.to_thread(self.held), image)
        if found is None:
            return None
        digest = found.names.get(full_name(image)) or next(iter(found.names.values()), f"sha256:{found.image_id}")
        tags = tuple(name for name in found.names if "@" not in name)
        return HeldImage(image_id=found.image_id, digest=digest, size_bytes=sum(found.layers.values()), tags=tags)

    async def layers(self, image: str) -> dict[str, int]:
        found = _named(await asyncio.to_thread(self.held), image)
        return {} if found is None else found.layers

    async def image_ids(self) -> Collection[str]:
        return frozenset(await asyncio.to_thread(self.held))

    async def remove_image(self, image: str) -> bool:
        return await run_to_end(self._removed, image)

    async def pull(self, image: str) -> None:
        if not self.is_usable:
            raise RuntimeUnavailable(f"images are pulled by skopeo and umoci. Run, as root: {INSTALL}")
        _refuse_no_name(image)
        name = full_name(image)
        try:
            async with asyncio.timeout(_PULL_S):
                raw = await _said(*_skopeo(), "inspect", "--raw", f"docker://{name}")
                digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
                if not await run_to_end(self._is_named, name, digest):
                    self._check(raw)
                    async with self._working() as work:
                        await self._unpacked(work, name, digest)
        except TimeoutError:
            raise RuntimeFailed(f"the pull took longer than {_PULL_S:.0f} s.") from None

    def _check(self, raw: bytes) -> None:
        """Refuse a manifest that would take long to fail; one for several machines names no layers. Raises:
        PullFailed."""
        try:
            layers = msgspec.json.decode(raw, type=_OciLayers).layers
        except msgspec.MsgspecError as error:
            raise PullFailed(f"this is no image: {error}.") from error
        if len(layers) > _MAX_LAYERS:
            raise PullFailed(f"the image has {len(layers)} layers, more than {_MAX_LAYERS}.")
        most = self._limits.disk_bytes
        if most is not None and sum(layer.size for layer in layers) > most:
            raise PullFailed(f"its layers have more than {most} bytes, which this node refuses.")

    # -- pulling -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _working(self) -> AsyncGenerator[Path]:
        """A folder for one pull. No layer is removed meanwhile."""
        work = self._folder / "work" / uuid.uuid4().hex
        lock = await run_to_end(self._begun, work)
        try:
            yield work
        finally:
            await run_to_end(remove_tree, work)
            os.close(lock)

    def _begun(self, work: Path) -> int:
        """Returns a shared lock on `work`'s parent. Its only user removes what pulls of killed processes left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        for path in (self._folder / "roots", self._folder / "blobs" / "sha256", work.parent):
            path.mkdir(parents=True, exist_ok=True)
        lock = os.open(work.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in work.parent.iterdir():
                remove_tree(left)
        fcntl.flock(lock, fcntl.LOCK_SH)
        (work / "layout").mkdir(parents=True)
        (work / "layout" / "blobs").symlink_to("../../../blobs")
        (work / "unpacked").mkdir()
        return lock

    async def _unpacked(self, work: Path, name: str, digest: str) -> None:
        repository = name.partition("@")[0] if "@" in name else name.rpartition(":")[0]
        source, target = f"docker://{repository}@{digest}", f"oci:{work}/layout:image"
        await _said(*_skopeo(), "copy", "--quiet", "--dest-compress-format", "gzip", source, target)
        image = await run_to_end(self._described, work, {name: digest, f"{repository}@{digest}": digest})
        if image.image_id not in await asyncio.to_thread(self.held):
            image.layers[f"unpacked {image.image_id}"] = await self._unpack(work / "layout", work / "unpacked")
            await _said("sync", "--file-system", str(work))  # a root that is listed survives a power failure whole
        await run_to_end(self._put, image, work)

    def _described(self, work: Path, names: dict[str, str]) -> UnpackedImage:
        """Raises: PullFailed."""
        try:
            index: Any = msgspec.json.decode((work / "layout" / "index.json").read_bytes())
            described = str(index["manifests"][0]["digest"])
            manifest = msgspec.json.decode(self._blob(described).read_bytes(), type=_OciManifest)
            told = msgspec.json.decode(self._blob(manifest.config.digest).read_bytes(), type=_OciImage)
        except (OSError, msgspec.MsgspecError, LookupError, TypeError) as error:
            raise PullFailed(f"this is no image: {error}.") from error
        layers = {_hex(layer.digest): layer.size for layer in manifest.layers}
        config = _hex(manifest.config.digest)
        others = {config: manifest.config.size, _hex(described): self._blob(described).stat().st_size}
        lines = (told.config.Env if told.config is not None else None) or []
        env = image_variables({line.partition("=")[0]: line.partition("=")[2] for line in lines})
        return UnpackedImage(image_id=config, names=names, env=env, blobs=layers | others, layers=layers)

    def _blob(self, digest: str) -> Path:
        return self._folder / "blobs" / "sha256" / _hex(digest)

    async def _unpack(self, layout: Path, target: Path) -> int:
        """Returns the bytes of its files. Raises: PullFailed, RuntimeFailed when the disk is full."""
        argv = [
            *("prlimit", f"--fsize={self._limits.disk_bytes}", "--", "bwrap", "--die-with-parent", "--unshare-all"),
            *("--unshare-user", "--uid", "0", "--gid", "0", "--clearenv", "--setenv", "PATH", PATH),
            *(word for name in _SYSTEM for word in ("--ro-bind-try", f"/{name}", f"/{name}")),
            *("--ro-bind", str(layout), "/layout", "--ro-bind", str(self._folder / "blobs"), "/blobs"),
            *("--bind", str(target), "/unpacked", "--chdir", "/unpacked"),
            *("umoci", "raw", "unpack", "--rootless", "--image", "/layout:image", "/unpacked/root"),
        ]
        watch = DiskWatch(self._limits)
        async with program(*argv, stderr=asyncio.subprocess.PIPE) as process:

            async def end() -> None:
                with suppress(ProcessLookupError):
                    process.kill()

            watch.begin(end, lambda: [target])
            try:
                _, complaint = await process.communicate()
            finally:
                await watch.close()
        words = complaint.decode(errors="replace").rpartition("\u2a2f")[2].strip()
        num_bytes = await self._checked(target, watch.usage.exceeded)
        if process.returncode != 0 or not (target / "root").is_dir():
            kind = RuntimeFailed if _NO_ROOM.search(words) else PullFailed
            raise kind(f"its layers cannot be unpacked: {words}")
        return num_bytes

    async def _checked(self, target: Path, exceeded: str | None) -> int:
        """Returns the bytes of the files. exceeded: a limit that they exceeded before. Raises: PullFailed."""
        found = {
            "disk_bytes": await counted([target], "--block-size=1"),
            "max_files": await counted([target], "--inodes"),
        }
        for name, size in found.items():
            most = getattr(self._limits, name)
            if name == exceeded or (size or 0) > most:
                what = "bytes" if name == "disk_bytes" else "files"
                raise PullFailed(f"it would have more than {most} {what} when unpacked, which this node refuses.")
        return found["disk_bytes"] or 0

    # -- the list ------------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Generator[dict[str, UnpackedImage]]:
        with locked(self._folder / "lock", wait=True):
            held = self.held()
            yield held
            write_whole(self._folder / "images.json", msgspec.json.encode(held))

    def _is_named(self, name: str, digest: str) -> bool:
        """Whether the image is here; then it has this name from now on."""
        if not any(digest in one.names.values() for one in self.held().values()):
            return False
        with self._changing() as held:
            found = next((one for one in held.values() if digest in one.names.values()), None)
            if found is not None:
                _give_names(held, found.image_id, {name: digest})
        return found is not None

    def _put(self, image: UnpackedImage, work: Path) -> None:
        with self._changing() as held:
            if image.image_id not in held:
                root = self._root(image.image_id)
                if root.exists():  # a process was killed before it listed it
                    os.rename(root, work / "left")
                os.rename(work / "unpacked" / "root", root)
                held[image.image_id] = image
            _give_names(held, image.image_id, image.names)

    def _removed(self, image: str) -> bool:
        """Blocking."""
        gone = self._folder / "work" / uuid.uuid4().hex
        with self._changing() as held:
            found = _named(held, image)
            if found is None:
                return False
            name = full_name(image)
            if name in found.names and any("@" not in other for other in found.names if other != name):
                del found.names[name]
                return True
            with _alone(self._root(found.image_id)) as is_unused:
                if not is_unused:
                    return False
                os.rename(self._root(found.image_id), gone)
            del held[found.image_id]
            shared = {blob for one in held.values() for blob in one.blobs}
            with _alone(gone.parent) as nobody_pulls:
                for blob in found.blobs.keys() - shared if nobody_pulls else ():
                    self._blob(blob).unlink(missing_ok=True)
        remove_tree(gone)
        return True


def _named(held: Mapping[str, UnpackedImage], image: str) -> UnpackedImage | None:
    """Raises: InvalidRequest."""
    _refuse_no_name(image)
    if (found := _ID.fullmatch(image)) is not None:
        return held.get(found[1])
    name = full_name(image)
    return next((one for one in held.values() if name in one.names), None)


def _refuse_no_name(image: str) -> None:
    if not is_image_name(image):
        raise InvalidRequest(f"runtime.image must be the name of an image, such as debian:12; got {image[:200]!r}.")


def _give_names(held: Mapping[str, UnpackedImage], image_id: str, names: Mapping[str, str]) -> None:
    for other in held.values():
        other.names = {name: digest for name, digest in other.names.items() if name not in names}
    held[image_id].names |= names


def _hex(digest: str) -> str:
    """Raises: PullFailed."""
    if (found := _ID.fullmatch(digest)) is None:
        raise PullFailed(f"the image names a part by {digest[:80]!r}, which is no SHA-256.")
    return found[1]


@contextmanager
def _alone(folder: Path) -> Generator[bool]:
    """Lock a folder for the block. Yields False if it has users."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _skopeo() -> list[str]:
    """Podman reads the variable itself."""
    file = os.environ.get("CONTAINERS_REGISTRIES_CONF")
    return ["skopeo", *(() if file is None else ("--registries-conf", file))]


async def _said(*argv: str) -> bytes:
    """Raises: RuntimeFailed."""
    async with program(*argv, env=engine_environment(), stderr=asyncio.subprocess.PIPE) as process:
        printed, complaint = await process.communicate()
    if process.returncode != 0:
        words = complaint.decode(errors="replace").strip()
        told = _FATAL.search(words)
        raise RuntimeFailed(words if told is None else told[1].replace('\\"', '"'))
    return printed
