"""The runtimes `docker` and `podman`: container images, run by root or, with podman, also by an ordinary user.

The engine makes a container (its root file system, namespaces, control groups), and removes it. We do the rest, as in
`sandbox`: a command's supervisor enters the namespaces, files move through the container's root as seen from the host,
and the node's proxy is a listener opened in its network. So the image needs none of our software, only `sh` and
coreutils.

Invariants:
- The agent is never root inside. Its folders are in the container's layer, with the image's content.
- A start pulls nothing: the node does that before. A task names an image and cannot set any other part of the engine's
  command line.
- Nothing outlives the process that started it (see `life`), the node's keeper (see `keeper`). Layers and services left
  behind are found by their labels.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import ClassVar

import msgspec

from gangline.domain.errors import (
    GanglineError,
    InvalidRequest,
    RuntimeFailed,
    RuntimeUnavailable,
)
from gangline.domain.image_names import engine_names
from gangline.domain.sandbox import ExecRequest, Runtime, RuntimeStart, Sandbox, SideServices
from gangline.domain.task import LimitsSpec, RuntimeSpec, WriteAction
from gangline.machine.event_loop import to_end
from gangline.sandbox.commands.execution import EndAll, Order
from gangline.sandbox.commands.spawner import Spawner
from gangline.sandbox.confinement.cgroups import Cgroups, joined_groups
from gangline.sandbox.confinement.limits import (
    NOT_ENFORCED,
    enforcement,
)
from gangline.sandbox.confinement.masks import masked
from gangline.sandbox.confinement.seccomp import filters_of
from gangline.sandbox.confinement.system_calls import may_use_keys
from gangline.sandbox.containers.engine import Engine, checked_image, container_name
from gangline.sandbox.containers.gpus import Gpus
from gangline.sandbox.containers.life import PIPES, ContainerLife, Pipes, first_process
from gangline.sandbox.containers.services import Services
from gangline.sandbox.containers.side_services import ContainerServices
from gangline.sandbox.namespaced import GRADER_HOME, HOME
from gangline.sandbox.network.listeners import NetworkListeners
from gangline.sandbox.shared.accounts import Traffic
from gangline.sandbox.shared.disk import MEASURED, root_inside
from gangline.sandbox.shared.environment import exposed_folders, image_environment, image_variables
from gangline.sandbox.shared.files import SharedFolders
from gangline.sandbox.shared.leftovers import LABEL, Mark, marked, reap
from gangline.sandbox.shared.mounts import granted, refuse_own
from gangline.sandbox.shared.users import HeldUser, grader_uid
from gangline.sandbox.supervised import SupervisedSandbox
from gangline.settings.machine import Settings

_OURS = 2
"""Processes of the container that do not belong to the agent."""
_SHM_BYTES = 256 << 20
_CLOSED = ("/proc", "/sys", "/dev", PIPES)
_NO_WORKDIR = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/tmp")
_NO_WORKDIR_ITSELF = ("/", "/home", "/opt", "/usr", "/usr/bin", "/usr/lib", "/usr/sbin", "/usr/local", "/var")
_CONFINED = (
    *("--user", "0:0", "--cap-drop", "ALL", "--cap-add", "CHOWN", "--cap-add", "DAC_OVERRIDE", "--cap-add", "FOWNER"),
    *("--security-opt", "no-new-privileges", "--hostname", "gangline", "--workdir", "/", "--log-driver", "none"),
    *("--shm-size", str(_SHM_BYTES), "--no-healthcheck"),
)


class _ContainerRuntime(Runtime):
    """The common base of both."""

    name: ClassVar[str]
    is_keepable: ClassVar[bool] = True
    _finds_short_names: ClassVar[bool] = False
    has_services: ClassVar[bool] = True

    def __init__(self, command: Sequence[str], settings: Settings) -> None:
        self._engine = Engine(self.name, command)
        self._named = settings.expose
        self._expose = exposed_folders(settings.expose)
        self._options = settings.container_options
        self._gpus = settings.gpus

    def missing(self) -> str | None:
        try:
            self._check_program()
        except RuntimeUnavailable as error:
            return error.message
        return None

    def _check_program(self) -> None:
        """Raises: RuntimeUnavailable, with the command that fixes it."""
        self._refuse_user()
        if not self._engine.is_installed:
            raise RuntimeUnavailable(f"{self.name} is not installed. Run, as root: {self._install}")

    @property
    def num_gpus(self) -> int:
        return len(self._gpus)

    def services_of(self, runtime_id: str, spec: RuntimeSpec) -> SideServices:
        return ContainerServices(self._engine, runtime_id, tuple(spec.services))

    async def images(self) -> Mapping[str, Collection[str]]:
        """Raises: RuntimeFailed, RuntimeUnavailable."""
        self._check_program()
        return {"": engine_names(await self._engine.images(), short=self._finds_short_names)}

    @property
    def image_store(self) -> Engine:
        return self._engine

    async def check(self) -> None:
        """Query the engine. Raises: RuntimeUnavailable, with the command that fixes it."""
        self._check_program()
        try:
            await self._engine.containers([])
        except GanglineError as error:
            problem = error.message.rstrip(".")
            advice = "" if problem.endswith("?") else f". {self._advice}"  # docker checks this itself
            raise RuntimeUnavailable(f"{self.name} does not answer: {problem}{advice}") from error

    _install: ClassVar[str]
    _advice: ClassVar[str]

    def _refuse_user(self) -> None:
        """Raises: RuntimeUnavailable when the current user cannot use it."""

    def _user_options(self) -> list[str]:
        return []

    @classmethod
    def check_spec(cls, spec: RuntimeSpec) -> None:
        """Raises: InvalidRequest."""
        check_spec(spec, cls.name)

    async def start(self, start: RuntimeStart) -> Sandbox:
        """Raises: RuntimeFailed, RuntimeUnavailable, InvalidRequest."""
        self._refuse_user()
        self.check_spec(start.spec)
        self.check_start(start)
        if start.spec.network != "none" and start.proxy_port is None:
            raise InvalidRequest(f"network `{start.spec.network}` needs the port of the node's proxy.")
        if start.spec.gpus > len(self._gpus):
            raise RuntimeUnavailable(
                f"{start.spec.gpus} GPUs are asked for, and GANGLINE_GPUS names {len(self._gpus)} of this machine."
            )
        image = checked_image(start.spec.image, self.name)
        mark = Mark(owner=start.owner, runtime=self.name, runtime_id=start.runtime_id)
        options = [*_CONFINED, *self._user_options(), "--env", f"{LABEL}={mark.label}", *self._options]
        bound = {str(path): path for path in self._expose} | await asyncio.to_thread(granted, start.spec, self._named)
        return await _ContainerSandbox(self._engine, start, image, bound, options, self._gpus).begun()

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        """The engine is queried only if a folder shows that it was used; otherwise it may be broken or missing."""
        found: set[str] = set()
        if await asyncio.to_thread(_was_used, self.name, owner, root):
            labelled = await self._engine.containers([f"gangline.owner={owner}", f"gangline.runtime={self.name}"])
            found = set(labelled.values()) - keep
            for name, runtime_id in labelled.items():
                if runtime_id in found:
                    await self._engine.remove(name)
        return len(found | await asyncio.to_thread(reap, self.name, owner, root, keep))


class DockerRuntime(_ContainerRuntime):
    """Docker, by a node that runs as root on the daemon's machine."""

    name: ClassVar[str] = "docker"
    _install = "apt-get install -y docker.io"
    _advice = "Is its daemon running?"

    def __init__(self, settings: Settings | None = None) -> None:
        settings = settings or Settings.from_environ()
        super().__init__(settings.docker, settings)

    def _refuse_user(self) -> None:
        if os.geteuid() != 0:
            raise RuntimeUnavailable("runtime `docker` needs a node that runs as root; for users there is `podman`.")


