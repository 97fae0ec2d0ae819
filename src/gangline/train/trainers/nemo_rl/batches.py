"""Converts groups to NeMo RL batches, whose rows are sessions: one sequence each, with a fixed number per step.

Groups that such a batch cannot represent are rejected. A session with several traces becomes one row if each trace
continues the previous one, and is rejected otherwise. NeMo RL compares rows with equal prompt tokens, so all rows of a
group must have the same prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gangline.domain.errors import InvalidGroup
from gangline.domain.lifecycle import STOPPED_BY_LIMIT
from gangline.train.collecting.admission import version_spans
from gangline.train.collecting.groups import Group
from gangline.train.trainers.contract import TrainerRow, rows_of

_CUT_SHORT = ("agent_timeout", *STOPPED_BY_LIMIT)


def to_batch(group: Group, num_samples: int, *, temperature: float = 1.0) -> dict[str, Any]:
    """A group's rows in the order of its sessions, in the format of NeMo RL's rollouts: fields of its
    `BatchedDataDict`.

    `message_log`: for each row, the prompt as one `user` message, then `assistant` messages of trained tokens with
    `generation_logprobs`, and `tool` messages of other tokens; given by `token_ids`, so text is never tokenised again.
    `length` [B]: ids of the prompt. `total_reward`, `loss_multiplier`, `truncated` [B]. `extra_env_info` contains ids
    and the range of each policy version in the response.

    temperature: NeMo RL's `policy.generation.temperature`.

    Raises: InvalidGroup if the group is incomplete, if traces of a session do not continue each other or have different
    rewards, if prompts differ, or if log-probs are of another temperature.
    """
    by_session = itertools.groupby(rows_of(group, num_samples, temperature=temperature), lambda row: row.session_id)
    rows = [_joined(list(traces)) for _, traces in by_session]
    _require_one_prompt(group, rows)
    return {
        "message_log": [_messages(row) for row in rows],
        "length": torch.tensor([len(row.prompt_ids) for row in rows]),
        "total_reward": torch.tensor([row.reward for row in rows], dtype=torch.float32),
        "loss_multiplier": torch.ones(len(rows)),
        "truncated": torch.tensor([_is_cut_short(row) for row in rows]),
        "idx": list(range(len(rows))),
        "task_name": ["gangline"] * len(rows),
        "extra_env_info": [_about(row) for row in rows],
    }


def _joined(traces: Sequence[TrainerRow]) -> TrainerRow:
    """The traces of a session as one row; each must continue the previous one. Raises: InvalidGroup."""
    if len({trace.reward for trace in traces}) > 1:
        raise InvalidGroup(
            f"traces of session {traces[0].session_id} have their own rewards, and NeMo RL takes one a session: "
            "choose an evaluator that rewards sessions."
        )
    row = traces[0]
    for trace in traces[1:]:
        row = _continued(row, trace)
    return row


def _continued(row: TrainerRow, trace: TrainerRow) -> TrainerRow:
    """`row` followed by the rest of `trace`: the ids in between, masked, and its response."""
    known = np.concatenate([row.prompt_ids, row.response_ids])
    if not np.array_equal(trace.prompt_ids[: len(known)], known):
        raise InvalidGroup(
            f"session {row.session_id} has several traces, and {trace.trace_id} does not continue from the one "
            f"before it: "
            "NeMo RL takes one sequence a session. Choose the builder prefix_merging, and a harness setting without "
            "sub-agents or compaction."
        )
    between = trace.prompt_ids[len(known) :]
    num_between = len(between)
    return replace(
        trace,
        prompt_ids=row.prompt_ids,
        response_ids=np.concatenate([row.response_ids, between, trace.response_ids]),
        loss_mask=np.concatenate([row.loss_mask, np.zeros(num_between, np.int8), trace.loss_mask]),
        logprobs=np.concatenate([row.logprobs, np.zeros(num_between, np.float32), trace.logprobs]),
        versions=np.concatenate([row.versions, np.full(num_between, -1, np.int32), trace.versions]),
        trace_id=f"{row.trace_id}+{trace.trace_id}",
    )


def _require_one_prompt(group: Group, rows: Sequence[TrainerRow]) -> None:
    if any(not np.array_equal(row.prompt_ids, rows[0].prompt_ids) for row in rows):
        raise InvalidGroup(
            f"the prompts of {group.task_id} differ, and NeMo RL compares only rows of equal prompts, so that these "
            "would teach nothing: take times, ids and paths of the session out of what the harness sends."
        )


def _messages(row: TrainerRow) -> list[dict[str, Any]]:
    """Splits messages where the mask changes, because NeMo RL derives its own mask from roles."""
    messages = [_message("user", row.prompt_ids, False)]
    cuts = [0, *(np.flatnonzero(np.diff(row.loss_mask)) + 1).tolist(), len(row.response_ids)]
    for start, end in itertools.pairwise(cuts):
        is_trained = bool(row.loss_mask[start])
        message = _message("assistant" if is_trained else "tool", row.response_ids[start:end], is_trained)
        if is_trained:  # NeMo RL trains on messages that have log-probs
            message["generation_logprobs"] = torch.from_numpy(row.logprobs[start:end].copy())
        messages.append(message)
    return messages


def _message(role: str, ids: Any, is_trained: bool) -> dict[str, Any]:
    given: Tensor = torch.from_numpy(ids.astype(np.int64))
    return {"role": role, "content": "", "token_ids": given, "token_loss_mask": torch.full_like(given, int(is_trained))}


def _is_cut_short(row: TrainerRow) -> bool:
    return row.outcome in _CUT_SHORT or row.trace.finish_reason == "length"


def _about(row: TrainerRow) -> dict[str, Any]:
    spans = [(span.version, span.start, span.end) for span in version_spans(row.versions)]
    return {
        "task_id": row.task_id,
        "session_id": row.session_id,
        "trace_id": row.trace_id,
        "session_reward": row.session_reward,
        "version_spans": spans,
    }
