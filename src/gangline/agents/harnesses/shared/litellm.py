"""Settings of programs that call their model through LiteLLM, which is installed in the program's own environment."""

from __future__ import annotations

from gangline.agents.harnesses.shared.environment import provider_environment
from gangline.domain.contracts import HarnessContext


def litellm_environment(context: HarnessContext) -> dict[str, str]:
    """Disables the price list, which LiteLLM would download on import, waiting for it if there is no network."""
    return {"LITELLM_LOCAL_MODEL_COST_MAP": "True", **provider_environment(context)}


def litellm_model(context: HarnessContext) -> str:
    """The prefix selects OpenAI Chat, independent of the model's name."""
    return f"openai/{context.model}"
