"""Sessions in the format of verl's transfer queue: one row per trace, under `{uid}_{session}_{index}`.

verl reads the first and the last policy version of a row; `extra_fields` contains all of them.

verl compares the rows of highest index, one per session, and gives each advantage to all rows of its session. So every
row has its session's reward; if the evaluator rewards traces separately, the trace's own is in `extra_fields`.

Source: verl 0.9.1, `trainer/ppo/v1/agent_loop_tq.py` (fields and tags), `trainer/ppo/v1/utils.py` (the comparison).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gangline.domain.errors import InvalidGroup
from gangline.domain.session import SessionResult
from gangline.rows.measured import why_not_measured
from gangline.rows.shared_prefixes import with_whole_prompts
from gangline.train.collecting.admission import version_spans
from gangline.train.collecting.groups import Group
from gangline.train.trainers.contract import TrainerRow, rows_of
from gangline.train.trainers.verl.prompts import Prompt

_NOT_REWARD_PARTS = ("reward", "uid")
"""Columns of its validation metrics that verl creates itself."""


@dataclass
class QueueRows:
    """Parallel lists with one entry per row."""

    keys: list[str] = field(default_factory=list["str"])
    fields: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Tensors are unpadded: `prompts` [P], `responses`, `response_mask`, `loss_mask`, `rollout_log_probs`, `rm_scores`
    [R], `input_ids`, `position_ids` [P + R]."""
    tags: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def training_rows(
    prompt: Prompt, group: Group, order: Sequence[str], *, temperature: float, compares_sessions: bool
) -> QueueRows:
    """Rows of a group whose sessions are all valid.

    order: ids of the prompt's sessions, by which rows are numbered. temperature: verl's divisor of logits.
    compares_sessions: whether verl's estimator counts sessions; otherwise it counts rows, and a session may have only
    one.

    Raises: InvalidGroup if a session is not valid, was sampled at another temperature, has tokens of unknown version,
    or has several traces although rows are compared.
    """
    rows = rows_of(group, len(group.sessions), temperature=temperature)
    if not compares_sessions and len(rows) > len(group.sessions):
        raise InvalidGroup(
            f"a session of {group.task_id} has several traces, which only algorithm.adv_estimator=grpo compares by "
            "session: choose it, or a builder that makes one trace (`builder` of the task)."
        )
    return _queued(prompt, rows, group.sessions, order)


def validation_rows(prompt: Prompt, sessions: Sequence[SessionResult], order: Sequence[str]) -> QueueRows:
    """Rows of the sessions with a reward, with everything that they sampled, because validation does not train."""
    graded = [session for session in sessions if why_not_measured(session) is None]
    return _queued(prompt, [row for session in graded for row in _all_traces(session)], graded, order)


def _all_traces(session: SessionResult) -> Iterator[TrainerRow]:
    traces = () if session.trajectory is None else session.trajectory.traces
    for trace in with_whole_prompts(traces):
        if len(trace.response_ids) == 0:
            continue
        yield TrainerRow.of(trace, session, session.task_id)


def _queued(
    prompt: Prompt, rows: Sequence[TrainerRow], sessions: Sequence[SessionResult], order: Sequence[str]
) -> QueueRows:
    details = {session.session_id: _numbers(session.reward_details) for session in sessions}
    queued = QueueRows()
    indices = dict.fromkeys(order, 0)
    for row in rows:
        number, index = order.index(row.session_id), indices[row.session_id]
        indices[row.session_id] += 1
        first, last = _versions(prompt, row)
        extra = {
            "reward_extra_info": details[row.session_id],
            "global_steps": last,
            "min_global_steps": first,
            "max_global_steps": last,
            "gangline_session": row.session_id,
            "gangline_trace": row.trace_id,
            "trace_reward": row.reward,
            "version_spans": [(span.version, span.start, span.end) for span in version_spans(row.versions)],
        }
        queued.keys.append(f"{prompt.uid}_{number}_{index}")
        queued.fields.append(prompt.columns | _fields(row) | {"session_id": number, "extra_fields": extra})
        queued.tags.append(_tag(prompt, row, first, last))
    return queued


def _numbers(details: dict[str, Any]) -> dict[str, float]:
    """Parts of the reward that verl can average."""
    return {
        name: float(value)
        for name, value in details.items()
        if isinstance(value, bool | int | float) and name not in _NOT_REWARD_PARTS
    }


def _versions(prompt: Prompt, row: TrainerRow) -> tuple[int, int]:
    """The oldest and the newest version of the trained tokens; the prompt's step if there are none (validation)."""
    trained = row.versions[row.loss_mask != 0]
    if len(trained) == 0:
        return prompt.global_steps, prompt.global_steps
    if (first := int(trained.min())) < 0:
        raise InvalidGroup(
            f"the policy version of some tokens of {row.trace_id} is unknown, and verl drops stale rows by it: let the "
            "nodes sample from verl's engines alone."
        )
    return first, int(trained.max())


def _fields(row: TrainerRow) -> dict[str, Any]:
    prompts, responses = _tensor(row.prompt_ids, torch.int64), _tensor(row.response_ids, torch.int64)
    mask = _tensor(row.loss_mask, torch.int64)
    scores = torch.zeros(len(responses), dtype=torch.float32)
    scores[-1] = row.session_reward
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses]),
        "position_ids": torch.arange(len(prompts) + len(responses), dtype=torch.int64),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rollout_log_probs": _tensor(row.logprobs, torch.float32),
        "rm_scores": scores,
        "num_turns": len(row.trace.spans),
        "multi_modal_inputs": {},
    }


def _tensor(values: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values.astype(values.dtype)).to(dtype)  # a copy: results are read-only


def _tag(prompt: Prompt, row: TrainerRow, first: int, last: int) -> dict[str, Any]:
    num_prompt, num_response = len(row.prompt_ids), len(row.response_ids)
    return {
        "status": "success",
        "prompt_len": num_prompt,
        "response_len": num_response,
        "seq_len": num_prompt + num_response,
        "global_steps": prompt.global_steps,
        "min_global_steps": first,
        "max_global_steps": last,
    }
