"""Sessions over many images of one registry, on two nodes with a Docker engine each: what came of them, and who pulled
what, by the registry's own log.

The images share layers: one base, a layer for each family of ten, a layer of their own. The caches hold a part of
them. Meanwhile the registry is killed and slowed.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import aiohttp

from containers.engines import docker_engine
from gangline.wire.client.server import ServerClient
from support.service.cli_process import COMMAND, GIVE_UP_S, clean_environment, wait_for

__all__ = ["BuiltImage", "JudgedImages", "judge_images"]

_TOKEN = "control-secret"
_HOST = "images.invalid"
"""Tasks name this registry; each node has a mirror of its own for it, so the registry's log tells them apart."""
_PROGRAMS = ("cat", "chmod", "chown", "mkdir", "sleep")
_OF_FAMILY_BYTES, _OWN_BYTES = 1_500_000, 700_000
_TYPES = {
    "manifest": "application/vnd.oci.image.manifest.v1+json",
    "config": "application/vnd.oci.image.config.v1+json",
    "layer": "application/vnd.oci.image.layer.v1.tar+gzip",
}
_CONFIG = """
version: 0.1
log: {{level: info, formatter: json}}
storage: {{filesystem: {{rootdirectory: {folder}/data}}}}
http: {{net: unix, addr: {folder}/socket}}
"""
_RUN_SLOTS = 2
_SIZES = ("--run-slots", str(_RUN_SLOTS), "--ready-slots", "4", "--init-workers", "2", "--pulls-at-once", "3")
_FORWARDER = """
import asyncio, signal, sys
port, path = int(sys.argv[1]), sys.argv[2]
pause_s = 0.0
def slow(seconds):
    global pause_s
    pause_s = seconds
async def copy(reader, writer):
    try:
        while data := await reader.read(16384):
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(pause_s)
    except OSError:
        pass
    finally:
        writer.close()
async def forward(reader, writer):
    try:
        there = await asyncio.open_unix_connection(path)
    except OSError:
        return writer.close()
    await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))
async def main():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, slow, 0.2)
    loop.add_signal_handler(signal.SIGUSR2, slow, 0.0)
    async with await asyncio.start_server(forward, "127.0.0.1", port) as server:
        print("ready", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""
"""In an engine's network. Slowed, a connection gets 80 kB/s."""


class BuiltImage(NamedTuple):
    name: str
    digest: str
    """Of its manifest."""
    config: str
    """Digest of its configuration, which is its id in an engine."""
    layers: Mapping[str, int]
    """Digest -> bytes, as they are sent."""


class _Layer(NamedTuple):
    data: bytes
    """As it is sent: compressed."""
    content: str
    """Digest of the content."""
    num_bytes: int
    """Of the content."""


class JudgedImages(NamedTuple):
    """What came of a run."""

    num_sessions: int
    outcomes: Mapping[str, int]
    num_wrong: int
    """Sessions that ran in another image than their task names, by the image's content or digest."""
    seconds: float
    num_pulls: int
    """Images, by the engines' events."""
    num_removed: int
    num_sent: int
    """Layers that the registry sent whole."""
    num_holdings: int
    """Of a layer on a node: from when its engine has it until its last image is removed."""
    worst: float
    """Most times that one layer was sent to one node for each of its holdings there."""
    num_retried: int
    """Pulls that nodes tried again."""
    max_waiting: int
    """Sessions that waited for images at once."""
    run_slots_held: int
    """RUN slots of a node that were never used while a session of its waited: 0, unless waiting takes one."""

    @property
    def sent_per_holding(self) -> float:
        return self.num_sent / self.num_holdings


# -- images ------------------------------------------------------------------------------------------------------------


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _layer(files: Mapping[str, bytes]) -> _Layer:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    content = archive.getvalue()
    return _Layer(gzip.compress(content, 1, mtime=0), _digest(content), sum(map(len, files.values())))


def _root() -> dict[str, bytes]:
    """A shell, what the runtime's first process calls, and their libraries."""
    programs = {"bin/sh": Path("/bin/sh"), **{f"bin/{name}": Path("/usr/bin", name) for name in _PROGRAMS}}
    needed = subprocess.run(["ldd", *programs.values()], capture_output=True, text=True, check=True).stdout
    libraries = {found.lstrip("/"): Path(found) for found in re.findall(r"(/lib\S+)", needed)}
    return {path: file.resolve().read_bytes() for path, file in {**programs, **libraries}.items()}


