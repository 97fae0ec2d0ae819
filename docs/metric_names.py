"""The page of metrics: what server and node show Prometheus, read from what they show."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gangline.domain.lifecycle import STAGES
from gangline.domain.node_views import BackendView, CacheView, DiskState, EngineSpeed, PlacesView
from gangline.domain.views import NodeView, ServiceStatus
from gangline.machine.telemetry.exposition import SPEED_FIGURES
from gangline.node.backends.gate import Gate
from gangline.node.health.metrics import NodeMetrics, NodeNow
from gangline.server.service.metrics import ServerMetrics

_INTRODUCTION = """\
# Metrics

`GET /metrics` of a server and of a node, in Prometheus's text format, with the control token
([operations](../guides/operations.md) shows how to scrape it). Labels are in braces; none names a session or a task.
Each process also shows its own (`process_*`, `python_info`). Names that end with `_total` are counters, those marked
*histogram* histograms, the others gauges.
"""


class _Anything(dict[str, float]):
    """Figures of heartbeats, of every name."""

    def get(self, *_: object) -> float:  # type: ignore[override]
        return 0.0


def server_families() -> dict[str, Metric]:
    """name -> family, of a server that has a node."""
    speed = dict.fromkeys((field for _, field, _ in SPEED_FIGURES), 0)
    node = NodeView(
        node_id="n",
        url="",
        capacity=1,
        draining=False,
        num_sessions=0,
        backends=({"url": "", "speed": {**speed, "reply_s": None}},),
        metrics=_Anything(),
        first_seen_at=0,
        last_seen_at=0,
        age_s=0,
    )
    one = {"x": 1}
    status = ServiceStatus(
        version="",
        at=0,
        tasks=one,
        sessions=one,
        stages=one,
        oldest_queued_s=None,
        callbacks=one,
        nodes=(node,),
    )
    return _families(ServerMetrics().exposition(status))


def node_families() -> dict[str, Metric]:
    """name -> family, of a node that has a backend."""
    gate = Gate()
    gate.set_version(1)
    backend = BackendView(
        backend_id="b1",
        url="",
        engine="vllm",
        label=None,
        api_key_env=None,
        is_near=True,
        state="healthy",
        model="",
        version="",
        template=None,  # type: ignore[arg-type]
        num_sessions=0,
        num_assigned=0,
        num_calls=0,
        num_failures=0,
        error=None,
        speed=EngineSpeed(first_token_s=0, waits_s=0, reply_s=0, tokens_per_s=0, num_queued=0),
        since=0,
    )
    cache = CacheView(num_tokens=1, usable=1, num_held_tokens=0, num_places=0, hit_rate=0)
    disk = DiskState(free_bytes=1, reserve_bytes=0, free_files=1, reserve_files=0, is_low=False)
    now = NodeNow(
        disk=disk,
        stages=dict.fromkeys(STAGES, 0),
        sizes={"run_slots": 1},
        num_external=0,
        backends=[msgspec.structs.replace(backend, cache=cache)],
        places=PlacesView(num_waiting=0, longest_wait_s=0, max_wait_s=1),
        gate=gate,
    )
    return _families(NodeMetrics().exposition(now))


def _families(text: bytes) -> dict[str, Metric]:
    found = {family.name: family for family in text_string_to_metric_families(text.decode())}
    return {name: family for name, family in found.items() if _is_ours(name)}


def _is_ours(name: str) -> bool:
    """Not the process's own, nor the times at which counters began."""
    return name.startswith("gangline_") and not name.endswith("_created")


def names(family: Metric) -> set[str]:
    """As queries call them."""
    if family.type == "counter":
        return {f"{family.name}_total"}
    if family.type == "histogram":
        return {f"{family.name}_{end}" for end in ("bucket", "count", "sum")}
    return {family.name}


def _labels_of(owner: object) -> dict[str, tuple[str, ...]]:
    """name -> labels of the metrics that show nothing before something has happened."""
    wrapped = [one for one in vars(owner).values() if isinstance(one, MetricWrapperBase)]
    return {one.describe()[0].name: tuple(one._labelnames) for one in wrapped}


def _rows(families: dict[str, Metric], declared: dict[str, tuple[str, ...]]) -> Iterator[str]:
    for name, family in sorted(families.items()):
        seen = {label for sample in family.samples for label in sample.labels} - {"le"}
        labels = declared.get(name) or tuple(sorted(seen))
        shown = f"{name}_total" if family.type == "counter" else name
        braces = f"{{{', '.join(labels)}}}" if labels else ""
        kind = " *histogram*" if family.type == "histogram" else ""
        yield f"- `{shown}{braces}`{kind}: {family.documentation}"


def metrics() -> str:
    """docs/reference/metrics.md"""
    server = _rows(server_families(), _labels_of(ServerMetrics()))
    node = _rows(node_families(), _labels_of(NodeMetrics()))
    return "\n".join([_INTRODUCTION, "## Server\n", *server, "\n## Node\n", *node]) + "\n"
