"""What of training needs PyTorch, and what must not."""

from __future__ import annotations

import subprocess
import sys

_LIGHT = (
    "trainers.contract",
    "training.collecting.admission",
    "training.collecting.buffer",
    "training.collecting.collector",
    "training.collecting.degenerates",
    "training.collecting.groups",
    "training.collecting.task_stream",
    "training.learning.advantages",
    "training.learning.algorithms",
    "training.learning.credit.traces",
    "training.learning.masks",
    "training.learning.packing",
    "training.learning.rewards",
    "training.learning.samples",
    "training.learning.credit.shapley",
    "training.run.evaluation",
    "training.weights.fleet",
    "training.weights.folders",
    "training.weights.update",
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
