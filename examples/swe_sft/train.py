"""Supervised fine-tuning on a dataset of `gangline data`, with TRL's SFTTrainer.

    usage: train.py DATASET [--model NAME] [--steps N] [--out FOLDER]

Prints the loss on the test split before and after, as JSON. Without `--model`, a model of two layers is trained from
scratch with a tokenizer made of the dataset's own text: it shows the way in seconds on a CPU, and nothing else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trl
from datasets import DatasetDict, load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"


def tiny(splits: DatasetDict) -> tuple[Any, Any]:
    """A model and its tokenizer, with the chat template of Qwen3."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(_texts(splits), vocab_size=600, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[0],
        chat_template=_TEMPLATE.read_text(),
    )
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=len(tokenizer), max_position_embeddings=4096)
    return LlamaForCausalLM(config), tokenizer


def _texts(splits: DatasetDict) -> Iterator[str]:
    for row in splits["train"]:
        yield json.dumps(row["tools"])
        for message in row["messages"]:
            yield message["content"]
            yield json.dumps(message["tool_calls"])


def train(folder: str, model_name: str | None, num_steps: int, out: str) -> dict[str, float]:
    """Returns the loss on the test split, `before` and `after`."""
    splits = load_dataset(folder)
    if model_name is None:
        model, tokenizer = tiny(splits)
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(model_name), AutoTokenizer.from_pretrained(model_name)
    settings = SFTConfig(
        output_dir=out,
        max_steps=num_steps,
        learning_rate=2e-3 if model_name is None else 1e-5,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        assistant_only_loss=True,  # what the agent said, not what its tools printed
        max_length=None,
        bf16=model_name is not None,
        use_cpu=model_name is None,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model, settings, train_dataset=splits["train"], eval_dataset=splits["test"], processing_class=tokenizer
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    found = {"before": before, "after": trainer.evaluate()["eval_loss"]}
    trainer.save_model(out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a model on a dataset of `gangline data`.")
    parser.add_argument("dataset")
    parser.add_argument("--model", help="a Hugging Face name or folder; without it, a tiny model from scratch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="sft")
    given = parser.parse_args()
    print(json.dumps(train(given.dataset, given.model, given.steps, given.out)))


if __name__ == "__main__":
    main()
