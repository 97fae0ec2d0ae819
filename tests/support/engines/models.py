"""Small random models, made on the spot: the real code of two families, without a download."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

# Threads of a step wait for each other; tests share their cores.
torch.set_num_threads(1)

VOCAB_SIZE = 97
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    # Wide enough that the next token depends on the whole prefix and is not a near tie.
    "initializer_range": 0.4,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SHAPE, tie_word_embeddings=False),
}


def write_tiny_model(folder: Path, family: str = "llama", seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write a random model of `family` into `folder`; the same seed gives the same weights."""
    config = copy.copy(CONFIGS[family])
    config.vocab_size = vocab_size
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def reference_model(folder: Path) -> PreTrainedModel:
    """The same model as transformers itself runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model: PreTrainedModel, prompt_ids: list[int], number: int) -> list[int]:
    """What transformers' own `generate` continues with, at temperature 0."""
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = model.generate(  # pyright: ignore
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=number,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
    return out[0, len(prompt_ids) :].tolist()
