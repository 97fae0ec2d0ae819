"""A node's Prometheus metrics: stages, model calls, tokens, drift, gate, errors, backends.

Counters grow with events (completions when durable, attempts when they end, errors when sent to an agent). Gauges are
read at the scrape. Labels are small fixed sets and backends, never sessions or tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gangline.domain.completion import EMPTY_GENERATION, Completion
from gangline.domain.errors import GanglineError
from gangline.domain.lifecycle import STAGES
from gangline.domain.node_numbers import NodeNumbers
from gangline.domain.node_views import BackendView, BreakerView, DiskState, PlacesView
from gangline.domain.session import SessionResult
from gangline.domain.usage import Usage
from gangline.domain.views import PULLING
from gangline.domain.weight_updates import slowest_phase
from gangline.machine.telemetry.exposition import SPEED_FIGURES, LoopLag, counted, exposition, gauge, new_registry
from gangline.node.backends.gate import Gate
from gangline.node.backends.gate_updates import GateUpdates
from gangline.node.health.sandbox_use import SandboxesNow, memory_of_machine
from gangline.rows.forks.calls import REPLAYED
from gangline.sandbox.images.supply import ImagesNow

_POOLS = ("init_workers", "ready_slots", "run_slots", "postrun_workers")
_STAGE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_MEMORY_BUCKETS_BYTES = [float(1 << power) for power in range(24, 37)]  # 16 MiB to 64 GiB
_CALL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


_MAX_PULLING = 32
_CACHE_FIGURES = (
    ("cache_tokens", "num_tokens", "Size of the engine's prefix cache, where sessions have places in it."),
    ("held_tokens", "num_held_tokens", "Contexts of the sessions with a place in the cache."),
    ("places", "num_places", "Sessions with a place in the cache."),
    ("hit_rate", "hit_rate", "Part of the prompts' tokens that was cached, in the last seconds."),
)
"""(metric, field of `CacheView`, text)"""
_DISK_FIGURES = ("free_bytes", "reserve_bytes", "free_files", "reserve_files")


class NodeNow(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a node's gauges."""

    stages: Mapping[str, int]
    """stage -> sessions in it."""
    sizes: Mapping[str, int]
    """pool -> its size."""
    num_stuck: int = 0
    """Sessions that exceeded their budgets."""
    breaker: BreakerView = BreakerView(state="closed")
    disk: DiskState | None = None
    """None: not watched."""
    sandboxes: SandboxesNow = SandboxesNow()
    num_orphans: int = 0
    """Folders of sandboxes that the node does not have."""
    num_external: int
    """Open sessions of agents that run elsewhere."""
    num_checkpoints: int = 0
    """Session checkpoints kept."""
    checkpoint_bytes: int = 0
    """Disk usage of the checkpoints."""
    num_warm: int = 0
    """Sandboxes that wait for a session."""
    backends: Sequence[BackendView]
    places: PlacesView | None = None
    """None: sessions have no places."""
    gate: Gate
    images: ImagesNow = ImagesNow()

    def troubles(self) -> dict[str, float]:
        """Returns figures for the heartbeat: how many sessions hang, at which boundary the breaker is open, how many
        sessions wait for which image, a disk that is low, the slowest phase of the last weight update, and the largest
        sandboxes."""
        broken = {} if self.breaker.state == "closed" else {f"breaker_open_{self.breaker.boundary}": 1.0}
        pulling = {f"{PULLING}{name}": float(num) for name, num in list(self.images.waiting.items())[:_MAX_PULLING]}
        hanging = {"num_stuck": float(self.num_stuck)}
        return hanging | broken | pulling | self._low_disk() | self._slow_update() | self.sandboxes.top

    def _low_disk(self) -> dict[str, float]:
        if self.disk is None or not self.disk.is_low:
            return {}
        return {f"disk_low_{name}": float(getattr(self.disk, name)) for name in _DISK_FIGURES}

    def _slow_update(self) -> dict[str, float]:
        phases = self.gate.updates.last[-1].phases if self.gate.updates.last else {}
        if (slowest := slowest_phase(phases)) is None:
            return {}
        return {f"slow_update_{slowest}": phases[slowest], "slow_update": sum(phases.values())}


class _Totals(msgspec.Struct):
    """The heartbeat's totals of the counters below."""

    model_calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    contexts: int = 0
    contexts_diverged: int = 0
    untrainable: int = 0


