"""Environment variables of every agent program: the task, the model, the URL for model calls, the key.

The variables of all common SDKs are set together, since a command may well start a program we know nothing of.
Variables that the task sets in `agent.env` take precedence over them, but not over the `GANGLINE_*` ones.
"""

from __future__ import annotations

from gangline.domain.contracts import HarnessContext

__all__ = ["PLACEHOLDERS", "fits_argument", "provider_environment", "values_of"]

PLACEHOLDERS = {
    "instruction": "GANGLINE_INSTRUCTION",
    "model": "GANGLINE_MODEL",
    "base_url": "GANGLINE_BASE_URL",
    "api_key": "GANGLINE_API_KEY",
    "session_id": "GANGLINE_SESSION_ID",
    "max_turns": "GANGLINE_MAX_TURNS",
}
"""Name in a template -> the variable that carries the same value."""

_MAX_ARGUMENT_BYTES = 130_000  # Linux takes 131,072 a string, the variable's name and the closing NUL included


def fits_argument(text: str) -> bool:
    """Whether a process can be given `text` as one argument or variable."""
    return "\0" not in text and len(text.encode()) <= _MAX_ARGUMENT_BYTES


def values_of(context: HarnessContext) -> dict[str, str]:
    """Placeholder -> value. `max_turns` is empty where the task sets no limit."""
    return {
        "instruction": context.instruction,
        "model": context.model,
        "base_url": context.base_url,
        "api_key": context.api_key,
        "session_id": context.session_id,
        "max_turns": "" if context.max_turns is None else str(context.max_turns),
    }


def provider_environment(context: HarnessContext) -> dict[str, str]:
    """The whole environment of a harness beside the runtime's own variables.

    An instruction that is too long for a variable is left out of it.
    """
    url, key, model = context.base_url.rstrip("/"), context.api_key, context.model
    values = values_of(context)
    if not fits_argument(context.instruction):
        del values["instruction"]
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
        "GEMINI_MODEL": model,
        **context.env,
        **{PLACEHOLDERS[name]: value for name, value in values.items()},
    }
