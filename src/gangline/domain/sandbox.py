"""The contract of runtimes: subclass `Runtime`, which starts sandboxes, and `Sandbox`, which is one of them.

Every runtime implements the abstract methods. The others are optional, and their defaults report that the runtime lacks
them. `gangline.sandbox.supervised.SupervisedSandbox` is a base class for runtimes on the node's own machine: it runs
commands and moves files, and leaves creating the sandbox to the subclass. `gangline.testing.runtime_conformance` checks
all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import msgspec

from gangline.domain.errors import InvalidRequest, RuntimeFailed, RuntimeUnavailable
from gangline.domain.ids import validated_id
from gangline.domain.image_store import ImageStore
from gangline.domain.task import RuntimeSpec
from gangline.domain.usage import Usage, unmeasured

RuntimeUser = Literal["agent", "grader"]
"""Users of a sandbox, neither of them root. Not every runtime has the second one: see `Sandbox.grader_home`."""

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def in_binary_units(num_bytes: int) -> str:
    """Returns for instance `2 GiB`, `1.5 MiB`, `100 bytes`."""
    power = min(max(0, num_bytes.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{num_bytes / 1024**power:.4g} {_UNITS[power]}"


OutputSink = Callable[[Literal["stdout", "stderr"], bytes], None]
"""Called with each piece of output as it arrives, on the event loop."""


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One command, for `Sandbox.run` and `Sandbox.open_channel`."""

    command: str | Sequence[str]
    """A string is run with `sh -c`."""
    cwd: str | None = None
    """Relative to `workdir`, or absolute inside; None: `workdir`."""
    env: Mapping[str, str] = {}
    """Variables of this command. The command otherwise has only PATH, HOME, LANG, and the variables of the image and of
    the spec's `env`, which these override."""
    stdin: bytes | None = None
    timeout_s: float | None = None
    max_output_bytes: int = 1 << 20
    """Limit for each of stdout and stderr; the front is kept."""
    user: RuntimeUser = "agent"
    """Processes of `agent` cannot signal, trace or read processes of `grader`, whose HOME is `grader_home`."""
    grace_s: float = 0.0
    """On timeout or cancellation, processes get SIGTERM, and SIGKILL after this many seconds if they have not ended."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a command in a runtime. Exactly one of `exit_code`, `signal`, `timed_out` is set."""

    exit_code: int | None
    signal: int | None = None
    timed_out: bool = False
    stdout: bytes = b""
    """Limited; the front is kept, and `truncated` is set if there was more."""
    stderr: bytes = b""
    truncated: bool = False
    duration_s: float = 0.0
    memory_limit_bytes: int | None = None
    """The sandbox's memory limit if the kernel killed the command for it: its first process, or one whose SIGKILL a
    shell reports as its own exit code, 137. None otherwise, and if memory is limited per process: then the kernel
    refuses memory instead, and the program ends in its own way."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def memory_kill(self) -> str:
        """`killed: more than 2 GiB of memory`; empty if memory did not end the command."""
        limit = self.memory_limit_bytes
        return "" if limit is None else f"killed: more than {in_binary_units(limit)} of memory"


CheckpointMethod = Literal["overlay", "frozen_copy", "reflink", "copy"]
"""How a checkpoint was made.

`overlay`: its files became a frozen layer, and the sandbox continues in a new layer above; it had no processes.
`frozen_copy`: copied while all processes of the sandbox were stopped. `reflink`: like `frozen_copy` or `copy`, with a
file system that shares the bytes. `copy`: copied without stopping processes.
"""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a sandbox's writable folders at one time. Processes and the grader's HOME are not part of it."""

    checkpoint_id: str
    """Unique."""
    runtime_id: str
    """The sandbox that it was made from."""
    owner: str
    runtime: str
    """Name of the runtime plug-in."""
    spec_digest: str
    """A sandbox based on it needs the same specification."""
    number: int
    """From 1, counted within its sandbox."""
    name: str
    """As given to `checkpoint`."""
    method: CheckpointMethod
    is_frozen: bool
    """Whether no process of the sandbox ran while it was made; otherwise its files may be from different moments."""
    num_bytes: int
    """Disk usage in bytes, without files that it shares with checkpoints below it."""
    num_files: int
    made_at: float
    """Unix time, UTC, seconds."""
    folder: str
    """On the host, owned by the runtime."""


class RuntimeStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a runtime needs to start one sandbox."""

    runtime_id: str
    """Unique; also the name of the sandbox's folder."""
    owner: str
    """Label of the node; the reaper removes labelled sandboxes that have no lease."""
    spec: RuntimeSpec
    folder: Path
    """On the host, empty, owned by the runtime; removed by `stop`."""
    proxy_port: int | None = None
    """Loopback TCP port of the node's proxy on the host; the sandbox must reach it when `spec.network` is `proxy` or
    `list`."""
    hidden: tuple[Path, ...] = ()
    """Host folders that the sandbox must not see, even inside a folder that it does see."""
    prepare_folders: tuple[Path, ...] = ()
    """Host folders that it sees read-only at the same path until it is first killed, and never again."""
    sharing: str | None = None
    """Sandboxes with the same name, such as the sandboxes of one session, share their GPUs; None: not shared."""
    base: Checkpoint | None = None
    """The sandbox begins with these files: a fork. Its folder is next to that of the checkpoint's sandbox, and its
    owner and specification are the same."""


class Channel(ABC):
    """Our end of a channel to a command in a sandbox: see `Sandbox.channel`.

    A cancelled `read` loses no data. The data of a cancelled `write` is still sent in full.
    """

    @abstractmethod
    async def read(self, max_bytes: int = 1 << 16) -> bytes:
        """Returns at least one byte, at most `max_bytes`; b"" when no process holds the other end, and after
        `close`."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Wait until the data is sent: a slow reader slows this down.

        Raises: RuntimeFailed when no process holds the other end, and after `close`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill the command's whole process tree, unless it has ended by itself. Idempotent."""

    @abstractmethod
    async def ended(self) -> ExecResult:
        """Wait for the command's end. Returns its exit and the front of its stdout and stderr.

        If closed, or killed with its sandbox, it ended by signal 9. Raises: RuntimeFailed when the sandbox is gone.
        """

    def fileno(self) -> int:
        """Returns the socket that a keeper shares with its node. Required of keepable runtimes. Raises:
        RuntimeFailed."""
        raise RuntimeFailed("this runtime's channels cannot be kept: a keepable runtime's have a `fileno`.")


