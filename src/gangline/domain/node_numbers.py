"""The figures that a node reports with each heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec


class NodeNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """In `Heartbeat.metrics` and `NodeView.metrics`, by these names. Totals are since the node's start."""

    init: int
    """Sessions in INIT."""
    ready: int
    run: int
    postrun: int
    init_workers: int
    """Size of the stage's pool."""
    ready_slots: int
    run_slots: int
    postrun_workers: int
    external_sessions: int
    """Open sessions of agents that run elsewhere."""
    gate_closed: int
    """1 while calls are held for a weight update."""
    gate_calls_waiting: int
    calls_in_flight: int
    model_calls: int
    """Total recorded, including cut-off ones."""
    prompt_tokens: int
    """Total ids of prompts."""
    sampled_tokens: int
    """Total ids sampled."""
    contexts: int
    """Total completions."""
    contexts_diverged: int
    """Total completions whose prompt differs from the ids before it."""
    untrainable: int
    """Total completions that no row may use."""
    checkpoints: int = 0
    """Session checkpoints kept."""
    checkpoint_bytes: int = 0
    """Their disk usage."""
    warm_sandboxes: int = 0
    """Prepared sandboxes that wait for a session."""
    disk_free_bytes: int = 0
    """On the disk of its data folder."""
    disk_reserve_bytes: int = 0
    memory_bytes: int = 0
    """The memory of its machine."""
    memory_free_bytes: int = 0
    """That programs may still take."""
    sandbox_memory_bytes: int = 0
    """That agents' sandboxes take now, together."""
    sandbox_cpus: float = 0.0
    """Processors that they take now, as control groups count them."""
    largest_sandbox_bytes: int = 0
    orphans: int = 0
    """Folders of sandboxes that it does not have."""
    policy_version: int | None = None
    """Version recorded with tokens sampled now; None: never set."""

    def as_metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in msgspec.structs.asdict(self).items() if value is not None}

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Self | None:
        """Returns the figures in `metrics`; None for a node that does not report them: another implementation, or one
        that has just joined."""
        try:
            return msgspec.convert(dict(metrics), cls, strict=False)  # figures travel as floats
        except msgspec.ValidationError:
            return None
