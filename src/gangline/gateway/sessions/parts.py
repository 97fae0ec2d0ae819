"""The objects that all attempts of a node share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gangline import plugins
from gangline.domain.completion import Completion
from gangline.domain.contracts import RuntimeHandle, RuntimeStart
from gangline.domain.session import SessionResult
from gangline.domain.task import SamplingPolicy
from gangline.gateway.backends.gate import Gate
from gangline.gateway.backends.pool import BackendPool
from gangline.gateway.calls.proxy import Proxy
from gangline.gateway.calls.session import ModelSession
from gangline.gateway.calls.session_spec import SessionSpec
from gangline.gateway.health.metrics import NodeMetrics
from gangline.gateway.sessions.pools import Pools
from gangline.runtimes.keeping.kept import Keeper
from gangline.store.journal.log import Journal

__all__ = ["NodeParts"]


class NodeParts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a node that its attempts share."""

    node_id: str
    owner: str
    """Label of everything this node starts."""
    runtimes_folder: Path
    hidden: tuple[Path, ...] = ()
    """Host folders that no sandbox sees."""
    backends: BackendPool
    first_model: str
    """Served when the node started."""
    proxy: Proxy
    proxy_port: int
    journal: Journal
    pools: Pools
    gate: Gate = msgspec.field(default_factory=Gate)
    sampling: SamplingPolicy | None = None
    """The operator's, applied after a task's own."""
    metrics: NodeMetrics = msgspec.field(default_factory=NodeMetrics)
    on_result: Callable[[SessionResult], None] | None = None
    """Called with the result of each attempt that ended."""
    keeper: Keeper | None = None
    """Where sandboxes live that are to outlive the node's process; None: none is."""

    @property
    def model(self) -> str:
        """Served model; the default for tasks that name none."""
        return next((view.model for view in self.backends.views()), self.first_model)

    def serves(self, session_id: str) -> bool:
        """Whether a session of that id is open, whoever opened it."""
        return self.proxy.serves(session_id)

    def open_session(self, spec: SessionSpec, completions: Sequence[Completion] = ()) -> ModelSession:
        """Answer a session's calls from here on. `completions`: see `ModelSession`.

        Raises: Conflict when its id is taken.
        """
        session = ModelSession(
            spec,
            self.backends.engine_for(spec.session_id, spec.task_id),
            self.journal,
            completions=completions,
            gate=self.gate,
            sampling=self.sampling,
        )
        self.proxy.add(session)
        return session

    def close_session(self, session_id: str) -> None:
        """Forget a session that is over."""
        self.proxy.remove(session_id)
        self.backends.release(session_id)

    async def start_runtime(self, name: str, start: RuntimeStart) -> RuntimeHandle:
        """Raises: UnknownPlugin, and the runtime's errors."""
        starter = plugins.make_runtime(name).start(start) if self.keeper is None else self.keeper.start(name, start)
        return await starter
