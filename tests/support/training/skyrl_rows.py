"""A `GeneratorOutput` read as SkyRL reads it, and its `TrajectoryID` as described at a956457."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gangline.testing.trainer_conformance import ReadRow

__all__ = ["TrajectoryID", "read_rows"]


@dataclass
class TrajectoryID:
    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def read_rows(output: dict[str, Any]) -> list[ReadRow]:
    """By the columns that SkyRL reads; versions, which it does not, by ours."""
    rows = list[ReadRow]()
    for number, about in enumerate(output["env_metrics"]):
        versions = np.full(len(output["response_ids"][number]), -1)
        for version, start, end in about["version_spans"]:
            versions[start:end] = version
        trajectory = output["trajectory_ids"][number]
        rows.append(
            ReadRow(
                task_id=trajectory.instance_id,
                session_id=trajectory.to_string(),
                prompt_ids=output["prompt_token_ids"][number],
                response_ids=output["response_ids"][number],
                loss_mask=output["loss_masks"][number],
                logprobs=output["rollout_logprobs"][number],
                versions=versions.tolist(),
                reward=output["rewards"][number],
            )
        )
    return rows
