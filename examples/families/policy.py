"""Make a policy of the families: one that can do the work, and often does not.

It is a Llama of 2 million parameters, or a model that is there already, taught on transcripts of made-up work
(`transcripts.py`) in the agent's three styles. As in any corpus, some authors know their work, and others are careless:
they take another command or another name, and answer too early. So the policy does right sometimes, for reinforcement
to strengthen.

A new model begins with heads that look things up (`induction.py`), and learns in three parts: random words that come
again, work of authors most of whom know it, and work of authors most of whom do not. A model that is there learns the
last two parts, and wants a GPU.

A model of some size learns the work in few steps, and would still do it in most sessions after the last part. With
`--careless` it is taught that part alone.

    usage: policy.py FOLDER [--model NAME] [--careless] [--steps N] [--batch N] [--seed N] [--threads N]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from induction import write_induction_heads
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transcripts import ENDINGS, SKILLED_SHARE, Transcript, transcript, vocabulary
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from gangline.models.language.models import resolve_model

LONGEST = 320
"""Tokens of a transcript that is taught; the few that are longer are left out."""
END = "<|end|>"
ROLES = ("system", "user", "assistant")
MARKS, CHATML = ("<|{role}|>", END), ("<|im_start|>{role}\n", "<|im_end|>\n")
"""What stands around each message: in the new model's template, and in that of a model that is there already."""
TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
BATCH = 32
"""Transcripts of a step."""
SORTED = 16
"""Batches that are made at once and sorted by length, so that little of them is padding."""
REPEATS_UNTIL, SKILLED_UNTIL = 0.03, 0.93
"""Shares of the steps: a new model's random words, and, for all models, authors most of whom know their work."""
SKILLED_AT_FIRST = 0.8
"""Share of those authors until then. It is what teaches the work; how few there are at the end is learnt fast."""
REPEATED_TOKENS = 96
RATE, MATRIX_RATE, TAUGHT_RATE = 3e-3, 0.02, 3e-4
"""Rates of AdamW for a new model's embeddings and norms, of Muon for its matrices; of AdamW for one that is there."""
WARM_UP, COOL_DOWN = 0.02, 0.5
"""Shares of the steps in which rates rise and fall."""
ROPE_THETA = 100_000.0
_SIGN = r"(?<=[ /\d])[-+*](?=[ /\d])"
"""In a sentence, a command, and a sum."""
_DIGITS = r"(?<!-[a-z])\d{1,2}"
"""Those of an option, such as `-f2`, are never copied."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """What is copied is one token wherever it stands: words, endings, two digits, signs. So are phrases between."""
    core = Tokenizer(models.BPE())
    words = "|".join(sorted(vocabulary(), key=len, reverse=True))
    alone = rf"\b(?:{words})\b|\.[a-z]+|{_SIGN}|{_DIGITS}|output |Action: |\n"
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(alone), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    draw = random.Random(0)
    texts = [text for _ in range(500) for _, text in transcript(draw)]
    often = [*vocabulary(), *(f".{ending}" for ending in ENDINGS), *(f"{number:02d}" for number in range(100))]
    texts += [word for word in often for _ in range(40)]
    trainer: Any = cast("Any", trainers.BpeTrainer)(
        vocab_size=2048, min_frequency=20, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    core.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in (END, *(f"<|{role}|>" for role in ROLES))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


class Form:
    """How transcripts become ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._core = cast("Any", tokenizer).backend_tokenizer
        self._marks = MARKS if tokenizer.eos_token == END else CHATML
        self._require_template(tokenizer)

    def _require_template(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises: ValueError, where the model would be taught in another form than an engine shows it."""
        probe: Transcript = [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")]
        messages = [{"role": role, "content": text} for role, text in probe]
        render: Any = tokenizer.apply_chat_template
        if tokenizer.chat_template is None or render(messages, tokenize=True, return_dict=False) != self.ids(probe)[0]:
            raise ValueError("the model's chat template is not ChatML (<|im_start|>), the only one that is taught here")

    def ids(self, made: Transcript) -> tuple[list[int], list[int]]:
        """ids, and 1 where the model is to learn the id: what the assistant says, and that it ends."""
        begin, end = self._marks
        marks = [begin.format(role=role) for role, _ in made]
        rows = self._encoded([f"{mark}{text}{end}" for mark, (_, text) in zip(marks, made, strict=True)])
        heads = self._encoded(marks)
        ids = [one for row in rows for one in row]
        learnt: list[int] = []
        for (role, _), row, head in zip(made, rows, heads, strict=True):
            learnt += [int(role == "assistant" and at >= len(head)) for at in range(len(row))]
        return ids, learnt

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return [one.ids for one in self._core.encode_batch(texts, add_special_tokens=False)]

    def batches(self, make: Callable[[], Transcript], draw: random.Random, size: int) -> Iterator[Tensor]:
        """Without end: [2, size, tokens], ids and what is learnt of them."""
        while True:
            rows: list[tuple[list[int], list[int]]] = []
            while len(rows) < size * SORTED:
                ids, learnt = self.ids(make())
                if len(ids) <= LONGEST:
                    rows.append((ids, learnt))
            rows.sort(key=lambda row: len(row[0]))
            for at in draw.sample(range(SORTED), SORTED):
                yield _padded(rows[at * size : (at + 1) * size])


def _padded(rows: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    padded = np.zeros((2, len(rows), max(len(ids) for ids, _ in rows)), np.int64)
    for at, (ids, learnt) in enumerate(rows):
        padded[:, at, : len(ids)] = ids, learnt
    return torch.from_numpy(padded)


def repeats(vocab_size: int, draw: random.Random, size: int) -> Iterator[Tensor]:
    """Without end: rows of random ids that come again after 6 to 40, and from then on are learnt."""
    while True:
        rows: list[tuple[list[int], list[int]]] = []
        for _ in range(size):
            period = draw.randrange(6, 40)
            once = [draw.randrange(vocab_size) for _ in range(period)]
            ids = [once[at % period] for at in range(REPEATED_TOKENS)]
            rows.append((ids, [int(at > period) for at in range(REPEATED_TOKENS)]))
        yield _padded(rows)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    model: Any = AutoModelForCausalLM.from_config(shape)
    write_induction_heads(model, ROPE_THETA)
    return model


def new_optimisers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest, as small models are trained fast."""
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and "embed" not in name]
    others = [one for name, one in model.named_parameters() if one.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Teaching:
    """In bfloat16, with float32 weights."""

    def __init__(self, model: PreTrainedModel, optimisers: Sequence[torch.optim.Optimizer], num_steps: int) -> None:
        parts: Any = model
        self._device = model.device
        self._parameters = list(model.parameters())
        self._body, self._head = parts.model, parts.lm_head
        self._optimisers = optimisers
        self._rates = [[group["lr"] for group in one.param_groups] for one in optimisers]
        self._num_steps = num_steps
        self._said = time.monotonic()
        self._step = 0

    def until(self, share: float, batches: Iterator[Tensor]) -> None:
        """Teach until that share of the steps is done."""
        while self._step < share * self._num_steps:
            with torch.autocast(self._device.type, torch.bfloat16):
                loss = self._loss(next(batches).to(self._device))
            done = self._step / self._num_steps
            self._set_rates(max(min(done / WARM_UP, 1.0, (1 - done) / COOL_DOWN), 0.02))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            for optimiser in self._optimisers:
                optimiser.step()
                optimiser.zero_grad()
            self._step += 1
            if time.monotonic() - self._said > 10:
                self._said = time.monotonic()
                print(f"step {self._step} of {self._num_steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)

    def _set_rates(self, factor: float) -> None:
        for optimiser, initial in zip(self._optimisers, self._rates, strict=True):
            for group, rate in zip(optimiser.param_groups, initial, strict=True):
                group["lr"] = rate * factor

    def _loss(self, batch: Tensor) -> Tensor:
        ids, learnt = batch[0], batch[1, :, 1:].bool()
        hidden = self._body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[learnt]
        return functional.cross_entropy(self._head(hidden).float(), ids[:, 1:][learnt])


def write_policy(
    folder: Path,
    num_steps: int,
    *,
    model: str | None = None,
    careless: bool = False,
    batch: int = BATCH,
    seed: int = 0,
) -> None:
    """
    model: one that is there already, as `gangline engine` takes it; None makes one.
    careless: teach the last part alone.
    batch: transcripts of a step.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    taught: Any
    if model is None:
        tokenizer = make_tokenizer()
        taught = make_model(tokenizer, seed).to(device).train()
        optimisers = new_optimisers(taught)
    else:
        source = resolve_model(model)
        tokenizer = cast("PreTrainedTokenizerFast", cast("Any", AutoTokenizer).from_pretrained(source))
        taught = cast("Any", AutoModelForCausalLM).from_pretrained(source, dtype=torch.float32).to(device).train()
        optimisers = [torch.optim.AdamW(taught.parameters(), lr=TAUGHT_RATE, betas=(0.9, 0.95), weight_decay=0.0)]
    form, draw = Form(tokenizer), random.Random(seed)
    teaching = Teaching(taught, optimisers, num_steps)
    if model is None:
        teaching.until(REPEATS_UNTIL, repeats(len(tokenizer) - len(ROLES) - 1, draw, batch))
    teaching.until(
        0.0 if careless else SKILLED_UNTIL, form.batches(lambda: transcript(draw, SKILLED_AT_FIRST), draw, batch)
    )
    teaching.until(1.0, form.batches(lambda: transcript(draw, SKILLED_SHARE), draw, batch))
    taught.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a policy of the families.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", metavar="NAME", help="teach this one, as `gangline engine` takes it")
    parser.add_argument("--careless", action="store_true", help="teach it the last part alone")
    parser.add_argument("--steps", type=int, default=1800, metavar="N", help="of teaching")
    parser.add_argument("--batch", type=int, default=BATCH, metavar="N", help="transcripts of a step")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="of PyTorch on a CPU")
    arguments = parser.parse_args(given)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.careless and arguments.model is None:
        parser.error("--careless continues from a model: name it with --model")
    write_policy(
        arguments.folder,
        arguments.steps,
        model=arguments.model,
        careless=arguments.careless,
        batch=arguments.batch,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