class _AttemptMetrics:
    """Counters of ended attempts and of their resources."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._attempts = Counter(
            "gangline_attempts", "Attempts that ended on this node.", ["outcome"], registry=registry
        )
        self._stage_s = Histogram(
            "gangline_stage_seconds",
            "Seconds that attempts spent in a stage.",
            ["stage"],
            buckets=_STAGE_BUCKETS_S,
            registry=registry,
        )
        self._failures = Counter(
            "gangline_failures", "Failed attempts, by boundary and code.", ["boundary", "code"], registry=registry
        )
        self._cpu_s = Counter(
            "gangline_sandbox_cpu_seconds",
            "Processor time in sandboxes of attempts that ended, where it is known.",
            ["part"],
            registry=registry,
        )
        self._peak_bytes = Histogram(
            "gangline_sandbox_peak_memory_bytes",
            "Highest memory of attempts' sandboxes, where it is known.",
            ["part"],
            buckets=_MEMORY_BUCKETS_BYTES,
            registry=registry,
        )
        self._written_bytes = Counter(
            "gangline_sandbox_written_bytes",
            "Bytes that sandboxes of attempts that ended have written to disks, where it is known.",
            ["part"],
            registry=registry,
        )
        self._network_bytes = Counter(
            "gangline_sandbox_network_bytes",
            "Bytes between sandboxes of attempts that ended and the node's proxy, or hosts of network lists.",
            ["part", "way", "direction"],
            registry=registry,
        )

    def ended(self, result: SessionResult) -> None:
        self._attempts.labels(result.outcome).inc()
        if result.failure is not None:
            self._failures.labels(result.failure.boundary, result.failure.code).inc()
        for timing in result.timings:
            self._stage_s.labels(timing.stage).observe(max(0.0, timing.ended_at - timing.started_at))
        if result.usage is not None:
            self._used("agent", result.usage.agent)
            if result.usage.grading is not None:
                self._used("grading", result.usage.grading)

    def _used(self, part: str, usage: Usage) -> None:
        self._cpu_s.labels(part).inc(usage.cpu_s or 0.0)
        self._written_bytes.labels(part).inc(usage.written_bytes or 0)
        if usage.peak_memory_bytes is not None:
            self._peak_bytes.labels(part).observe(usage.peak_memory_bytes)
        for way in ("proxy", "list"):
            for direction in ("sent", "received"):
                num_bytes = getattr(usage, f"{way}_{direction}_bytes")
                self._network_bytes.labels(part, way, direction).inc(num_bytes or 0)


class NodeMetrics:
    """One per node. Call all methods on its event loop."""

    def __init__(self) -> None:
        self._now: NodeNow | None = None
        self._totals = _Totals()
        self._registry = registry = new_registry(self._read)
        self.loop_lag = LoopLag(registry)
        self._attempts = _AttemptMetrics(registry)
        self._errors = Counter(
            "gangline_call_errors",
            "Errors returned to agents, by boundary and code.",
            ["boundary", "code"],
            registry=registry,
        )
        self._calls = Counter("gangline_model_calls", "Recorded model calls.", ["dialect", "status"], registry=registry)
        self._call_s = Histogram(
            "gangline_model_call_seconds",
            "Seconds from a call's arrival to its record.",
            buckets=_CALL_BUCKETS_S,
            registry=registry,
        )
        self._prompt_tokens = Counter("gangline_prompt_tokens", "Prompt tokens.", registry=registry)
        self._sampled_tokens = Counter("gangline_sampled_tokens", "Sampled tokens.", registry=registry)
        self._contexts = Counter(
            "gangline_contexts",
            "Completions by the context of their prompt and the source of its ids.",
            ["context", "prompt_source"],
            registry=registry,
        )
        self._drift = Counter("gangline_drift", "Contexts that diverged, by cause.", ["cause"], registry=registry)
        self._empty = Counter(
            "gangline_empty_generations",
            "Replies without text, thinking or tool call, by whether they were delivered or sampled again.",
            ["fate"],
            registry=registry,
        )
        self._untrainable = Counter("gangline_untrainable", "Completions that no row may use.", registry=registry)

    def kept(self, completions: Sequence[Completion], _entry: bytes = b"") -> None:
        """Count durable completions of one call. A listener of the journal."""
        totals = self._totals
        for completion in completions:
            if REPLAYED in completion.metadata:
                continue  # already counted by its parent's node
            certificate = completion.certificate
            if completion.choice_index == 0:
                num_prompt = completion.prompt_shared + len(completion.prompt_suffix_ids)
                self._calls.labels(completion.dialect, completion.status).inc()
                self._call_s.observe(max(0.0, completion.finished_at - completion.started_at))
                self._prompt_tokens.inc(num_prompt)
                if (fate := completion.metadata.get(EMPTY_GENERATION)) is not None:
                    self._empty.labels(fate).inc()
                totals.model_calls += 1
                totals.prompt_tokens += num_prompt
            self._sampled_tokens.inc(len(completion.sampled_ids))
            totals.sampled_tokens += len(completion.sampled_ids)
            self._contexts.labels(certificate.context, certificate.prompt_source).inc()
            totals.contexts += 1
            if certificate.context == "diverged":
                self._drift.labels(certificate.cause or "unknown").inc()
                totals.contexts_diverged += 1
            if certificate.untrainable is not None:
                self._untrainable.inc()
                totals.untrainable += 1

    def attempt_ended(self, result: SessionResult) -> None:
        self._attempts.ended(result)

    def error_told(self, error: GanglineError) -> None:
        """Count an error that answered an agent's call."""
        self._errors.labels(error.boundary, error.code).inc()

    def numbers(self, now: NodeNow) -> NodeNumbers:
        """Returns the numbers for the heartbeat."""
        gate = now.gate.state
        memory_bytes, memory_free_bytes = memory_of_machine()
        return NodeNumbers(
            **{stage: now.stages[stage] for stage in STAGES},
            **{pool: int(now.sizes[pool]) for pool in _POOLS},
            external_sessions=now.num_external,
            gate_closed=int(gate.is_paused),
            gate_calls_waiting=gate.num_waiting,
            calls_in_flight=gate.num_in_flight,
            policy_version=gate.version,
            checkpoints=now.num_checkpoints,
            checkpoint_bytes=now.checkpoint_bytes,
            warm_sandboxes=now.num_warm,
            disk_free_bytes=0 if now.disk is None else now.disk.free_bytes,
            disk_reserve_bytes=0 if now.disk is None else now.disk.reserve_bytes,
            memory_bytes=memory_bytes,
            memory_free_bytes=memory_free_bytes,
            sandbox_memory_bytes=now.sandboxes.memory_bytes,
            sandbox_cpus=now.sandboxes.cpus,
            largest_sandbox_bytes=now.sandboxes.largest_bytes,
            orphans=now.num_orphans,
            **msgspec.structs.asdict(self._totals),
        )

    def exposition(self, now: NodeNow) -> bytes:
        self._now = now
        return exposition(self._registry)

    def _read(self) -> Iterable[Metric]:
        if (now := self._now) is None:
            return
        gate = now.gate.state
        yield gauge("gangline_sessions", "Sessions on this node, by stage.", "stage", now.stages)
        yield gauge("gangline_pool_size", "Sizes of the stages' pools.", "pool", now.sizes)
        yield GaugeMetricFamily("gangline_stuck_sessions", "Sessions that have exceeded their budgets.", now.num_stuck)
        yield GaugeMetricFamily(
            "gangline_breaker_open",
            "1 while the node pauses leasing after faults of its own.",
            now.breaker.state != "closed",
        )
        low = now.disk is not None and now.disk.is_low
        yield GaugeMetricFamily("gangline_disk_low", "1 while the disk is below its reserve: no leases.", low)
        if now.disk is not None:
            yield GaugeMetricFamily("gangline_disk_free_bytes", "Free on the disk of data.", now.disk.free_bytes)
        yield from _of_sandboxes(now)
        yield GaugeMetricFamily("gangline_external_sessions", "Open external sessions.", now.num_external)
        yield GaugeMetricFamily("gangline_checkpoints", "Checkpoints of sessions.", now.num_checkpoints)
        yield GaugeMetricFamily("gangline_checkpoint_bytes", "Disk usage of checkpoints.", now.checkpoint_bytes)
        yield GaugeMetricFamily("gangline_warm_sandboxes", "Sandboxes that wait for a session.", now.num_warm)
        yield GaugeMetricFamily("gangline_gate_closed", "1 while calls are held for a weight update.", gate.is_paused)
        yield GaugeMetricFamily("gangline_gate_calls_waiting", "Calls waiting at the gate.", gate.num_waiting)
        yield GaugeMetricFamily("gangline_calls_in_flight", "Calls in flight at an engine.", gate.num_in_flight)
        yield counted("gangline_gate_closed_seconds", "Total seconds for which the gate was closed.", now.gate.closed_s)
        yield counted("gangline_gate_updates", "Weight updates that ended at this gate.", now.gate.updates.num_ended)
        yield _phases(now.gate.updates)
        yield counted("gangline_gate_waited_seconds", "Total seconds that calls waited at the gate.", now.gate.waited_s)
        yield counted("gangline_gate_expired", "Gates opened because their lease expired.", gate.num_expired_leases)
        if gate.version is not None:
            yield GaugeMetricFamily("gangline_policy_version", "Policy version of tokens sampled now.", gate.version)
        yield from _of_images(now.images)
        yield from _of_backends(now.backends)
        if (places := now.places) is not None:
            yield GaugeMetricFamily("gangline_places_waiting", "Sessions waiting for a place.", places.num_waiting)
            yield GaugeMetricFamily(
                "gangline_places_longest_wait_seconds", "Longest wait for a place so far.", places.longest_wait_s
            )