class PodmanRuntime(_ContainerRuntime):
    """Podman, as root or as an ordinary user."""

    name: ClassVar[str] = "podman"
    _finds_short_names = True
    _install = "apt-get install -y podman uidmap"
    _advice = "`podman info` may say more."

    def __init__(self, settings: Settings | None = None) -> None:
        settings = settings or Settings.from_environ()
        super().__init__(settings.podman, settings)

    def _user_options(self) -> list[str]:
        return [] if os.geteuid() == 0 else ["--userns", "keep-id"]


class _Run(msgspec.Struct, frozen=True, kw_only=True):
    """State of a container since it was last started."""

    was_made: bool = False
    """Whether the container exists; if so, it is started again."""
    env: Mapping[str, str] = {}
    """Variables that the image sets."""
    written: Sequence[Path] = ()
    """Host folders with the files that it has written; empty if the engine does not report them."""
    filters: Sequence[bytes] = ()
    """The engine's system call filters; empty if they cannot be read."""
    groups: Cgroups
    shares_network: bool = False
    """Whether it is in the host's network."""


class _ContainerSandbox(SupervisedSandbox):
    """A layer that lasts, and processes that come and go."""

    moves_files_alive = True

    def __init__(
        self,
        engine: Engine,
        start: RuntimeStart,
        image: str,
        bound: Mapping[str, Path],
        options: Sequence[str],
        gpus: Sequence[str],
    ) -> None:
        workdir = checked_folder(start.spec.workdir, "runtime.workdir")
        folders = [checked_folder(path, "runtime.folders") for path in start.spec.folders]
        self._own = list(dict.fromkeys([HOME, workdir, *folders]))
        """The agent's folders."""
        has_keys = may_use_keys(start.spec.system_calls_allow)
        user = HeldUser(start.runtime_id, has_keys=has_keys) if os.geteuid() == 0 else None
        grader_home = None if user is None else GRADER_HOME
        super().__init__(start, engine.name, workdir=workdir, home=HOME, grader_home=grader_home, user=user)
        self._engine = engine
        self._services = Services(engine, start, image, _labels(self._mark), _limits_options(start.spec.limits))
        self._bound = bound
        """Path inside -> host folder, read-only."""
        self._options = options
        self._gpus = Gpus(start, gpus)
        self._run = _Run(groups=Cgroups())
        self._life: ContainerLife | None = None
        self._listeners = NetworkListeners()

    @property
    def _uid(self) -> int:
        """The agent's user in the container. An ordinary user's agent runs as that user, who then owns its files."""
        return os.geteuid() if self._user is None else self._user.uid

    @property
    def _grader_uid(self) -> int | None:
        return None if self._user is None else grader_uid(self._user.uid)

    # -- life ----------------------------------------------------------------------------------------------------

    async def _make(self) -> None:
        await super()._make()
        await self._gpus.take()

    def _make_folders(self) -> None:
        (self._start.folder / "empty").mkdir(exist_ok=True)

    def _is_up(self) -> bool:
        return self._life is not None and self._life.alive

    async def _begin(self) -> None:
        life = await to_end(self._another_life())
        # With an ordinary user, supervisors run as the container's root, not as the agent.
        supervisor_uid = None if os.geteuid() == 0 else 0
        self._spawner = Spawner(self._mark.label, life.proc_fd, supervisor_uid)
        self._run = msgspec.structs.replace(self._run, shares_network=life.is_in_our_network())
        if self._start.spec.network != "none" and not self._run.shares_network:
            await self._listeners.open(self._mark.label, life.proc_fd, self._start)
        await self._spawner.ready()
        await self._services.join(life.pid)

    async def _another_life(self) -> ContainerLife:
        pipes = await asyncio.to_thread(Pipes, self._start.folder / "pipes")
        life = self._life = await ContainerLife.begin(pipes, self._first_pid)
        if life.host_uid(self._uid) is None:
            raise RuntimeFailed(
                f"{self._engine.name} maps users so that the agent's is none of them: run it without userns-remap."
            )
        filters = await asyncio.to_thread(_filters, life.pid)
        groups = joined_groups(Path(f"/proc/{life.pid}/cgroup"), self._inner_limits())
        held = {**groups.enforced, **(MEASURED if self._run.written else {})}
        self._limits = enforcement(self._start.spec.limits, held, own_user=True)
        self._run = msgspec.structs.replace(self._run, filters=filters, groups=groups)
        return life

    async def _first_pid(self) -> int:
        """Start the container. Returns the pid of its first process."""
        name, folder = container_name(self._start.runtime_id), self._start.folder
        if self._run.was_made:
            await self._engine.start(name, folder)
        else:
            through = _parents([*self._own, *self._bound])
            argv = first_process(self._uid, self._own, through, grader_uid=self._grader_uid, grader_home=GRADER_HOME)
            options = [*self._run_options(), "--entrypoint", argv[0]]
            image = checked_image(self._start.spec.image, self._engine.name)
            await self._engine.run(name, options, image, argv[1:], folder)
            self._run = msgspec.structs.replace(self._run, was_made=True)
        inspected = await self._engine.inspect(name)
        env = image_variables(inspected.env)
        self._run = msgspec.structs.replace(self._run, env=env, written=inspected.folders)
        return inspected.pid

    def _run_options(self) -> list[str]:
        """Options from `start`; the others were set earlier."""
        # Without a network an engine has no address for the container's own name.
        network = (
            [] if self._start.spec.network == "full" else ["--network", "none", "--add-host", "gangline:127.0.0.1"]
        )
        limits, names = _limits_options(self._inner_limits()), self._services.names_options
        return [*network, *limits, *names, *self._gpus.options, *self._mounts(), *_labels(self._mark), *self._options]

    def _inner_limits(self) -> LimitsSpec:
        """Limits with room for processes that do not belong to the agent."""
        limits = self._start.spec.limits
        num_pids = None if limits.max_pids is None else limits.max_pids + _OURS
        return limits.model_copy(update={"max_pids": num_pids})

    def _mounts(self) -> list[str]:
        empty = dict.fromkeys(masked(self._start.hidden, self._bound), self._start.folder / "empty")
        bound = {PIPES: self._start.folder / "pipes", **self._bound, **empty}
        pairs = [("--mount", f"type=bind,source={source},target={path},readonly") for path, source in bound.items()]
        return [piece for pair in pairs for piece in pair]

    def _kill_nowait(self) -> None:
        if self._life is not None:
            self._life.kill()

    async def _end(self, *, is_last: bool) -> None:
        await self._listeners.close()
        life, self._life = self._life, None
        if life is not None:
            life.close()
            if not is_last:
                await to_end(self._engine.kill(container_name(self._start.runtime_id)))

    async def _remove(self) -> None:
        await to_end(self._services.remove())
        await to_end(self._engine.remove(container_name(self._start.runtime_id)))
        self._gpus.release()
        await super()._remove()

    # -- use -----------------------------------------------------------------------------------------------------

    def _order(self, request: ExecRequest) -> Order:
        uid, own = self._uid, dict[str, str]()
        if request.user == "grader" and self._grader_uid is not None:
            uid, own = self._grader_uid, {"HOME": GRADER_HOME}
        extra = {**self._listeners.env, **self._start.spec.env, **own, **request.env}
        return self._ordered(
            request,
            env=image_environment([*map(Path, self._bound)], HOME, self._run.env, extra),
            uid=uid,
            filters=[*self._filters, *self._run.filters],
            cgroup_procs=self._run.groups.procs,
        )

    def _killer(self) -> EndAll:
        assert self._life is not None
        return self._life.kill_all

    def _files(self) -> AbstractContextManager[SharedFolders]:
        """Through the root of this life of the container, opened here."""
        assert self._life is not None
        life, root = self._life, self._life.root()
        uid = life.host_uid(self._uid) if os.geteuid() == 0 else None
        closed = (*_CLOSED, *self._bound)
        roots = {"/": Path(f"/proc/self/fd/{root}")}
        outer = None if self._grader_uid is None else life.host_uid(self._grader_uid)
        owners = {} if outer is None else {GRADER_HOME: outer}
        lasting = [*self._own, GRADER_HOME]
        folders = SharedFolders(roots, self.workdir, uid=uid, closed=closed, lasting=lasting, owners=owners)
        return _held(folders, root)

    def _written(self) -> Sequence[Path]:
        return self._run.written

    def _root(self) -> Path | None:
        return None if self._life is None else root_inside(self._life.proc_fd)

    def _group_folders(self) -> Sequence[Path]:
        return self._run.groups.folders

    def _traffic(self) -> Mapping[str, Traffic] | str:
        is_shared = self._run.shares_network
        return "the container is in the machine's own network: nobody counts" if is_shared else self._listeners.traffic

    def _network(self) -> str:
        return NOT_ENFORCED if self._start.spec.network == "full" else "network namespace"

    def _system_calls(self) -> str:
        return super()._system_calls() + ("; seccomp filter of the engine" if self._run.filters else "")


