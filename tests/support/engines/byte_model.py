"""A tiny random model in a folder of its own, with a tokenizer of bytes and ChatML: what `train run` takes whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from support.engines.models import CONFIGS

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_byte_model(folder: Path, *, seed: int = 0, backwards: bool = False, **changes: Any) -> Path:
    """backwards: its tokenizer counts the bytes from the end. changes: of the model's configuration."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=backwards)
    core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[2], chat_template=TEMPLATE)
    made.save_pretrained(str(folder))
    shape: dict[str, Any] = {**CONFIGS["llama"].to_dict(), "vocab_size": len(made), "eos_token_id": len(made) - 1}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(LlamaConfig(**shape | changes)).save_pretrained(folder)
    return folder