def _of_sandboxes(now: NodeNow) -> Iterable[Metric]:
    use = now.sandboxes
    yield GaugeMetricFamily("gangline_sandbox_memory_bytes", "Memory of agents' sandboxes now.", use.memory_bytes)
    yield GaugeMetricFamily("gangline_largest_sandbox_bytes", "Memory of the largest one now.", use.largest_bytes)
    yield GaugeMetricFamily("gangline_sandbox_cpus", "Processors that sandboxes take now, where it is known.", use.cpus)
    yield GaugeMetricFamily("gangline_orphans", "Folders of sandboxes that the node does not have.", now.num_orphans)


def _of_images(images: ImagesNow) -> Iterable[Metric]:
    counts = images.counts
    pulls = CounterMetricFamily("gangline_image_pulls", "Pulls of images that ended, by how.", labels=["result"])
    for result, number in (("pulled", counts.num_pulled), ("failed", counts.num_failed)):
        pulls.add_metric([result], number)
    yield pulls
    yield counted("gangline_image_pull_seconds", "Total seconds of pulls that succeeded, with pauses.", counts.seconds)
    yield counted("gangline_image_pulled_bytes", "Sizes of pulled images that the engine lacked.", counts.num_bytes)
    yield counted("gangline_images_removed", "Pulled images that were removed for want of room.", images.num_removed)
    yield GaugeMetricFamily("gangline_image_cache_bytes", "Sizes of the pulled images.", images.cache_bytes)
    waiting = sum(images.waiting.values())
    yield GaugeMetricFamily("gangline_image_waiting_sessions", "Sessions that wait for the pull of an image.", waiting)