class Sandbox(ABC):
    """One started sandbox."""

    def __init__(
        self,
        *,
        runtime_id: str,
        workdir: str,
        home: str,
        grader_home: str | None = None,
        proxy_url: str | None = None,
    ) -> None:
        """runtime_id: from `RuntimeStart`.
        workdir: inside the sandbox; where that is the host, a real path.
        home: a private HOME inside the sandbox.
        grader_home: HOME of the user `grader`, which no command of the agent can enter; None: there is no such user.
        proxy_url: how the node's proxy is reached from inside, e.g. `http://127.0.0.1:8642`; None under network `none`.
        """
        self.runtime_id = runtime_id
        self.workdir = workdir
        self.home = home
        self.grader_home = grader_home
        self.proxy_url = proxy_url

    # -- commands ------------------------------------------------------------------------------------------------

    @abstractmethod
    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        """Run a command and wait for it and its output.

        On timeout, and when the caller is cancelled, the command's whole process tree is killed. Otherwise background
        processes outlive their command. Raises: RuntimeFailed when the sandbox is gone; RuntimeUnavailable when it has
        no such user; InvalidRequest for an empty command.
        """

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OutputSink | None = None,
        max_output_bytes: int = 1 << 20,
        user: RuntimeUser = "agent",
        grace_s: float = 0.0,
    ) -> ExecResult:
        """Call `run` with an `ExecRequest` of these fields."""
        request = ExecRequest(
            command=command,
            cwd=cwd,
            env=env or {},
            stdin=stdin,
            timeout_s=timeout_s,
            max_output_bytes=max_output_bytes,
            user=user,
            grace_s=grace_s,
        )
        return await self.run(request, on_output)

    async def open_channel(self, request: ExecRequest) -> Channel:
        """Start a command, like `run`, whose descriptor 3 is the other end of a channel: a stream of bytes in both
        directions (an unnamed Unix socket, which no other process in the sandbox can reach).

        The command's standard input is empty. It lives until it ends by itself, the channel is closed, or the sandbox
        is killed or stopped. Its bytes are the agent's claims. Only agents in the node need channels.

        Raises: like `run`.
        """
        raise RuntimeUnavailable(
            f"the runtime of sandbox {self.runtime_id} has no channels. Use another one, such as `sandbox`."
        )

    async def channel(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: RuntimeUser = "agent",
    ) -> Channel:
        """Call `open_channel` with an `ExecRequest` of these fields."""
        return await self.open_channel(ExecRequest(command=command, cwd=cwd, env=env or {}, user=user))

    # -- files ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def upload(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file (relative to `workdir`, or absolute inside). Creates its parents."""

    @abstractmethod
    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """Returns the content of a regular file. Untrusted: no link is followed, no path leaves the sandbox.

        Raises: NotFound, LimitExceeded, InvalidRequest (a link, a device, an escape).
        """

    @abstractmethod
    async def clear(self, path: str) -> None:
        """Remove everything at `path` from outside the sandbox, even if an untrusted program left it there. Call it
        after `kill`.

        Removes a file, a link or a folder with its content, whatever its modes; empties and keeps both HOMEs, `workdir`
        and the spec's `folders`. Also removes a file or link in place of one of its parents. Makes the parent folders
        usable by their owner again. Follows no link; a missing path is not an error.

        Raises: InvalidRequest when files cannot be moved through the path.
        """

    # -- ending --------------------------------------------------------------------------------------------------

    @abstractmethod
    async def kill(self, *, grace_s: float = 0.0) -> None:
        """Kill every process in the sandbox and keep its files; a later `run` works.

        With a `grace_s`, processes of running commands first get SIGTERM and this many seconds to end.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Kill and remove everything. Idempotent."""

    # -- guarantees and usage ------------------------------------------------------------------------------------

    @abstractmethod
    def limits(self) -> dict[str, str]:
        """Returns the name of a limit, `network`, ... -> its enforcement: `cgroup v2`, `rlimit`, ...; `not enforced`;
        `not set`.

        Contains every limit of `LimitsSpec`, and `network`. An enforcement that applies to each process, not to all
        together, contains `per process`. `grader_user` is included if `run` supports the user `grader`.
        """

    async def usage(self) -> Usage:
        """Returns its resource use over all its restarts, with disk usage as last measured.

        An amount that the runtime cannot measure is None, with the reason in `measured`. Raises: RuntimeFailed when the
        sandbox is gone.
        """
        return unmeasured("the runtime does not measure it")

    # -- checkpoints: see also `Runtime.release` -----------------------------------------------------------------

    async def checkpoint(self, name: str = "") -> Checkpoint:
        """Keep the current files of the writable folders until `Runtime.release`. Commands continue, except for a
        pause.

        Later writes never change it. It outlives kills, and the sandbox.

        Raises: RuntimeUnavailable when `limits()["checkpoints"]` is `not supported`; RuntimeFailed.
        """
        raise self._without_checkpoints()

    async def reset(self, checkpoint: Checkpoint | None = None) -> None:
        """Kill every process and restore a checkpoint's files; None: the files that the sandbox began with.

        Also empties the grader's HOME. Raises: like `checkpoint`; NotFound when it was released; InvalidRequest when it
        has another owner, runtime or specification.
        """
        raise self._without_checkpoints()

    def _without_checkpoints(self) -> RuntimeUnavailable:
        return RuntimeUnavailable(
            f"checkpoints are not supported by the runtime of sandbox {self.runtime_id}; use `sandbox`."
        )


