"""Draw what `gangline watch` shows of a busy service: `python docs/watch_picture.py` makes docs/images/watch.svg."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from gangline.cli.tasks.watch_view import Picture
from gangline.cli.tasks.watching import Watched
from gangline.domain.node_numbers import NodeNumbers
from gangline.domain.views import Event, NodeView, ServiceStatus, TaskView

PICTURE = Path(__file__).parent / "images" / "watch.svg"
_NOW = 1_763_740_800.0


def _node(name: str, sampled: int, *, run: int, error: str | None = None, closed: int = 0) -> NodeView:
    numbers = NodeNumbers(
        init=2,
        ready=6,
        run=run,
        postrun=1,
        external_sessions=0,
        contexts_diverged=3,
        init_workers=4,
        ready_slots=8,
        run_slots=16,
        postrun_workers=4,
        untrainable=0,
        gate_closed=closed,
        gate_calls_waiting=5 * closed,
        calls_in_flight=run - 4,
        policy_version=41,
        model_calls=4210,
        prompt_tokens=9_000_000,
        contexts=4210,
        sampled_tokens=sampled,
    )
    state = "healthy" if error is None else "unhealthy"
    backend: dict[str, Any] = {"url": f"http://gpu-{name[-1]}:8000", "engine": "vllm", "state": state, "error": error}
    return NodeView(
        node_id=name,
        url="",
        capacity=28,
        draining=False,
        num_sessions=run + 9,
        backends=(backend | {"num_calls": run - 4, "num_sessions": run + 9},),
        metrics=numbers.as_metrics(),
        first_seen_at=0,
        last_seen_at=_NOW,
        age_s=1.2,
    )


def _task(name: str, rewards: list[float], num_samples: int = 8) -> TaskView:
    outcomes = {"completed": len(rewards) - 1, "agent_timeout": 1}
    padded = (*rewards, *[None] * (num_samples - len(rewards)))
    return TaskView(
        task_id=name,
        status="running",
        num_samples=num_samples,
        num_open=num_samples - len(rewards),
        position=1,
        created_at=0,
        states={},
        outcomes=outcomes,
        rewards=padded,
        sessions=(),
        request={},
    )


def _status(at: float, *nodes: NodeView) -> ServiceStatus:
    return ServiceStatus(
        version="0.1.0",
        at=at,
        tasks={"running": 5, "queued": 40},
        sessions={"queued": 312, "leased": 58, "ended": 1870},
        stages={"init": 4, "ready": 12, "run": 31, "postrun": 2},
        oldest_queued_s=95.0,
        callbacks={"pending": 2},
        nodes=nodes,
        num_waiting=1,
    )


def _watched() -> Watched:
    watched = Watched(clock=lambda: 0.0)
    refused = {"boundary": "engine", "code": "engine_unavailable", "message": "the engine at gpu-2 refuses connections"}
    watched.look(_status(_NOW - 60, _node("node-1", 1_000_000, run=16), _node("node-2", 900_000, run=15)), [])
    for number in range(42):
        watched.take(Event(seq=number, at=_NOW - 50 + number, kind="session.ended", session_id="fix-17.1", data={}))
    watched.take(Event(seq=50, at=_NOW - 9, kind="session.requeued", session_id="fix-31.2", data=refused))
    nodes = _node("node-1", 1_083_000, run=16), _node("node-2", 961_000, run=15, error="connection refused")
    tasks = [_task("fix-29", [1, 0, 1, 1, 0.5, 0]), _task("fix-30", [0, 0, 1]), _task("fix-31", [1, 0])]
    watched.look(_status(_NOW, *nodes), tasks)
    return watched


def main() -> None:
    console = Console(record=True, width=96, height=24, file=io.StringIO(), force_terminal=True)
    console.print(Picture(_watched()), height=24)
    PICTURE.write_text(console.export_svg(title="gangline watch", unique_id="watch"))


if __name__ == "__main__":
    main()
