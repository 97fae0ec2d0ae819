"""Evaluator `handler`: calls `eval` of the session's `AgentHandler`, then `final_result`.

The reward is `reward` in `eval`'s result, or 1 or 0 for its `resolved`. If `run` failed, timed out or hit a limit,
`eval` is not called, but the final result may contain the reward. If `eval` fails there is no reward. The whole final
result is kept as the artifact `handler.json`; the details contain its short fields.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.errors import EvaluatorError, RuntimeFault
from gangline.interop.handlers.jobs import Job, as_json, job_of

_ARTIFACT = "handler.json"
_LONGEST_DETAIL_BYTES = 2_000


class HandlerEvaluatorConfig(BaseModel):
    """Empty: evaluator `handler` uses the harness's handler."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HandlerEvaluator:
    """Grades with the handler that ran the session."""

    name: ClassVar[str] = "handler"
    Config: ClassVar[type[BaseModel]] = HandlerEvaluatorConfig

    def __init__(self, config: HandlerEvaluatorConfig) -> None: ...

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: EvaluatorError if `eval` fails or returns no reward, NodeError if the job is gone."""
        job = job_of(context.session_id)
        details = job.details
        details.timeout_error = context.outcome == "agent_timeout"
        failed = await _evaluated(job)
        final = as_json(job.handler.final_result(details))
        context.artifacts[_ARTIFACT] = msgspec.json.encode(final)
        if failed is not None:
            raise EvaluatorError(
                f"handler {job.handler_name!r} failed in eval: {type(failed).__name__}: {failed}"
            ) from failed
        reward = _reward(final if details.eval_results is None else details.eval_results)
        if reward is None:
            raise EvaluatorError(f"handler {job.handler_name!r} names neither a finite `reward` nor `resolved`")
        return Reward(reward=reward, details=_short(final))


async def _evaluated(job: Job) -> Exception | None:
    """Run `eval` if `run` has results. Returns its error. Raises: RuntimeFault."""
    details = job.details
    if details.run_results is None or details.results is not None:
        return None
    try:
        details.eval_results = await job.handler.eval(details)
    except RuntimeFault:
        raise
    except Exception as error:
        details.results = job.handler.eval_exception(details, error)
        return error
    return None


def _reward(result: dict[str, Any]) -> float | None:
    value = result.get("reward", result.get("resolved"))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _short(final: dict[str, Any]) -> dict[str, Any]:
    """The fields that are short enough for the details, and the names of the others."""
    kept = {name: value for name, value in final.items() if len(msgspec.json.encode(value)) <= _LONGEST_DETAIL_BYTES}
    left_out = sorted(final.keys() - kept.keys())
    return kept | ({"in_artifact": left_out} if left_out else {})
