"""What of training needs PyTorch, and what must not."""

from __future__ import annotations

import subprocess
import sys

_LIGHT = (
    "train.trainers.contract",
    "train.collecting.admission",
    "train.collecting.buffer",
    "train.collecting.collector",
    "train.collecting.degenerates",
    "train.collecting.groups",
    "train.collecting.task_stream",
    "train.learning.advantages",
    "train.learning.algorithms",
    "train.learning.credit.traces",
    "train.learning.masks",
    "train.learning.packing",
    "train.learning.rewards",
    "train.learning.samples",
    "train.learning.credit.coalitions",
    "train.run.evaluation",
    "train.weights.fleet",
    "train.weights.update",
)


def test_all_but_loss_and_forward_do_without_pytorch() -> None:
    imports = ", ".join(f"gangline.{name}" for name in _LIGHT)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; import {imports}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
