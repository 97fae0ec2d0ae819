"""The keeper: the process that keeps a node's sandboxes alive while the node is away.

Started by the node with the first sandbox (`python -m gangline.sandbox.keeper.keeper`), in its own session. It owns
everything that must outlive the node: the processes that hold namespaces, the supervisors of commands and their output,
the listeners inside the sandboxes, and the listening socket of the agents' port, in whose backlog calls wait for the
node's next start.

Laws
- Nothing outlives the node by more than the grace. A node that stops normally ends the keeper. When the connection is
  lost, sandboxes that were not meant to outlive the node are removed at once, and the others after the grace.
- The node periodically lists the sandboxes that it holds, in order with its requests. Any other sandbox is stopped,
  whether the node lost it or stopping it failed.
- Nothing outlives the keeper: every sandbox dies with its parent, which is the only thread of this process that starts
  any. Leftovers of a killed keeper (folders, control groups) are reaped by its node.
- It serves one node at a time, of the same user. The next node is served after unfinished work of the last is removed.
- It knows nothing about sessions: the node's note is kept in memory with a sandbox and returned unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import GanglineError, InvalidRequest, RuntimeFailed
from gangline.domain.open_files import out_of_files
from gangline.domain.sandbox import Channel, Checkpoint, ExecResult, Runtime, Sandbox
from gangline.machine.telemetry.logs import LineFormatter
from gangline.sandbox.keeper import wire
from gangline.sandbox.keeper.link import forget, peer_uid
from gangline.settings import plugins

log = logging.getLogger("gangline.keeper")

_UNDISTURBED = (wire.Stop, wire.Kill, wire.Annotate, wire.CloseChannel, wire.Reset, wire.Release, wire.TakeCheckpoint)
"""Requests that are completed even if the node goes away."""


class KeeperOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The start options of a keeper, passed as JSON in its one argument."""

    listening_fd: int
    """Descriptor of the Unix socket where nodes connect."""
    folder: str
    """Folder of that socket."""
    agents_fd: int
    """Descriptor of the listening socket that agents reach."""
    grace_s: float
    """How long a node may be away, in seconds."""


class _Hosted:
    def __init__(self, runtime: str, sandbox: Sandbox) -> None:
        self.runtime = runtime
        self.sandbox = sandbox
        self.note: bytes | None = None
        """None: the sandbox does not outlive the node."""
        self.spent_s = 0.0
        self.run: asyncio.Task[ExecResult] | None = None
        """The command that outlives the node."""
        self.channels: dict[str, Channel] = {}
        """By id: open ones, and ended ones that are not closed."""

    @property
    def facts(self) -> wire.Facts:
        sandbox = self.sandbox
        return wire.Facts(
            runtime_id=sandbox.runtime_id,
            workdir=sandbox.workdir,
            home=sandbox.home,
            grader_home=sandbox.grader_home,
            proxy_url=sandbox.proxy_url,
            limits=sandbox.limits(),
        )