def _phases(updates: GateUpdates) -> Metric:
    family = CounterMetricFamily(
        "gangline_gate_phase_seconds",
        "Total seconds of weight updates, by phase. The gate measures `drain` and `held`; trainers report the others.",
        labels=["phase", "by"],
    )
    for by, seconds in (("gate", updates.measured_s), ("trainer", updates.reported_s)):
        for phase, value in seconds.items():
            family.add_metric([phase, by], value)
    return family


def _of_backends(backends: Sequence[BackendView]) -> Iterable[Metric]:
    names = ["backend", "engine", "url"]

    def family(name: str, text: str, read: Callable[[BackendView], float | None]) -> Metric:
        found = GaugeMetricFamily(f"gangline_backend_{name}", text, labels=names)
        for view in backends:
            if (value := read(view)) is not None:
                found.add_metric([view.backend_id, view.engine, view.url], value)
        return found

    yield family("up", "1 while the engine is healthy.", lambda view: view.state == "healthy")
    yield family("sessions", "Sessions assigned to the engine.", lambda view: view.num_sessions)
    yield family("calls", "Calls in flight.", lambda view: view.num_calls)
    for name, field, text in SPEED_FIGURES:
        yield family(name, text, lambda view, field=field: getattr(view.speed, field, None))
    for name, field, text in _CACHE_FIGURES:
        yield family(name, text, lambda view, field=field: getattr(view.cache, field, None))
