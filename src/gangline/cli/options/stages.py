"""Options of a node's stages: how many sessions are in each, when the node rests, what is told, which hooks hear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

if TYPE_CHECKING:
    from gangline.gateway.health.breaker import Breaker
    from gangline.gateway.sessions.pools import PoolSizes

__all__ = [
    "BreakerFaultsOption",
    "BreakerPauseOption",
    "DiskReserveOption",
    "HookOption",
    "HookTimeoutOption",
    "InitWorkersOption",
    "PostrunWorkersOption",
    "PrewarmWorkersOption",
    "ReadySlotsOption",
    "RunSlotsOption",
    "StageChoice",
    "StuckAfterOption",
]

RunSlotsOption = Annotated[int, typer.Option("--run-slots", min=1, help="Sessions whose agent runs at once.")]
ReadySlotsOption = Annotated[
    int,
    typer.Option(
        "--ready-slots", min=0, help="Prepared sandboxes that wait to run; 0 prepares one only when it can run."
    ),
]
InitWorkersOption = Annotated[int, typer.Option("--init-workers", min=1, help="Sandboxes prepared at once.")]
PrewarmWorkersOption = Annotated[
    int,
    typer.Option(
        "--prewarm-workers",
        min=0,
        help="Graders' clean sandboxes prepared at once while agents run; 0 prepares each after its agent.",
    ),
]
PostrunWorkersOption = Annotated[int, typer.Option("--postrun-workers", min=1, help="Sessions graded at once.")]
BreakerFaultsOption = Annotated[
    int,
    typer.Option(
        "--breaker-faults",
        min=0,
        help="Sessions in a row that fail for one reason of the node's own before it rests; 0 is never.",
    ),
]
BreakerPauseOption = Annotated[
    float, typer.Option("--breaker-pause", min=0.1, help="Seconds of its first rest; each failed try doubles them.")
]
StuckAfterOption = Annotated[
    float,
    typer.Option("--stuck-after", min=0, help="Seconds beyond its budget after which a session is told as stuck."),
]
DiskReserveOption = Annotated[
    float | None,
    typer.Option(
        "--disk-reserve",
        min=0,
        help="GiB kept free on the data folder's disk: below it no session is taken, below half of it the agent with "
        "the largest sandbox is ended. 0 keeps none. Default: 2, or 5 % of a smaller disk.",
        show_default=False,
    ),
]
HookOption = Annotated[
    list[str] | None,
    typer.Option(
        "--hook",
        help="Shell command that gets each attempt's result as JSON on stdin; may be given again.",
        show_default=False,
    ),
]
HookTimeoutOption = Annotated[float, typer.Option("--hook-timeout", min=0.1, help="Seconds that a hook may take.")]


class StageChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The options as they were given."""

    run_slots: int = 16
    ready_slots: int = 8
    init_workers: int = 4
    prewarm_workers: int = 2
    postrun_workers: int = 4
    breaker_faults: int = 8
    breaker_pause: float = 10.0
    stuck_after: float = 60.0
    disk_reserve: float | None = None
    """GiB."""
    hooks: tuple[str, ...] = ()
    hook_timeout: float = 60.0

    def arguments(self) -> tuple[str, ...]:
        """For a node in another process."""
        fields = msgspec.structs.asdict(self)
        given = {name: value for name, value in fields.items() if name != "hooks" and value is not None}
        numbers = (text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value)))
        return (*numbers, *(text for hook in self.hooks for text in ("--hook", hook)))

    def sizes(self) -> PoolSizes:
        from gangline.gateway.sessions.pools import PoolSizes

        return PoolSizes(**{name: getattr(self, name) for name in PoolSizes.model_fields})

    def breaker(self) -> Breaker:
        from gangline.gateway.health.breaker import Breaker

        return Breaker(self.breaker_faults, pause_s=self.breaker_pause)

    def options(self) -> dict[str, Any]:
        """Arguments of the node's `serve`."""
        return {
            "sizes": self.sizes(),
            "breaker": self.breaker(),
            "stuck_after_s": self.stuck_after,
            "disk_reserve_bytes": None if self.disk_reserve is None else int(self.disk_reserve * (1 << 30)),
            "hooks": self.hooks,
            "hook_budget_s": self.hook_timeout,
        }