class _Keeper:
    def __init__(self, listening: socket.socket, agents: socket.socket, grace_s: float) -> None:
        self.sandboxes: dict[str, _Hosted] = {}
        self.runtimes: dict[str, Runtime] = {}
        """By name; created on first use."""
        self.checkpoints: dict[str, Checkpoint] = {}
        """Checkpoints that were not released. They end with this process."""
        self.grace_s = grace_s
        self._listening = listening
        self._agents = agents
        self._forgetting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve one node after another, until one ends this process or none connects within the grace."""
        node = await self._next_node(self.grace_s)
        while node is not None:
            with node:
                is_over = await self._serve(node)
                await self._stop(hosted for hosted in self.sandboxes.values() if is_over or hosted.note is None)
                if not self.sandboxes:
                    await self._release_all()
            if not self.sandboxes:
                return
            log.warning("keeper.node_lost kept=%d grace_s=%g", len(self.sandboxes), self.grace_s)
            node = await self._next_node(self.grace_s)

    def forget_all_but(self, held: Collection[str]) -> None:
        """Stop all sandboxes that the node does not hold."""
        forgotten = [one for runtime_id, one in self.sandboxes.items() if runtime_id not in held]
        if forgotten:
            log.warning("keeper.forgotten runtimes=%s", [one.sandbox.runtime_id for one in forgotten])
            task = asyncio.create_task(self._stop(forgotten))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._forgetting)
        if self.sandboxes:
            log.warning("keeper.gave_up kept=%d", len(self.sandboxes))
        await self._stop(self.sandboxes.values())
        await self._release_all()

    def runtime(self, name: str) -> Runtime:
        """Raises: UnknownPlugin."""
        runtime = self.runtimes.get(name)
        if runtime is None:
            runtime = self.runtimes[name] = plugins.make_runtime(name)
        return runtime

    async def release(self, checkpoint: Checkpoint) -> None:
        await self.runtime(checkpoint.runtime).release(checkpoint)
        self.checkpoints.pop(checkpoint.checkpoint_id, None)

    async def _release_all(self) -> None:
        for checkpoint in tuple(self.checkpoints.values()):
            await self.release(checkpoint)

    async def _next_node(self, patience_s: float) -> socket.socket | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while True:
                    node, _ = await asyncio.get_running_loop().sock_accept(self._listening)
                    if peer_uid(node) == os.geteuid():
                        return node
                    node.close()
        return None

    async def _serve(self, node: socket.socket) -> bool:
        """Serve a node until it disconnects. Returns whether it ended this keeper."""
        descriptors, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors.setblocking(False)
        with descriptors:
            return await self._serve_with(descriptors, theirs, node)

    async def _serve_with(self, descriptors: socket.socket, theirs: socket.socket, node: socket.socket) -> bool:
        try:
            with theirs:
                socket.send_fds(node, [b"k"], [self._agents.fileno(), theirs.fileno()])
            reader, writer = await asyncio.open_connection(sock=node.dup())
        except OSError:
            return False
        kept = [
            wire.Kept(
                runtime=hosted.runtime,
                facts=hosted.facts,
                note=hosted.note,
                spent_s=hosted.spent_s,
            )
            for hosted in self.sandboxes.values()
            if hosted.note is not None
        ]
        hello = wire.Hello(version=wire.VERSION, kept=tuple(kept), checkpoints=tuple(self.checkpoints.values()))
        wire.write_message(writer, hello)
        service = _Service(self, writer, descriptors)
        try:
            return await service.serve(reader)
        finally:
            await service.close()
            writer.close()

    async def _stop(self, sandboxes: Iterable[_Hosted]) -> None:
        """Stop sandboxes. The reaper removes any that cannot be stopped."""
        stopping = tuple(sandboxes)
        for hosted in stopping:
            del self.sandboxes[hosted.sandbox.runtime_id]
        for error in await asyncio.gather(*(one.sandbox.stop() for one in stopping), return_exceptions=True):
            if error is not None:
                log.error("keeper.not_stopped message=%s", error)


class _Service:
    """The requests of one node, one task each."""

    def __init__(self, keeper: _Keeper, writer: asyncio.StreamWriter, descriptors: socket.socket) -> None:
        self._keeper = keeper
        self._writer = writer
        self._descriptors = descriptors
        self._tasks: dict[int, tuple[wire.Request, asyncio.Task[Any]]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> bool:
        while (message := await wire.read_message(reader, wire.FROM_NODE)) is not None:
            match message:
                case wire.Asked(number, request):
                    task = asyncio.create_task(self._do(number, request))
                    self._tasks[number] = (request, task)
                    task.add_done_callback(partial(self._answer, number))
                case wire.Cancel(number):
                    self._cancel(number)
                case wire.Tell():
                    if message.runtime_id in self._keeper.sandboxes:
                        self._keeper.sandboxes[message.runtime_id].spent_s = message.spent_s
                case wire.Held(runtime_ids):
                    self._keeper.forget_all_but(frozenset(runtime_ids))
                case wire.Stopping():
                    self._keeper.grace_s = 0.0
                case wire.End():
                    return True
        return False

    def _cancel(self, number: int) -> None:
        request, task = self._tasks.get(number, (None, None))
        if task is None or isinstance(request, _UNDISTURBED):
            return
        if isinstance(request, (wire.Exec, wire.Rejoin)):
            hosted = self._keeper.sandboxes.get(request.runtime_id)
            if hosted is not None and hosted.run is not None and not _is_short(request):
                hosted.run.cancel()
                return
        task.cancel()

    async def close(self) -> None:
        """Undo the pending requests of a disconnected node, and close its channels. Commands that outlive it go on."""
        for request, task in tuple(self._tasks.values()):
            if not isinstance(request, _UNDISTURBED):
                task.cancel()
        await asyncio.gather(*(task for _, task in tuple(self._tasks.values())), return_exceptions=True)
        kept = [hosted for hosted in self._keeper.sandboxes.values() if hosted.note is not None]
        channels = [channel for hosted in kept for channel in hosted.channels.values()]
        await asyncio.gather(*(channel.close() for channel in channels), return_exceptions=True)

    def _answer(self, number: int, done: asyncio.Task[Any]) -> None:
        del self._tasks[number]
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            wire.write_message(self._writer, wire.Answered(number, msgspec.Raw(wire.encode(done.result()))))
            return
        if not isinstance(error, (GanglineError, asyncio.CancelledError)):  # last resort of this process
            log.error("keeper.internal_error", exc_info=error)
        known = out_of_files(error) or error
        reported = known if isinstance(known, GanglineError) else RuntimeFailed(f"{type(error).__name__}: {error}")
        wire.write_message(self._writer, wire.refusal(number, reported))

    async def _do(self, number: int, request: wire.Request) -> Any:
        """Raises: the runtime's errors."""
        match request:
            case wire.Start():
                return await self._start(request)
            case wire.Exec():
                return await self._exec(number, request)
            case wire.Rejoin():
                return await _ended(self._hosted(request.runtime_id))
            case wire.OpenChannel():
                await self._open_channel(request)
            case wire.ChannelEnd():
                return await self._channel(request).ended()
            case wire.CloseChannel():
                await self._close_channel(request)
            case wire.Annotate():
                self._hosted(request.runtime_id).note = request.note
            case wire.Upload():
                sandbox = self._hosted(request.runtime_id).sandbox
                await sandbox.upload(request.path, request.data, mode=request.mode)
            case wire.Download():
                sandbox = self._hosted(request.runtime_id).sandbox
                return await sandbox.download(request.path, max_bytes=request.max_bytes)
            case wire.Clear():
                await self._hosted(request.runtime_id).sandbox.clear(request.path)
            case wire.Kill():
                await self._hosted(request.runtime_id).sandbox.kill(grace_s=request.grace_s)
            case wire.TakeCheckpoint():
                made = await self._hosted(request.runtime_id).sandbox.checkpoint(request.name)
                self._keeper.checkpoints[made.checkpoint_id] = made
                return made
            case wire.Reset():
                await self._hosted(request.runtime_id).sandbox.reset(request.checkpoint)
            case wire.Release():
                await self._keeper.release(request.checkpoint)
            case wire.AskUsage():
                return await self._hosted(request.runtime_id).sandbox.usage()
            case wire.Stop():
                hosted = self._keeper.sandboxes.get(request.runtime_id)
                if hosted is not None:
                    await hosted.sandbox.stop()
                    self._keeper.sandboxes.pop(request.runtime_id, None)
        return None

    def _hosted(self, runtime_id: str) -> _Hosted:
        """Raises: RuntimeFailed."""
        hosted = self._keeper.sandboxes.get(runtime_id)
        if hosted is None:
            raise RuntimeFailed(f"sandbox {runtime_id} was stopped.")
        return hosted

    async def _start(self, request: wire.Start) -> wire.Facts:
        if request.start.runtime_id in self._keeper.sandboxes:
            raise InvalidRequest(f"a sandbox {request.start.runtime_id} is running already.")
        sandbox = await self._keeper.runtime(request.runtime).start(request.start)
        hosted = self._keeper.sandboxes[sandbox.runtime_id] = _Hosted(request.runtime, sandbox)
        return hosted.facts

    async def _exec(self, number: int, request: wire.Exec) -> ExecResult:
        hosted = self._hosted(request.runtime_id)
        command = hosted.sandbox.run(request.request, self._sink(number) if request.streams else None)
        if _is_short(request):
            return await command
        hosted.note = request.note
        hosted.run = asyncio.create_task(command)
        hosted.run.add_done_callback(_seen)
        return await _ended(hosted)

    async def _open_channel(self, request: wire.OpenChannel) -> None:
        hosted = self._hosted(request.runtime_id)
        channel = await hosted.sandbox.open_channel(request.request)
        hosted.channels[request.channel_id] = channel
        try:
            self._share(request.channel_id, channel)
        except RuntimeFailed:
            await self._close_channel(request)
            raise

    def _share(self, channel_id: str, channel: Channel) -> None:
        """Give the node a duplicate of our end. Raises: RuntimeFailed."""
        try:
            socket.send_fds(self._descriptors, [channel_id.encode()], [channel.fileno()])
        except OSError as error:
            raise RuntimeFailed(f"a channel could not be handed over: {error}.") from error

    def _channel(self, request: wire.ChannelEnd) -> Channel:
        """Raises: RuntimeFailed."""
        channel = self._hosted(request.runtime_id).channels.get(request.channel_id)
        if channel is None:
            raise RuntimeFailed(f"sandbox {request.runtime_id} has no channel {request.channel_id}.")
        return channel

    async def _close_channel(self, request: wire.CloseChannel | wire.OpenChannel) -> None:
        hosted = self._keeper.sandboxes.get(request.runtime_id)
        channel = None if hosted is None else hosted.channels.pop(request.channel_id, None)
        if channel is not None:
            await channel.close()

    def _sink(self, number: int) -> Callable[[Any, bytes], None]:
        return lambda stream, data: wire.write_message(self._writer, wire.Output(number, stream, data))


def _is_short(request: wire.Exec | wire.Rejoin) -> bool:
    """Whether the command ends with the node."""
    return isinstance(request, wire.Exec) and request.note is None


async def _ended(hosted: _Hosted) -> ExecResult:
    """Wait for the command without owning it. Raises: RuntimeFailed."""
    if hosted.run is None:
        raise RuntimeFailed(f"no command of sandbox {hosted.sandbox.runtime_id} was to be waited for.")
    await asyncio.wait({hosted.run})
    return hosted.run.result()


def _seen(task: asyncio.Task[ExecResult]) -> None:
    """Mark its error as retrieved, since it may never be awaited."""
    if not task.cancelled():
        task.exception()


async def _keep(order: KeeperOrder) -> None:
    listening = socket.socket(fileno=order.listening_fd)
    agents = socket.socket(fileno=order.agents_fd)
    listening.setblocking(False)
    keeper = _Keeper(listening, agents, order.grace_s)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await keeper.run()
    finally:
        forget(Path(order.folder))
        listening.close()
        await keeper.close()


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)


def main() -> None:
    _log_to_stderr()
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_keep(msgspec.json.decode(sys.argv[1], type=KeeperOrder)))


if __name__ == "__main__":
    main()
