"""What of training needs PyTorch, and what must not."""

from __future__ import annotations

import subprocess
import sys

_LIGHT = (
    "admission",
    "advantages",
    "algorithms",
    "buffer",
    "collector",
    "contract",
    "credit",
    "degenerates",
    "evaluation",
    "groups",
    "masks",
    "packing",
    "rewards",
    "samples",
    "shapley",
    "weight_fleet",
    "weight_folders",
    "weight_update",
)


def test_all_but_loss_and_forward_do_without_pytorch() -> None:
    imports = ", ".join(f"gangline.training.{name}" for name in _LIGHT)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; import {imports}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
