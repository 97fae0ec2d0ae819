"""Docker and podman through their command lines, which share the few commands used here.

None is run between a sandbox's start and its end, so a process for each question costs little, and podman needs no
service. Error messages are passed on unchanged, with a remedy where one is known.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import ImageMissing, InvalidRequest, RuntimeFailed, RuntimeUnavailable
from gangline.domain.image_names import full_name, is_image_name
from gangline.domain.image_store import HeldImage
from gangline.machine.programs import program
from gangline.sandbox.shared.environment import engine_environment

_PATIENCE_S = 180.0
_PULL_S = 3600.0
# podman knows no layer while another process removes the image.
_NO_IMAGE = re.compile("no such image|(image|layer) not known|unable to find (image|a name)", re.IGNORECASE)
_NO_CONTAINER = re.compile("no such container|no container with name", re.IGNORECASE)
_NAME = re.compile(r"gangline(?:_(?:service|network)-\d+)?-(.+)")
_MAX_LOG_LINES = 20


class Inspected(msgspec.Struct, frozen=True):
    """Facts about a running container."""

    pid: int
    """Process id of its first process on this machine."""
    env: dict[str, str]
    """Environment set by its image, and by us when it was started."""
    folders: list[Path]
    """Folders on this machine with the files that the container has written (its layer and its volumes); empty if
    unknown."""


class Engine:
    """One container engine."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """`name`: `docker` or `podman`; `command`: its program, with global options."""
        self.name = name
        self._command = tuple(command)

    @property
    def is_installed(self) -> bool:
        return shutil.which(self._command[0]) is not None

    @property
    def entering(self) -> tuple[str, ...]:
        """Start of a command line that enters the namespaces of its containers."""
        return (*self._command, "unshare") if os.geteuid() != 0 else ()

    def network_of(self, name: str, pid: int, names: Sequence[str]) -> list[str]:
        """Options that put a container into another one's network. `pid`: of the other's first process; `names`:
        options for the names that the other container knows. Docker shares them with the network; podman does not."""
        if self.name == "docker":
            return ["--network", f"container:{name}"]
        return ["--network", f"ns:/proc/{pid}/ns/net", *names]

    async def run(self, name: str, options: Sequence[str], image: str, argv: Sequence[str], folder: Path) -> None:
        """Start a container in the background; `argv`: arguments of its entry point.

        Never pulls: see `pull`. `folder`: working folder of podman's monitor, which leaves a file there after running
        out of memory.
        Raises: ImageMissing, RuntimeFailed, RuntimeUnavailable.
        """
        given = ("--detach", "--pull", "never", "--name", name)
        code, _, complaint = await self._said("run", *given, *options, image, *argv, folder=folder)
        if code != 0 and _NO_IMAGE.search(complaint):
            raise ImageMissing(
                f"the image {image!r} is not on this machine, and this node does not pull it. "
                f"Run: {' '.join(self._command)} pull {image}"
            )
        if code != 0:
            raise RuntimeFailed(f"{self.name} did not start a container: {complaint}")

    async def start(self, name: str, folder: Path) -> None:
        """Start a container that has exited. Raises: RuntimeFailed."""
        await self._done("start", name, folder=folder)

    async def kill(self, name: str) -> None:
        """Kill a container and keep its files. Does nothing if it has exited. Raises: RuntimeFailed."""
        code, _, complaint = await self._said("kill", name)
        if code != 0 and "not running" not in complaint and "state improper" not in complaint:
            raise RuntimeFailed(f"{self.name} did not end a container: {complaint}")
        await self._done("wait", name)

    async def remove(self, name: str) -> None:
        """Remove a container with its files and volumes, if it exists. Raises: RuntimeFailed, RuntimeUnavailable."""
        code, _, complaint = await self._said("rm", "--force", "--volumes", name)
        if code != 0 and not _NO_CONTAINER.search(complaint):
            raise RuntimeFailed(f"{self.name} did not remove a container: {complaint}")

    async def exit_code(self, name: str) -> int | None:
        """Exit code of a container's first process; None while it runs. Raises: RuntimeFailed."""
        state: Any = msgspec.json.decode(await self._done("container", "inspect", name))[0]["State"]
        return None if state["Running"] else int(state["ExitCode"])

    async def succeeds(self, name: str, argv: Sequence[str], timeout_s: float) -> bool:
        """Whether a command in the container exits with 0 within the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                return (await self._said("exec", name, *argv))[0] == 0
        except TimeoutError:
            return False

    async def last_words(self, name: str) -> str:
        """The end of a container's output. Raises: RuntimeFailed."""
        _, printed, complaint = await self._said("logs", "--tail", str(_MAX_LOG_LINES), name)
        return (printed + complaint).strip()

    async def inspect(self, name: str) -> Inspected:
        """Raises: RuntimeFailed."""
        facts: Any = msgspec.json.decode(await self._done("container", "inspect", name))[0]
        env = dict(line.partition("=")[::2] for line in facts["Config"]["Env"] or ())
        driver: dict[str, Any] = facts.get("GraphDriver") or {}
        mounts: list[dict[str, Any]] = facts.get("Mounts") or []
        data: dict[str, Any] = driver.get("Data") or {}
        layer = data.get("UpperDir")
        volumes = [Path(str(mount["Source"])) for mount in mounts if mount.get("Type") == "volume"]
        folders = [] if layer is None else [Path(str(layer)), *volumes]
        return Inspected(pid=int(facts["State"]["Pid"]), env=env, folders=folders)

    async def images(self) -> list[tuple[str, str, str, str]]:
        """Repository, tag, digest and id of each local image; `<none>` for an unset one. Raises: RuntimeFailed,
        RuntimeUnavailable."""
        form = "{{.Repository}}\t{{.Tag}}\t{{.Digest}}\t{{.ID}}"
        listed = await self._done("image", "ls", "--no-trunc", "--digests", "--format", form)
        rows = [line.split("\t") for line in listed.splitlines()]
        return [(row[0], row[1], row[2], row[3]) for row in rows if len(row) == 4]

    # -- images: see `ImageStore` --------------------------------------------------------------------------------

    async def find(self, image: str) -> HeldImage | None:
        code, printed, complaint = await self._said("image", "inspect", checked_image(image, self.name))
        if code != 0 and _NO_IMAGE.search(complaint):
            return None
        if code != 0:
            raise RuntimeFailed(f"{self.name} image inspect: {complaint}")
        facts: Any = msgspec.json.decode(printed)[0]
        image_id = str(facts["Id"]).removeprefix("sha256:")
        digests = [str(one).rpartition("@") for one in facts.get("RepoDigests") or ()]
        own = [digest for name, _, digest in digests if _repository(name) == _repository(image)]
        others = [digest for _, _, digest in digests]
        digest = next(iter((*own, *others)), f"sha256:{image_id}")
        tags = tuple(map(str, facts.get("RepoTags") or ()))
        return HeldImage(image_id=image_id, digest=digest, size_bytes=int(facts.get("Size") or 0), tags=tags)

    async def pull(self, image: str) -> None:
        code, _, complaint = await self._said("pull", "--quiet", checked_image(image, self.name), patience_s=_PULL_S)
        if code != 0:
            raise RuntimeFailed(complaint)

    async def layers(self, image: str) -> dict[str, int]:
        printed = await self._done("history", "--no-trunc", "--human=false", "--format", "{{json .}}", image)
        steps: list[Any] = []
        for line in printed.splitlines():
            told = msgspec.json.decode(line)
            steps += told if isinstance(told, list) else [told]  # podman's are in one list
        found: dict[str, int] = {}
        below = ""
        for step in reversed(steps):
            size = int(step.get("Size") or step.get("size") or 0)
            made = f"{step.get('created') or step.get('CreatedAt')} {step.get('CreatedBy')}"
            # An engine names no layers here: one is known by how it was made, on top of which others.
            below = hashlib.sha256(f"{below} {size} {made}".encode()).hexdigest()
            if size:
                found[below] = size
        return found

    async def image_ids(self) -> frozenset[str]:
        listed = await self._done("image", "ls", "--all", "--no-trunc", "--quiet")
        return frozenset(line.removeprefix("sha256:") for line in listed.split())

    async def remove_image(self, image: str) -> bool:
        return (await self._said("image", "rm", image))[0] == 0

    async def containers(self, labels: Sequence[str]) -> dict[str, str]:
        """Name -> runtime id, for each of our containers with all these labels, running or not.

        Raises: RuntimeFailed.
        """
        filters = [piece for label in labels for piece in ("--filter", f"label={label}")]
        names = await self._done("ps", "--all", *filters, "--format", "{{.Names}}")
        return {name: match[1] for name in names.split() if (match := _NAME.fullmatch(name))}

    async def _done(self, *argv: str, folder: Path | None = None) -> str:
        """Returns its output. Raises: RuntimeFailed."""
        code, printed, complaint = await self._said(*argv, folder=folder)
        if code != 0:
            raise RuntimeFailed(f"{self.name} {argv[0]}: {complaint}")
        return printed

    async def _said(
        self, *argv: str, folder: Path | None = None, patience_s: float = _PATIENCE_S
    ) -> tuple[int, str, str]:
        """Exit code, output, error output. Raises: RuntimeUnavailable, RuntimeFailed when it does not end."""
        async with self.program(*argv, folder=folder) as process:
            try:
                async with asyncio.timeout(patience_s):
                    printed, complaint = await process.communicate()
            except TimeoutError:
                raise RuntimeFailed(f"{self.name} {argv[0]} took longer than {patience_s:.0f} s.") from None
        assert process.returncode is not None
        return process.returncode, printed.decode(errors="replace"), complaint.decode(errors="replace").strip()

    @asynccontextmanager
    async def program(self, *argv: str, folder: Path | None = None) -> AsyncGenerator[asyncio.subprocess.Process]:
        """Run the engine's command line with pipes for its output; it ends with the block.

        Raises: RuntimeUnavailable.
        """
        async with AsyncExitStack() as stack:
            try:
                process = await stack.enter_async_context(
                    program(
                        *self._command, *argv, env=engine_environment(), folder=folder, stderr=asyncio.subprocess.PIPE
                    )
                )
            except OSError as error:
                raise RuntimeUnavailable(
                    f"{self._command[0]} cannot be started ({error.strerror}). Install {self.name}, "
                    f"or name its command line in GANGLINE_{self.name.upper()}."
                ) from error
            yield process


def _repository(image: str) -> str:
    return full_name(image.partition("@")[0]).rpartition(":")[0]


def container_name(runtime_id: str, part: str | None = None) -> str:
    """`part`: `service-N` or `network-N` for the Nth service; None is the agent's container."""
    return f"gangline-{runtime_id}" if part is None else f"gangline_{part}-{runtime_id}"


def checked_image(image: str | None, engine: str) -> str:
    """Raises: InvalidRequest when the image is missing, or is not an image name."""
    if image is None:
        raise InvalidRequest(f"runtime.image: runtime `{engine}` needs an image; set one, such as debian:12.")
    if not is_image_name(image):
        raise InvalidRequest(f"runtime.image must be the name of an image, such as debian:12; got {image[:200]!r}.")
    return image
