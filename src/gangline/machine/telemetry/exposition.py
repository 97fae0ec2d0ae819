"""Numbers in Prometheus format: separate registries, gauges read on demand, and loop lag.

No number has a session or task label: a node lives for weeks, and each label value would be kept as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

Reading = Callable[[], Iterable[Metric]]
"""Returns the current metrics; called at each scrape."""

SPEED_FIGURES = (
    ("first_token_seconds", "first_token_s", "Mean time to the first token, over a minute."),
    ("wait_seconds", "waits_s", "Longest wait for a first token now."),
    ("tokens_per_second", "tokens_per_s", "Sampled for the node, over a minute."),
    ("queued_calls", "num_queued", "Calls that wait in the engine, by its own page."),
)
"""End of a metric's name, field of `EngineSpeed`, text. Nodes show them for their engines, servers for all engines."""

_LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class _Readings(Collector):
    def __init__(self, read: Reading) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()

    def describe(self) -> Iterable[Metric]:
        """Nothing: a collector that describes itself is not asked for its values when it is registered."""
        return ()


def new_registry(read: Reading) -> CollectorRegistry:
    """A registry with the process's memory, CPU time and descriptors, and the metrics of `read`."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(_Readings(read))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """All metrics, in the text format `CONTENT_TYPE`."""
    return generate_latest(registry)


def gauge(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    """One value per label value."""
    family = GaugeMetricFamily(name, about, labels=[label])
    for one, value in values.items():
        family.add_metric([one], value)
    return family


def counted(name: str, about: str, value: float) -> Metric:
    """A total counted elsewhere; `_total` is appended to the name."""
    return CounterMetricFamily(name, about, value=value)


class LoopLag:
    """The delay with which the event loop runs due callbacks, which every session on it experiences repeatedly."""

    def __init__(self, registry: CollectorRegistry, *, every_s: float = 0.25) -> None:
        self._every_s = every_s
        self._lag_s = Histogram(
            "gangline_loop_lag_seconds",
            "Delay with which the event loop woke a timer.",
            buckets=_LAG_BUCKETS_S,
            registry=registry,
        )
        self._worst_s = Gauge(
            "gangline_loop_lag_worst_seconds", "Largest delay since the last scrape.", registry=registry
        )
        self._worst_seen_s = 0.0
        self._worst_s.set_function(self._take_worst)

    async def watch(self) -> None:
        """Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._every_s
            await asyncio.sleep(self._every_s)
            self.saw(max(0.0, loop.time() - due))

    def saw(self, lag_s: float) -> None:
        self._lag_s.observe(lag_s)
        self._worst_seen_s = max(self._worst_seen_s, lag_s)

    def _take_worst(self) -> float:
        worst_s, self._worst_seen_s = self._worst_seen_s, 0.0
        return worst_s
