"""The node's side of its keeper: runtimes whose sandboxes live there, and the sandboxes that outlived the node.

When a keeper dies, so do its sandboxes, which then raise `RuntimeFailed`. Its leftovers are reaped when the next
sandbox starts another keeper.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from gangline.domain.errors import RuntimeFailed
from gangline.domain.ids import new_id
from gangline.domain.sandbox import (
    Checkpoint,
    ExecRequest,
    ExecResult,
    OutputSink,
    Runtime,
    RuntimeStart,
    Sandbox,
)
from gangline.domain.usage import Usage
from gangline.sandbox.commands.channel import SocketChannel
from gangline.sandbox.keeper import wire
from gangline.sandbox.keeper.keeper import KeeperOrder
from gangline.sandbox.keeper.link import Link, connect, forget, listen
from gangline.sandbox.shared.leftovers import LABEL, kill_labelled
from gangline.settings import plugins

log = logging.getLogger("gangline.keeper")

_END_S = 30.0
"""How long a keeper may take to stop everything, in seconds."""


def reap_keeper(owner: str) -> None:
    """Kill this node's keeper, and with it all its sandboxes. Blocking."""
    kill_labelled(_label(owner).__eq__)


def _label(owner: str) -> str:
    return f"{owner}/keeper/keeper"


def _environment(owner: str) -> dict[str, str]:
    """The node's environment, from which runtimes read their settings, without the keys of the control plane."""
    return {name: value for name, value in os.environ.items() if name != "GANGLINE_TOKEN"} | {LABEL: _label(owner)}


