"""The objects that all attempts of a node share.

These include a cache of graders' answers, such as judgements of models, from which the least recently used ones are
dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path

import msgspec

from gangline.domain.child_work import ChildWork
from gangline.domain.completion import Completion
from gangline.domain.contracts import GraderEngine
from gangline.domain.mcp_source import McpSource
from gangline.domain.placement import Allowed
from gangline.domain.sandbox import RuntimeStart, Sandbox
from gangline.domain.search_source import SearchSource
from gangline.domain.session import SessionResult
from gangline.domain.task import SamplingPolicy
from gangline.node.backends.by_role import BackendsByRole
from gangline.node.backends.gate import Gate
from gangline.node.calls.proxy import Proxy
from gangline.node.calls.session import ModelSession
from gangline.node.calls.session_spec import SessionSpec
from gangline.node.capture.prompt_tier import Renderings
from gangline.node.health.metrics import NodeMetrics
from gangline.node.health.sandbox_use import HeldSandboxes
from gangline.node.replay.replay import Replay
from gangline.node.sessions.reuse.checkpoints import Checkpoints
from gangline.node.sessions.reuse.turns import TurnSender
from gangline.node.sessions.reuse.warm import WarmPool
from gangline.node.sessions.stages import Pools
from gangline.sandbox.images.supply import ImageSupply
from gangline.sandbox.keeper.kept import Keeper
from gangline.settings import plugins
from gangline.store.journal.log import Journal

_MAX_BYTES = 16 << 20


class Verdicts(MutableMapping[bytes, bytes]):
    """Digest of a question -> answer, with at most `max_bytes` of both together."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._room = max_bytes

    def __getitem__(self, key: bytes) -> bytes:
        value = self._kept[key]
        self._kept.move_to_end(key)
        return value

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.pop(key, None)
        self._kept[key] = value
        self._room -= len(key) + len(value)
        while self._room < 0:
            del self[next(iter(self._kept))]

    def __delitem__(self, key: bytes) -> None:
        self._room += len(key) + len(self._kept.pop(key))

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class NodeParts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a node that its attempts share."""

    node_id: str
    owner: str
    """Label of everything this node starts."""
    runtimes_folder: Path
    hidden: tuple[Path, ...] = ()
    """Host folders that no sandbox sees."""
    prepare_folders: tuple[Path, ...] = ()
    """Absolute host folders that only prepare actions may see."""
    backends: BackendsByRole
    first_model: str
    """The model served when the node started."""
    proxy: Proxy
    proxy_port: int
    journal: Journal
    pools: Pools
    gate: Gate = msgspec.field(default_factory=Gate)
    sampling: SamplingPolicy | None = None
    """The operator's, applied after a task's own."""
    grader_engines: Mapping[str, GraderEngine] = {}
    """Models that evaluators may name."""
    search_sources: Mapping[str, SearchSource] = {}
    """Sources that agents' tools may search."""
    mcp_sources: Mapping[str, McpSource] = {}
    """MCP servers over HTTP that agents in the node may use."""
    reward_functions: frozenset[str] = frozenset()
    """Functions that evaluators may name, as `module:function`."""
    allowed: Allowed = Allowed()
    """Runtimes and networks that the operator lets tasks use."""
    verdicts: Verdicts = msgspec.field(default_factory=Verdicts)
    graded_before: Verdicts = msgspec.field(default_factory=Verdicts)
    """See `EvaluationContext.graded_before`."""
    child_work: ChildWork | None = None
    """Where graders parse agents' output; None: each in its own processes."""
    renderings: Renderings = msgspec.field(default_factory=Renderings)
    """Decides which stitched prompts are compared with their rendering."""
    metrics: NodeMetrics = msgspec.field(default_factory=NodeMetrics)
    on_result: Callable[[SessionResult], None] | None = None
    """Called with the result of each attempt that ended."""
    recorded: Callable[[str, int], Awaitable[SessionResult]] | None = None
    """Fetches the server's record of a session's attempt, for its forks; None: there is no server."""
    turns: TurnSender | None = None
    """Sends records off the node, for tasks that ask for it; None: there is no server."""
    checkpoints: Checkpoints = msgspec.field(default_factory=Checkpoints)
    """Checkpoints of sessions whose tasks ask for them."""
    images: ImageSupply = msgspec.field(default_factory=ImageSupply)
    """Pulls the images of sandboxes."""
    warm: WarmPool | None = None
    """None: every sandbox is started when its session needs it."""
    sandboxes: HeldSandboxes = msgspec.field(default_factory=HeldSandboxes)
    keeper: Keeper | None = None
    """Holds the sandboxes that survive the node's process; None: no sandbox does."""

    def engines_for_graders(self) -> dict[str, GraderEngine]:
        """Returns the operator's engines, and `policy` if one of the policy's engines is healthy."""
        healthy = [view for view in self.backends.policy.views() if view.state == "healthy"]
        if not healthy:
            return dict(self.grader_engines)
        view = min(healthy, key=lambda view: view.num_calls)
        policy = GraderEngine(url=view.url, model=view.model, key_env=view.api_key_env)
        return {**self.grader_engines, "policy": policy}

    @property
    def model(self) -> str:
        """The policy's model, which is the default for tasks that name none."""
        return next((view.model for view in self.backends.policy.views()), self.first_model)

    def serves(self, session_id: str) -> bool:
        """Whether a session with this id is open, of any origin."""
        return self.proxy.serves(session_id)

    def open_session(
        self,
        spec: SessionSpec,
        completions: Sequence[Completion] = (),
        checkpoint: Callable[[], Awaitable[str | None]] | None = None,
        replay: Replay | None = None,
    ) -> ModelSession:
        """Answer a session's calls from now on. `completions`, `checkpoint`, `replay`: see `ModelSession`.

        Raises: Conflict when its id is taken.
        """
        session = ModelSession(
            spec,
            self.backends.policy.engine_for(spec.session_id, spec.task_id),
            self.journal,
            completions=completions,
            gate=self.gate,
            renderings=self.renderings,
            sampling=self.sampling,
            checkpoint=checkpoint,
            replay=replay,
            engine_of=lambda role: self.backends.engine_for(role, spec.session_id, spec.task_id),
        )
        self.proxy.add(session)
        return session

    def close_session(self, session_id: str) -> None:
        """Remove a session that has ended."""
        self.proxy.remove(session_id)
        self.backends.release(session_id)

    async def start_runtime(self, name: str, start: RuntimeStart) -> Sandbox:
        """Raises: UnknownPlugin, InvalidRequest when the operator refuses it, and the runtime's errors."""
        self.allowed.check(name, start.spec.network)
        starter = plugins.make_runtime(name).start(start) if self.keeper is None else self.keeper.start(name, start)
        async with self.sandboxes.starting(start.runtime_id):
            return self.sandboxes.hold(await starter)
