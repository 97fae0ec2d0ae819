"""slime's rollout function: `--rollout-function-path rollout.generate_rollout`, with this folder in PYTHONPATH.

Variables: SWE_GYM_RUN, the run's folder, whose name begins the ids of its tasks. SWE_GYM_SERVER, URL of the rollout
server. SWE_GYM_TOKEN, its control token. SWE_GYM_PORT, where the server calls back. SWE_GYM_CALLBACK, this
machine's URL with that port, where the server is on another machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gangline.train.trainers.slime import SlimeRollout

RUN = Path(os.environ["SWE_GYM_RUN"])
CALLBACK = os.environ.get("SWE_GYM_CALLBACK")


def task_of(sample: Any) -> dict[str, Any]:
    """sample: one of slime's prompts, made by `tasks.py --prompts`."""
    return sample.metadata["task"] | {"task_id": f"{RUN.name}-{sample.index}"}


generate_rollout = SlimeRollout(
    os.environ.get("SWE_GYM_SERVER", "http://127.0.0.1:8700"),
    task_of,
    RUN / "inbox",
    token_env="SWE_GYM_TOKEN",
    host="127.0.0.1" if CALLBACK is None else "0.0.0.0",
    port=int(os.environ.get("SWE_GYM_PORT", "8650")),
    public_url=CALLBACK,
)