@contextmanager
def _held(folders: SharedFolders, root: int) -> Generator[SharedFolders]:
    try:
        yield folders
    finally:
        os.close(root)


def _filters(pid: int) -> list[bytes]:
    """Blocking."""
    try:
        return filters_of(pid)
    except OSError:
        return []


def _was_used(name: str, owner: str, root: Path) -> bool:
    """Blocking."""
    return any((mark.owner, mark.runtime) == (owner, name) for _folder, mark in marked(root))


def _labels(mark: Mark) -> list[str]:
    """For the reaper."""
    named = {"owner": mark.owner, "runtime": mark.runtime, "runtime_id": mark.runtime_id}
    return [piece for name, value in named.items() for piece in ("--label", f"gangline.{name}={value}")]


def _limits_options(limits: LimitsSpec) -> list[str]:
    options: list[str] = []
    if limits.memory_bytes is not None:
        options += ["--memory", f"{limits.memory_bytes}b", "--memory-swap", f"{limits.memory_bytes}b"]
    if limits.cpus is not None:
        options += ["--cpus", f"{limits.cpus:g}"]
    return [*options, "--pids-limit", str(limits.max_pids or -1)]


def _parents(paths: Sequence[str]) -> list[str]:
    """All parent folders, outermost first."""
    found = {parent for path in paths for parent in PurePosixPath(path).parents}
    return [str(path) for path in sorted(found, key=lambda path: len(path.parts))]


