"""Gangline turns any agent program into a reinforcement-learning environment.

    from gangline import find_service

    with find_service().sync_client() as client:  # the `gangline up` of this folder
        task = client.wait(client.submit({"instruction": "Say hello.", "agent": {"harness": "shell", ...}}).task_id)
        results = client.result(task.task_id)

Names are loaded when they are first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""Type checkers take it for true. `typing` is not imported: a Ctrl-C meanwhile would be answered with a traceback."""

if TYPE_CHECKING:
    from typing import Any

    from gangline.domain.errors import GanglineError
    from gangline.domain.session import SessionResult
    from gangline.domain.task import TaskRequest
    from gangline.domain.trajectory import Trace, Trajectory
    from gangline.domain.views import SessionView, TaskView
    from gangline.wire.client.node import NodeClient
    from gangline.wire.client.running import Service, find_service
    from gangline.wire.client.server import ServerClient
    from gangline.wire.client.sync import SyncNodeClient, SyncServerClient

__all__ = [
    "GanglineError",
    "NodeClient",
    "ServerClient",
    "Service",
    "SessionResult",
    "SessionView",
    "SyncNodeClient",
    "SyncServerClient",
    "TaskRequest",
    "TaskView",
    "Trace",
    "Trajectory",
    "__version__",
    "find_service",
]

__version__ = "0.1.0"

_MODULES = {
    "GanglineError": "domain.errors",
    "NodeClient": "wire.client.node",
    "ServerClient": "wire.client.server",
    "Service": "wire.client.running",
    "SessionResult": "domain.session",
    "SessionView": "domain.views",
    "SyncNodeClient": "wire.client.sync",
    "SyncServerClient": "wire.client.sync",
    "TaskRequest": "domain.task",
    "TaskView": "domain.views",
    "Trace": "domain.trajectory",
    "Trajectory": "domain.trajectory",
    "find_service": "wire.client.running",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - as above

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