class Runtime(ABC):
    """A kind of sandbox. The plug-in is the class, constructed without arguments."""

    name: ClassVar[str]
    """Name of its entry point."""
    is_keepable: ClassVar[bool] = False
    """Whether its sandboxes may live in the node's keeper, and so outlive the node's process.

    The keeper finds the runtime by its name. Its sandboxes end with the process that started them: the keeper. Its
    channels have a `fileno`.
    """
    has_services: ClassVar[bool] = False
    """Whether its sandboxes support the `services` of their specification. Other runtimes refuse such tasks."""

    @abstractmethod
    async def start(self, start: RuntimeStart) -> Sandbox:
        """Start a sandbox. Leaves nothing behind on failure or cancellation. Implementations begin with `check_start`.

        Raises: InvalidRequest, RuntimeUnavailable, RuntimeFailed.
        """

    @abstractmethod
    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        """Remove every sandbox, process, mount and folder under `root` that is labelled `owner`, except the ones in
        `keep`.

        Also removes checkpoints, by `checkpoint_id`. Returns how many sandboxes were removed.
        """

    def check_start(self, start: RuntimeStart) -> None:
        """Raises: InvalidRequest for invalid names, and for services that the runtime does not start."""
        validated_id(start.runtime_id, "runtime_id")
        validated_id(start.owner, "owner")
        if start.spec.services and not self.has_services:
            raise InvalidRequest(
                f"runtime `{self.name}` starts no services ({', '.join(start.spec.services)}): use `docker` or "
                "`podman`."
            )

    async def check(self) -> None:
        """Check by trying whether it runs here. Raises: RuntimeUnavailable, which names the missing part and the
        command to run."""
        if (why := self.missing()) is not None:
            raise RuntimeUnavailable(why)

    def missing(self) -> str | None:
        """Returns the missing part and the command to run, by a check of installed programs only; None: none is known.

        Nodes skip sessions of a runtime that lacks a part.
        """
        return None

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        """Refuse a specification with which no node, on any machine, could start a sandbox. Called at submit.

        Raises: InvalidRequest, which begins with the field (`runtime.workdir`) and has the remedy.
        """
        return

    async def images(self) -> Mapping[str, Collection[str]]:
        """Returns folder -> names of the images directly in it. The folder `""` has images without a path, by each of
        their names (see `image_names`). Only includes folders that are known completely. Raises: RuntimeFailed,
        RuntimeUnavailable.

        Nodes skip sessions that need another image of such a folder, unless they pull it into `image_store`.
        """
        return {}

    @property
    def image_store(self) -> ImageStore | None:
        """Where nodes pull the images of folder `""` to; None: this runtime has no such place."""
        return None

    @property
    def num_gpus(self) -> int | None:
        """GPUs that this machine has for sandboxes, including taken ones; None: the runtime never gives any."""
        return None

    def services_of(self, runtime_id: str, spec: RuntimeSpec) -> SideServices:
        """Returns the services of a sandbox that is not stopped yet. Only called with `has_services`."""
        raise RuntimeUnavailable(f"runtime `{self.name}` starts no services.")

    async def release(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint once no sandbox is based on it. Idempotent."""
        return


class SideServices(Protocol):
    """The services of an agent's sandbox. The agent reaches them, so their output is a claim, like its files."""

    async def exec(
        self, service: str, command: str, *, timeout_s: float, user: str | None = None, max_output_bytes: int = 1 << 16
    ) -> ExecResult:
        """Run a command with `sh -c` in a service's container. user: None: the service's own.

        A command that takes too long may continue until the sandbox is stopped.

        Raises: RuntimeFailed, also where there is no such service.
        """
        ...

    async def archive(self, service: str, path: str, *, max_bytes: int) -> bytes:
        """Returns a file or folder of a service's container as a tar archive, with it at the top level.

        Raises: NotFound when there is no such file, LimitExceeded; the errors of `exec`.
        """
        ...
