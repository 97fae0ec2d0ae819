"""Shares between two tenants whose loads are 100 to 1: the real store, a simulated node and clock.

20,000 sessions of one tenant are queued, and 200 of another. A node of 16 slots runs them until the second one's queue
is empty. Lengths are exponential.

- `fleet.share_error`: the greatest relative error of a tenant's slot-seconds against its weight, of all cases
- `fleet.lease_ms`: wall time of a lease of one session then
"""

from __future__ import annotations

import heapq
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from gangline.domain.session import Lease, SessionResult
from gangline.domain.task import TaskRequest
from gangline.store.sql.tasks import TaskStore

SLOTS, MANY, FEW, SAMPLES = 16, 20_000, 200, 200
CASES = (((1.0, 1.0), (5.0, 20.0)), ((1.0, 1.0), (20.0, 20.0)), ((3.0, 1.0), (5.0, 20.0)), ((1.0, 4.0), (30.0, 5.0)))
"""(weights, mean seconds of a session) of the tenant with many sessions and the one with few."""


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def _submit(store: TaskStore, tenant: str, num: int) -> None:
    task = {"instruction": "x", "agent": {"harness": "shell"}, "num_samples": SAMPLES}
    numbers = range(num // SAMPLES)
    store.submit([TaskRequest.model_validate({**task, "task_id": f"{tenant}-{one}"}) for one in numbers], tenant)


def _result(lease: Lease) -> SessionResult:
    return SessionResult(
        session_id=lease.session_id,
        task_id=lease.task_id,
        node_id="n",
        attempt=lease.attempt,
        fence=lease.fence,
        outcome="completed",
        reward=1.0,
    )


def share_error(weights: tuple[float, float], means_s: tuple[float, float]) -> tuple[float, list[float]]:
    """The greater relative error of both tenants, and the milliseconds of each lease."""
    rng, clock, lengths_ms = random.Random(1), Clock(), list[float]()
    mean_s: dict[str, float] = dict(zip(("many", "few"), means_s, strict=True))
    with tempfile.TemporaryDirectory() as folder, TaskStore(Path(folder) / "db", clock=clock, lease_s=1e9) as store:
        for tenant, num, weight in (("many", MANY, weights[0]), ("few", FEW, weights[1])):
            _submit(store, tenant, num)
            store.set_tenant(tenant, {"weight": weight})
        running: list[tuple[float, str, str, Lease]] = []
        used_s: dict[str, float] = {"many": 0.0, "few": 0.0}
        num_left = FEW
        while num_left:
            began = time.perf_counter()
            leases = store.lease("n", "http://n", SLOTS - len(running))
            lengths_ms.append((time.perf_counter() - began) * 1e3)
            for lease in leases:
                tenant = lease.task_id.partition("-")[0]
                num_left -= tenant == "few"
                end = clock.now + rng.expovariate(1 / mean_s[tenant])
                heapq.heappush(running, (end, lease.session_id, tenant, lease))
            end, _, _, ended = heapq.heappop(running)
            for _, _, tenant, _ in (*running, (0, "", ended.task_id.partition("-")[0], ended)):
                used_s[tenant] += end - clock.now
            clock.now = end
            store.report(_result(ended), lambda: None)
    total_s, total_weight = sum(used_s.values()), sum(weights)
    shares = zip(used_s.values(), weights, strict=True)
    return max(abs(used / total_s / (weight / total_weight) - 1) for used, weight in shares), lengths_ms


def run() -> dict[str, dict[str, Any]]:
    found = [share_error(*case) for case in CASES]
    note = f"{MANY:,} and {FEW} queued sessions of two tenants, {SLOTS} slots, SQLite"
    return {
        "fleet.share_error": {
            "value": round(max(error for error, _ in found), 4),
            "unit": "relative error",
            "note": f"{note}; greatest of {len(CASES)} weights and lengths",
        },
        "fleet.lease_ms": {
            "value": round(median(one for _, each in found for one in each), 3),
            "unit": "ms",
            "note": f"{note}; median of one claim",
        },
    }
