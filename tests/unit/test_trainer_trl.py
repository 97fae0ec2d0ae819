"""The rows that TRL is given keep the contract with trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gangline.integrations.trl import rollout_rows
from gangline.testing.trainer_conformance import Check, ReadRow, Subject, checks, run_check
from gangline.training.groups import Group


def convert(groups: Sequence[Group], num_samples: int) -> dict[str, Any]:
    return rollout_rows(groups, num_samples)


def read(batch: dict[str, Any]) -> list[ReadRow]:
    return [
        ReadRow(
            task_id=session.task_id,
            session_id=session.session_id,
            prompt_ids=prompt_ids,
            response_ids=completion_ids,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            reward=session.reward,
        )
        for session, prompt_ids, completion_ids, mask, logprobs, versions in zip(
            *(batch[name] for name in ("session", "prompt_ids", "completion_ids", "env_mask", "logprobs", "versions")),
            strict=True,
        )
    ]


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_trls_rows_keep_the_contract(check: Check) -> None:
    run_check(check, Subject(convert=convert, read=read, one_trace_per_session=True))