class Keeper:
    """Call `join` before use, and `close` or `leave` at the end."""

    def __init__(self, folder: Path, *, owner: str, runtimes_folder: Path, grace_s: float) -> None:
        """
        folder: for its socket and its log.
        owner: label of the node, the same after a restart.
        runtimes_folder: contains the folders of all sandboxes of the node.
        grace_s: how long it keeps sandboxes when this process is gone; 0: no keeper.
        """
        self.kept: list[KeptSandbox] = []
        """Sandboxes left by an earlier process of this node, with the commands that were to outlive it."""
        self.checkpoints: list[Checkpoint] = []
        """Checkpoints left by an earlier process of this node."""
        self._folder = folder
        self._owner = owner
        self._runtimes_folder = runtimes_folder
        self._grace_s = grace_s
        self._held: dict[object, str] = {}
        """Ids of sandboxes, each under a separate key, since an id may come again. An entry lasts from the request for
        a sandbox until it is stopped or its `KeptSandbox` is garbage."""
        self._plugins: dict[str, Runtime] = {}
        """By name; created on first use."""
        self._agents: socket.socket | None = None
        self._link: Link | None = None
        self._lock = asyncio.Lock()
        self._pid: int | None = None
        """Process id of the keeper, if it is our child."""

    async def join(self, bind: Callable[[], socket.socket]) -> socket.socket:
        """Connect to the keeper of an earlier process of this node. If there is none, one is started when needed.

        Returns the listening socket of the agents' port: the earlier one, or the one that `bind` makes. The caller
        closes it at the end.
        """
        begun = await connect(self._folder)
        if begun is None:
            await self._end_process()
            self._agents = bind()
        else:
            self._link, self._agents = begun.link, begun.agents
            self.checkpoints = list(begun.hello.checkpoints)
            self.kept = [KeptSandbox(self, begun.link, one.facts, one) for one in begun.hello.kept]
        return self._agents

    async def start(self, runtime: str, start: RuntimeStart) -> Sandbox:
        """Start a sandbox of the named runtime: in the keeper, if the runtime supports it.

        Raises: UnknownPlugin, RuntimeFailed, and the runtime's errors.
        """
        plugin = self._plugin(runtime)
        if self._grace_s <= 0 or not plugin.is_keepable:
            return await plugin.start(start)
        link = await self._living()
        asking = object()
        self._held[asking] = start.runtime_id
        try:
            facts = await link.ask(wire.Start(runtime=runtime, start=start), wire.Facts)
            return KeptSandbox(self, link, facts)
        except asyncio.CancelledError:
            with suppress(RuntimeFailed):  # it may just have started
                await link.ask(wire.Stop(runtime_id=start.runtime_id), None)
            raise
        finally:
            del self._held[asking]

    async def release(self, checkpoint: Checkpoint) -> None:
        """See `Runtime.release`. If the keeper is gone, so is the checkpoint."""
        plugin = self._plugin(checkpoint.runtime)
        if self._grace_s > 0 and plugin.is_keepable:
            if self._link is not None and not self._link.is_lost:
                await self._link.ask(wire.Release(checkpoint=checkpoint), None)
        else:
            await plugin.release(checkpoint)

    def _plugin(self, name: str) -> Runtime:
        """Raises: UnknownPlugin."""
        plugin = self._plugins.get(name)
        if plugin is None:
            plugin = self._plugins[name] = plugins.make_runtime(name)
        return plugin

    def hold(self, sandbox: KeptSandbox) -> Callable[[], object]:
        """Keep it until the object is garbage-collected, or the returned function is called."""
        key = object()
        self._held[key] = sandbox.runtime_id
        let_go = weakref.finalize(sandbox, self._held.pop, key)
        let_go.atexit = False
        return let_go

    def tell_held(self) -> None:
        """Report the sandboxes still held, so that the keeper stops the others. Call it periodically."""
        if self._link is not None:
            self._link.send(wire.Held(list(self._held.values())))

    def stopping(self) -> None:
        """From here on nothing outlives this process, even if it crashes."""
        if self._link is not None:
            self._link.send(wire.Stopping())

    async def close(self) -> None:
        """End the keeper with all its sandboxes. Idempotent."""
        link, self._link = self._link, None
        if link is not None and not link.is_lost:
            link.send(wire.End())
            await asyncio.wait({link.lost}, timeout=_END_S)
            await link.close()
        await self._end_process()

    async def leave(self) -> None:
        """Disconnect as if this process had died: sandboxes that may outlive it wait for the node's next start."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def settled(self, link: Link) -> None:
        """Returns once nothing is left of the sandboxes behind a lost link."""
        if link is self._link:
            async with self._lock:
                await self._let_go(link)

    # -- one keeper after another --------------------------------------------------------------------------------

    async def _living(self) -> Link:
        """Raises: RuntimeFailed."""
        async with self._lock:
            if self._link is not None and self._link.is_lost:
                await self._let_go(self._link)
            if self._link is None:
                self._link = await self._started()
            return self._link

    async def _let_go(self, link: Link) -> None:
        """Call with the lock held."""
        if link is not self._link:
            return
        log.error("keeper.lost owner=%s", self._owner)
        await self._end_process()
        for plugin in self._plugins.values():
            if plugin.is_keepable:
                await plugin.reap(self._owner, self._runtimes_folder)
        self._link = None

    async def _end_process(self) -> None:
        """Kill the keeper, if it still runs, and reap it."""
        await asyncio.to_thread(reap_keeper, self._owner)
        forget(self._folder)
        if self._pid is not None:
            await asyncio.to_thread(os.waitpid, self._pid, 0)
            self._pid = None

    async def _started(self) -> Link:
        """A new keeper. Raises: RuntimeFailed."""
        log_file = self._folder / "log"
        self._pid = await asyncio.to_thread(self._spawn, log_file)
        begun = await connect(self._folder)
        if begun is None:
            await self._end_process()
            raise RuntimeFailed(f"the node's keeper of sandboxes did not start; it may say why in {log_file}.")
        begun.agents.close()  # already ours
        return begun.link

    def _spawn(self, log_file: Path) -> int:
        """Returns its process id. Its socket listens before it starts, so connecting needs no waiting. Blocking."""
        assert self._agents is not None
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with listen(self._folder) as listening:
            order = KeeperOrder(
                listening_fd=listening.fileno(),
                folder=str(self._folder),
                agents_fd=self._agents.fileno(),
                grace_s=self._grace_s,
            )
            # Not waited for as a child: it may outlive this process.
            return os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", "gangline.sandbox.keeper.keeper", msgspec.json.encode(order).decode()],
                _environment(self._owner),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(log_file), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                    *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in (order.listening_fd, order.agents_fd)),  # inherited
                ],
                setsid=True,
            )


class KeptSandbox(Sandbox):
    """One sandbox that lives in the keeper: the contract's methods, and the methods for outliving the node."""

    def __init__(self, keeper: Keeper, link: Link, facts: wire.Facts, kept: wire.Kept | None = None) -> None:
        """`kept`: its state as an earlier process of the node left it."""
        super().__init__(
            runtime_id=facts.runtime_id,
            workdir=facts.workdir,
            home=facts.home,
            grader_home=facts.grader_home,
            proxy_url=facts.proxy_url,
        )
        self.note = None if kept is None else kept.note
        """The node's note for its next start."""
        self.spent_s = 0.0 if kept is None else kept.spent_s
        """Time used, in seconds, as last reported."""
        self._limits = facts.limits
        self._keeper = keeper
        self._link = link
        self._let_go = keeper.hold(self)

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        asked = wire.Exec(runtime_id=self.runtime_id, request=request, streams=on_output is not None)
        return await self._link.ask(asked, ExecResult, on_output)

    async def open_channel(self, request: ExecRequest) -> KeptChannel:
        channel_id = new_id("channel")
        try:
            await self._link.ask(
                wire.OpenChannel(runtime_id=self.runtime_id, channel_id=channel_id, request=request), None
            )
        except asyncio.CancelledError:
            if (ours := self._link.take(channel_id)) is not None:
                ours.close()
            with suppress(RuntimeFailed):  # it may just have opened
                await self._link.ask(wire.CloseChannel(runtime_id=self.runtime_id, channel_id=channel_id), None)
            raise
        ours = self._link.take(channel_id)
        if ours is None:
            raise RuntimeFailed("the keeper handed no channel over: this process may have too many open files.")
        return KeptChannel(self._link, self.runtime_id, channel_id, ours)

    async def run_lasting(self, request: ExecRequest, note: bytes) -> ExecResult:
        """Run a command that may outlive the node's process by the grace, together with this sandbox. After a restart
        of the node both are in `Keeper.kept`, and `rejoin` waits for the command."""
        return await self._link.ask(wire.Exec(runtime_id=self.runtime_id, request=request, note=note), ExecResult)

    async def rejoin(self) -> ExecResult:
        """Wait for the command that was to outlive the node; it may already have ended. Raises: RuntimeFailed."""
        return await self._link.ask(wire.Rejoin(runtime_id=self.runtime_id), ExecResult)

    async def annotate(self, note: bytes | None) -> None:
        """Replace the note; None: the sandbox ends with the node. Raises: RuntimeFailed."""
        await self._link.ask(wire.Annotate(runtime_id=self.runtime_id, note=note), None)

    def tell_spent(self, spent_s: float) -> None:
        """Report the used budget of the command that outlives the node."""
        self._link.send(wire.Tell(runtime_id=self.runtime_id, spent_s=spent_s))

    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._link.ask(wire.Upload(runtime_id=self.runtime_id, path=path, data=data, mode=mode), None)

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        return await self._link.ask(wire.Download(runtime_id=self.runtime_id, path=path, max_bytes=max_bytes), bytes)

    async def clear(self, path: str) -> None:
        await self._link.ask(wire.Clear(runtime_id=self.runtime_id, path=path), None)

    async def kill(self, *, grace_s: float = 0.0) -> None:
        await self._link.ask(wire.Kill(runtime_id=self.runtime_id, grace_s=grace_s), None)

    async def checkpoint(self, name: str = "") -> Checkpoint:
        return await self._link.ask(wire.TakeCheckpoint(runtime_id=self.runtime_id, name=name), Checkpoint)

    async def reset(self, checkpoint: Checkpoint | None = None) -> None:
        await self._link.ask(wire.Reset(runtime_id=self.runtime_id, checkpoint=checkpoint), None)

    async def stop(self) -> None:
        try:
            await self._link.ask(wire.Stop(runtime_id=self.runtime_id), None)
        except RuntimeFailed:
            if not self._link.is_lost:
                raise
            await self._keeper.settled(self._link)
        finally:
            self._let_go()

    async def usage(self) -> Usage:
        return await self._link.ask(wire.AskUsage(runtime_id=self.runtime_id), Usage)

    def limits(self) -> dict[str, str]:
        return dict(self._limits)


class KeptChannel(SocketChannel):
    """A channel to a command in the keeper, which ends with the node. Its bytes do not pass through the keeper."""

    def __init__(self, link: Link, runtime_id: str, channel_id: str, ours: socket.socket) -> None:
        super().__init__(ours)
        self._link = link
        self._closing = wire.CloseChannel(runtime_id=runtime_id, channel_id=channel_id)
        asked = wire.ChannelEnd(runtime_id=runtime_id, channel_id=channel_id)
        self._ending = asyncio.create_task(link.ask(asked, ExecResult))
        self._ending.add_done_callback(_seen)

    async def close(self) -> None:
        try:
            with suppress(RuntimeFailed):  # gone with its sandbox
                await self._link.ask(self._closing, None)
        finally:
            self.hang_up()

    async def ended(self) -> ExecResult:
        return await asyncio.shield(self._ending)


def _seen(task: asyncio.Task[ExecResult]) -> None:
    """Mark its error as retrieved, since it may never be awaited."""
    if not task.cancelled():
        task.exception()
