"""Reports of evaluations, from rewards alone."""

from __future__ import annotations

from typing import Any

from gangline.tasks.evals.records import SessionRecord
from gangline.tasks.evals.report import Report, make_report

FAILED = {"outcome": "infra_error", "boundary": "node", "code": "disk_full"}


def session_record(evaluation_id: str, task: str, sample: int, reward: float | None, **changes: Any) -> SessionRecord:
    """None for a reward: the session failed by an infrastructure fault."""
    told: dict[str, Any] = {"outcome": "completed"} | (FAILED if reward is None else {}) | changes
    sizes = {"turns": 2, "prompt_tokens": 10, "sampled_tokens": 5, "seconds": 1.5}
    task_id = f"{evaluation_id}-{task}"
    return SessionRecord(
        session_id=f"{task_id}.{sample}", task=task, sample=sample, reward=reward, **sizes, **told
    )  # fmt: skip


def report_of_rewards(name: str, rewards: dict[str, tuple[float | None, ...]], **changes: Any) -> Report:
    """rewards: task -> its sessions' rewards, as many for each."""
    evaluation_id = f"{name}-0123456789ab"
    records = [
        session_record(evaluation_id, task, sample, reward)
        for task, mine in rewards.items()
        for sample, reward in enumerate(mine)
    ]
    num_samples = max((len(mine) for mine in rewards.values()), default=1)
    ks = sorted({1, num_samples})
    return make_report(name, records, num_samples=num_samples, ks=ks, evaluation_id=evaluation_id, **changes)