class _Store:
    """Pushes images to a registry on a socket."""

    def __init__(self, socket: Path) -> None:
        self._http = aiohttp.ClientSession("http://registry", connector=aiohttp.UnixConnector(str(socket)))
        self._first: dict[str, str] = {}
        """Blob -> an image that has it."""
        self.num_bytes: dict[str, int] = {}
        """Of each layer's content."""

    async def push(self, name: str, layers: Sequence[_Layer]) -> BuiltImage:
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Env": ["PATH=/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [layer.content for layer in layers]},
            }
        ).encode()
        described = [("config", config), *(("layer", layer.data) for layer in layers)]
        for _, data in described:
            await self._blob(name, data)
        first, *others = [
            {"mediaType": _TYPES[kind], "digest": _digest(data), "size": len(data)} for kind, data in described
        ]
        body = {"schemaVersion": 2, "mediaType": _TYPES["manifest"], "config": first, "layers": others}
        manifest = json.dumps(body).encode()
        await self._done("PUT", f"/v2/{name}/manifests/1", data=manifest, headers={"Content-Type": _TYPES["manifest"]})
        sizes = {_digest(layer.data): len(layer.data) for layer in layers}
        self.num_bytes |= {layer.content: layer.num_bytes for layer in layers}
        return BuiltImage(name, _digest(manifest), _digest(config), sizes)

    async def _blob(self, name: str, data: bytes) -> None:
        digest = _digest(data)
        given = {"mount": digest, "from": self._first[digest]} if digest in self._first else {}
        self._first.setdefault(digest, name)
        status, place = await self._done("POST", f"/v2/{name}/blobs/uploads/", params=given)
        if status != 201:
            path = re.sub(r"^https?://[^/]+", "", place)
            await self._done("PUT", f"{path}&digest={digest}", data=io.BytesIO(data))

    async def _done(self, method: str, path: str, **given: Any) -> tuple[int, str]:
        async with self._http.request(method, path, **given) as reply:
            assert reply.status < 300, await reply.text()
            return reply.status, reply.headers.get("Location", "")

    async def close(self) -> None:
        await self._http.close()