def check_spec(spec: RuntimeSpec, runtime: str) -> None:
    """Raises: InvalidRequest when a container of `runtime` cannot meet it."""
    if spec.python is not None:
        raise InvalidRequest(f"runtime.python: runtime `{runtime}` has none: install the packages into its image.")
    checked_image(spec.image, runtime)
    checked_folder(spec.workdir, "runtime.workdir")
    own = [HOME, spec.workdir, *(checked_folder(path, "runtime.folders") for path in spec.folders)]
    for inside in spec.mounts:
        checked_folder(inside, "runtime.mounts")
    refuse_own(spec, own)
    for number, action in enumerate(spec.prepare):
        if isinstance(action, WriteAction):
            place = f"runtime.prepare.{number}.path"
            path = PurePosixPath(spec.workdir) / action.path
            if any(path.is_relative_to(closed) for closed in _CLOSED):
                raise InvalidRequest(f"{place}: no files can be written to {action.path!r}.")


def checked_folder(named: str, field: str) -> str:
    path = PurePosixPath(named)
    above = {str(parent) for parent in (path, *path.parents)}
    forbidden = {*_NO_WORKDIR, GRADER_HOME}
    if not path.is_absolute() or ".." in path.parts or str(path) in _NO_WORKDIR_ITSELF or above & forbidden:
        raise InvalidRequest(f"{field} must be an absolute folder outside the system's, got {named!r}.")
    return str(path)
