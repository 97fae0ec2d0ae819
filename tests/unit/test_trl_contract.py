"""TRL's rows against the contract with trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gangline.testing.trainer_conformance import ReadRow, Subject, checks, run_check
from gangline.train.trainers.trl import rollout_rows, session_reward


def read(batch: dict[str, Any]) -> list[ReadRow]:
    columns = ("session", "prompt_ids", "completion_ids", "env_mask", "logprobs", "versions")
    return [
        ReadRow(
            task_id=session.task_id,
            session_id=session.session_id,
            prompt_ids=prompt,
            response_ids=response,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            reward=session_reward(session=[session])[0] or 0.0,
        )
        for session, prompt, response, mask, logprobs, versions in zip(*(batch[one] for one in columns), strict=True)
    ]


SUBJECT = Subject(convert=rollout_rows, read=read, one_trace_per_session=True)


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_trls_rows_keep_the_contract(check: Callable[[Subject[Any]], None]) -> None:
    run_check(check, SUBJECT)