async def _built(socket: Path, num_images: int) -> tuple[list[BuiltImage], int]:
    """Images in the registry, and the bytes that all of them take in an engine."""
    store, chance = _Store(socket), random.Random(0)
    base = _layer(_root())
    families = [
        _layer({f"family/{number}": chance.randbytes(_OF_FAMILY_BYTES)}) for number in range((num_images + 9) // 10)
    ]
    try:
        images: list[BuiltImage] = []
        for number in range(num_images):
            own = _layer({"name": f"swe{number}".encode(), "own": chance.randbytes(_OWN_BYTES)})
            images.append(await store.push(f"swe{number}", (base, families[number // 10], own)))
        return images, sum(store.num_bytes.values())
    finally:
        await store.close()


# -- the registry and the engines --------------------------------------------------------------------------------------


class _Registry:
    def __init__(self, folder: Path) -> None:
        self.socket = folder / "socket"
        self._folder = folder
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "config.yml").write_text(_CONFIG.format(folder=folder))

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["docker-registry", "serve", self._folder / "config.yml"], stdout=log, stderr=log
            )
        wait_for(self.socket.exists)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def sent(self, sizes: Mapping[str, int]) -> Counter[tuple[str, str]]:
        """Node's mirror and layer -> how often the layer was sent whole."""
        found = Counter[tuple[str, str]]()
        for line in self._log.read_text().splitlines():
            if '"response completed"' not in line:
                continue
            one = json.loads(line)
            digest = one["http.request.uri"].rpartition("/")[2]
            whole = one["http.response.status"] == 200 and one["http.response.written"] == sizes.get(digest)
            if one["http.request.method"] == "GET" and whole:
                found[one["http.request.host"], digest] += 1
        return found


class _Engine(NamedTuple):
    docker: str
    """Its command."""
    mirror: str
    forwarder: subprocess.Popen[bytes]
    events: Path

    def holdings(self, images: Sequence[BuiltImage]) -> tuple[Counter[str], int, int]:
        """Layer -> how often it came to be held; and how many images were pulled and removed."""
        by_name = {f"{self.mirror}/{one.name}:1": one for one in images}
        by_id = {one.config: one for one in images}
        held, found = defaultdict[str, set[str]](set), Counter[str]()
        num_pulls = num_removed = 0
        for line in self.events.read_text().splitlines():
            event = json.loads(line)
            if event["status"] == "pull":
                num_pulls += 1
                one = by_name[event["id"]]
                found.update(layer for layer in one.layers if not held[layer])
                for layer in one.layers:
                    held[layer].add(one.name)
            elif event["status"] == "delete" and event["id"] in by_id:
                num_removed += 1
                one = by_id[event["id"]]
                for layer in one.layers:
                    held[layer].discard(one.name)
        return found, num_pulls, num_removed


@contextmanager
def _engine(folder: Path, name: str, port: int, registry: _Registry) -> Generator[_Engine]:
    with ExitStack() as stack:
        docker = stack.enter_context(docker_engine())["GANGLINE_DOCKER"]
        (host,) = (word for word in shlex.split(docker) if word.startswith("unix://"))
        pid = Path(host.removeprefix("unix://")).with_name("pid").read_text().strip()
        entering = ["nsenter", f"--net=/proc/{pid}/ns/net"]
        subprocess.run([*entering, "ip", "link", "set", "lo", "up"], check=True)
        command = [*entering, sys.executable, "-c", _FORWARDER, str(port), str(registry.socket)]
        forwarder = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(forwarder.kill)
        assert forwarder.stdout is not None
        assert forwarder.stdout.readline()
        events = folder / f"{name}.events"
        with events.open("wb") as file:
            told = [*shlex.split(docker), "events", "--filter", "type=image", "--format", "{{json .}}"]
            teller = stack.enter_context(subprocess.Popen(told, stdout=file))
        stack.callback(teller.kill)
        yield _Engine(docker, f"127.0.0.1:{port}", forwarder, events)


@contextmanager
def _process(log: Path, *arguments: str, **variables: str) -> Generator[dict[str, Any]]:
    """A command of ours; what it says when it is ready."""
    env = clean_environment(GANGLINE_TOKEN=_TOKEN, **variables)
    with log.open("ab") as file:
        process = subprocess.Popen([*COMMAND, *arguments, "--json"], stdout=subprocess.PIPE, stderr=file, env=env)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text()[-2000:]
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait(GIVE_UP_S)
        process.stdout.close()


# -- sessions ----------------------------------------------------------------------------------------------------------


def _task(number: int, image: BuiltImage) -> dict[str, Any]:
    command = f'sleep 3 && test "$(cat /name)" = {image.name}'
    return {
        "task_id": f"images-{number}",
        "instruction": "x",
        "max_attempts": 1,
        "runtime": {"backend": "docker", "image": f"{_HOST}/{image.name}:1", "network": "none"},
        "agent": {"harness": "shell", "settings": {"command": command}, "allow_no_model_call": True},
    }


class _Watch:
    """What the server tells meanwhile."""

    def __init__(self, client: ServerClient) -> None:
        self.max_waiting = self.max_run_meanwhile = 0
        self.num_ended = 0
        self._client = client

    async def run(self) -> None:
        while True:
            leased = (await self._client.sessions(state="leased", limit=1000)).sessions
            waiting = Counter(one.node_id for one in leased if one.waits_for is not None)
            run = Counter(one.node_id for one in leased if one.stage == "run")
            self.max_waiting = max(self.max_waiting, waiting.total())
            self.max_run_meanwhile = max(self.max_run_meanwhile, *(run[node] for node in waiting), 0)
            self.num_ended = (await self._client.status()).sessions.get("ended", 0)
            await asyncio.sleep(0.5)

    async def until(self, num_ended: int) -> None:
        while self.num_ended < num_ended:
            await asyncio.sleep(0.2)


async def _disturb(registry: _Registry, engines: Sequence[_Engine], watch: _Watch, num_sessions: int) -> None:
    """Killed, slowed, killed and slowed, at one fifth of the sessions each."""
    for fifth, kind in enumerate(("killed", "slowed", "killed", "slowed"), 1):
        await watch.until(fifth * num_sessions // 5)
        if kind == "killed":
            await asyncio.to_thread(registry.kill)
            await asyncio.sleep(12.0)  # an outage, not a wait
            await asyncio.to_thread(registry.start)
        else:
            for signal_number, lasts_s in ((signal.SIGUSR1, 20.0), (signal.SIGUSR2, 0.0)):
                for engine in engines:
                    engine.forwarder.send_signal(signal_number)
                await asyncio.sleep(lasts_s)  # for so long


@asynccontextmanager
async def _service(folder: Path, engines: Sequence[_Engine], cache_gb: float) -> AsyncGenerator[ServerClient]:
    with ExitStack() as stack:
        server = stack.enter_context(
            _process(folder / "server.log", "server", "--data", str(folder / "data"), "--port", "0")
        )
        for number, engine in enumerate(engines):
            arguments = ["--server", server["server_url"], "--data", str(folder / "data"), "--id", f"node-{number}"]
            arguments += ["--engines-later", "--runtimes", "docker", *_SIZES, "--image-cache-gb", f"{cache_gb:.6f}"]
            variables = {"GANGLINE_DOCKER": engine.docker, "GANGLINE_IMAGE_MIRRORS": json.dumps({_HOST: engine.mirror})}
            log = folder / f"node-{number}.log"
            stack.enter_context(_process(log, "node", *arguments, "--port", "0", **variables))
        async with ServerClient(server["server_url"], _TOKEN) as client:
            yield client


async def judge_images(
    folder: Path, *, num_images: int, num_sessions: int, cached_part: float, give_up_s: float
) -> JudgedImages:
    """Needs root, Docker and docker-registry. cached_part: of the bytes of all layers, what a node may keep."""
    (folder / "registry").mkdir()
    registry = _Registry(folder / "registry")
    with ExitStack() as stack:
        stack.callback(registry.kill)
        registry.start()
        images, num_bytes = await _built(registry.socket, num_images)
        with tarfile.open(folder / "base.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo("empty"))
        stack.enter_context(patch.dict(os.environ, {"GANGLINE_TEST_BASE": str(folder / "base.tar")}))
        engines = [
            stack.enter_context(_engine(folder, f"node-{number}", 20_501 + number, registry)) for number in range(2)
        ]
        sizes = {layer: size for one in images for layer, size in one.layers.items()}
        chance = random.Random(1)
        chosen = [*images, *chance.choices(images, k=num_sessions - num_images)]
        chance.shuffle(chosen)
        async with _service(folder, engines, cached_part * num_bytes / 1e9) as client, asyncio.timeout(give_up_s):
            began_at = time.monotonic()
            watch = _Watch(client)
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch.run())
                group.create_task(_disturb(registry, engines, watch, num_sessions))
                for number, image in enumerate(chosen):
                    await client.submit(_task(number, image))
                await watch.until(num_sessions)
                seconds = time.monotonic() - began_at
                watching.cancel()
            results = [await client.result(f"images-{number}") for number in range(num_sessions)]
        sent = registry.sent(sizes)
        told = [engine.holdings(images) for engine in engines]
    outcomes, num_wrong = Counter[str](), 0
    for (result,), image in zip(results, chosen, strict=True):
        outcomes[result.outcome] += 1
        num_wrong += list(result.images.values()) != [image.digest]
    logs = [(folder / f"node-{number}.log").read_text() for number in range(2)]
    held = {
        (engine.mirror, layer): num
        for engine, (found, _, _) in zip(engines, told, strict=True)
        for layer, num in found.items()
    }
    return JudgedImages(
        num_sessions=num_sessions,
        outcomes=outcomes,
        num_wrong=num_wrong,
        seconds=seconds,
        num_pulls=sum(num for _, num, _ in told),
        num_removed=sum(num for _, _, num in told),
        num_sent=sum(sent.values()),
        num_holdings=sum(held.values()),
        worst=max(num / held.get(key, 0.5) for key, num in sent.items()),
        num_retried=sum(log.count("image.retried") for log in logs),
        max_waiting=watch.max_waiting,
        run_slots_held=_RUN_SLOTS - watch.max_run_meanwhile,
    )
