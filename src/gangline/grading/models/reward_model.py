"""Evaluator `reward_model`: a scoring service returns the reward.

Requests and answers have the formats of common servers. `json` is for a custom service:

    POST url {"session_id", "instruction", "answer", "messages", "metadata"} -> {"reward": number, ...}

Sources: vLLM, "OpenAI-compatible server" (Classification, Pooling and Score API); SGLang, "Classification models" and
"Native APIs" (/classify). SGLang's /v1/classify has vLLM's format.
"""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field

from gangline.domain.contracts import EvaluationContext, Reward
from gangline.domain.errors import GraderUnavailable
from gangline.grading.answers import AnswerSource, answer_of
from gangline.grading.models.endpoint import Endpoint, EngineUser, engine_of
from gangline.grading.transcript import chat_messages

_ARTIFACT = "reward_model.json"
Format = Literal["json", "vllm_classify", "vllm_pooling", "vllm_score", "sglang_classify"]


class RewardModelConfig(EngineUser, AnswerSource):
    """Configuration of evaluator `reward_model`."""

    format: Format = "json"
    path: str | None = Field(default=None, pattern=r"^(/[^\s\x00]*)?$")
    """Path after the engine's URL. None: the format's default (`/classify`, `/pooling`, `/score`; empty for `json`)."""
    label: int = Field(default=-1)
    """With `vllm_classify`: index of the class whose probability is the reward; by default the last one."""
    template: str = "{instruction}\n\n{answer}"
    """Text sent with `vllm_classify` and `sglang_classify`. A model's own chat format belongs here."""
    activation: Literal["none", "sigmoid"] = "none"
    """Applied to the score."""


_PATHS: dict[Format, str] = {
    "json": "",
    "vllm_classify": "/classify",
    "vllm_pooling": "/pooling",
    "vllm_score": "/score",
    "sglang_classify": "/classify",
}


class RewardModelEvaluator:
    """Requests a score from one service."""

    name: ClassVar[str] = "reward_model"
    Config: ClassVar[type[BaseModel]] = RewardModelConfig

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config

    async def evaluate(self, context: EvaluationContext) -> Reward:
        """Raises: GraderUnavailable."""
        config = self._config
        answer, missing = await answer_of(context, config)
        if answer is None:
            return Reward(reward=0.0, details={"missing": missing})
        engine = engine_of(context, config.engine)
        endpoint = Endpoint(engine, tries=config.tries, timeout_s=config.call_timeout_seconds)
        body = ({} if engine.model is None else {"model": engine.model}) | _body(config, context, answer)
        scored = await endpoint.post(_PATHS[config.format] if config.path is None else config.path, body)
        context.artifacts[_ARTIFACT] = json.dumps({"url": engine.url, "request": body, "answer": scored}).encode()
        try:
            score = _score(config, scored)
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise ValueError("its score is not a finite number")
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            problem = f"{type(error).__name__} {error} in {json.dumps(scored)[:300]}"
            raise GraderUnavailable(f"the reward model's answer is not of format {config.format}: {problem}") from error
        reward = score if config.activation == "none" else 1 / (1 + math.exp(-max(min(score, 700.0), -700.0)))
        details = cast("dict[str, Any]", scored) if config.format == "json" else {}
        return Reward(reward=reward, details={**details, "score": score, "format": config.format})


def _text(config: RewardModelConfig, context: EvaluationContext, answer: str) -> str:
    return config.template.replace("{instruction}", context.instruction).replace("{answer}", answer)


def _conversation(context: EvaluationContext, answer: str) -> list[dict[str, Any]]:
    """Messages of the last main trace; without one, the instruction and the answer."""
    traces = [trace for trace in context.trajectory.traces if trace.role == "main"]
    if traces:
        return chat_messages([*traces[-1].prompt_messages, *traces[-1].response_messages])
    return [{"role": "user", "content": context.instruction}, {"role": "assistant", "content": answer}]


def _json_body(context: EvaluationContext, answer: str) -> dict[str, Any]:
    return {
        "session_id": context.session_id,
        "instruction": context.instruction,
        "answer": answer,
        "messages": _conversation(context, answer),
        "metadata": dict(context.metadata),
    }


def _last_number(value: Any) -> Any:
    """A pooled score: a number, a one-element vector, or the last token's score."""
    while isinstance(value, list):
        value = cast("list[Any]", value)[-1]
    return value


def _body(config: RewardModelConfig, context: EvaluationContext, answer: str) -> dict[str, Any]:
    match config.format:
        case "json":
            return _json_body(context, answer)
        case "vllm_classify":
            return {"input": _text(config, context, answer)}
        case "vllm_pooling":
            return {"messages": _conversation(context, answer)}
        case "vllm_score":
            return {"text_1": context.instruction, "text_2": answer}
        case "sglang_classify":
            return {"text": _text(config, context, answer)}


def _score(config: RewardModelConfig, answer: Any) -> Any:
    """Raises: KeyError, IndexError, TypeError for an answer in another format."""
    match config.format:
        case "json":
            return answer["reward"]
        case "vllm_classify":
            return answer["data"][0]["probs"][config.label]
        case "vllm_pooling":
            return _last_number(answer["data"][0]["data"])
        case "vllm_score":
            return answer["data"][0]["score"]
        case "sglang_classify":
            return _last_number((answer[0] if isinstance(answer, list) else answer)["embedding"])
