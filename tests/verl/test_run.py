"""One file, one command: a service, and verl's own trainer on this machine's CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.training.verl_experiment import ROOT, write_experiment

GANGLINE = (str(ROOT / ".venv" / "bin" / "python"), "-P", "-m", "gangline")


def gangline(*arguments: object, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """In Gangline's own environment, as its user calls it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GANGLINE_")}
    return subprocess.run(
        [*GANGLINE, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, env=kept, check=False
    )


@pytest.mark.parametrize(("mode", "num_workers"), [("sync", 2), ("colocate_async", 1)])
def test_verl_trains_on_sessions(tmp_path: Path, mode: str, num_workers: int) -> None:
    spec = write_experiment(tmp_path, mode=mode, num_workers=num_workers, num_steps=2)
    done = gangline("train", "run", spec, "--data", tmp_path / "data", "--json")
    assert done.returncode == 0, done.stderr
    before, first, last = json.loads(done.stdout)["metrics"]
    assert (before["step"], first["step"], last["step"]) == (0, 1, 2)
    for metrics in (before, last):
        assert 0 <= metrics["val-core/gangline/reward/mean@1"] <= 1
    # verl's own log-probs of our rows: the engines had its weights, and the rows their tokens.
    assert first["training/rollout_probs_diff_max"] < 1e-6
    assert first["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert 0 < first["critic/score/mean"] < 1
    assert first["actor/grad_norm"] > 0
    stale = last["training/off_policy/trajectory_staleness_worst/max"]
    if mode == "sync":
        assert stale == 0
        assert last["training/rollout_probs_diff_max"] < 1e-6
    else:
        assert 0 <= stale <= 1


def test_verls_own_loader_judges_the_settings(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "data.train_batch_size": 2,
        "trainer.v1.trainer_mode": "snyc",
        "actor_rollout_ref.rollout.top_p": 0.9,
    }
    spec = write_experiment(tmp_path, mode="sync", num_workers=1, num_steps=1, **wrong)
    done = gangline("train", "validate", spec)
    assert done.returncode != 0
    for problem in (
        "train_batch_size (2) must be >= actor.ppo_mini_batch_size (4)",
        "Unknown trainer 'snyc'",
        "rollout.top_p must be 1",
    ):
        assert problem in done.stderr
