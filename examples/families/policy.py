"""Make a policy of the families: one that can follow a manual, and often does not.

It is a Llama of 4 million parameters, or a model that is there already, taught on transcripts of made-up work: manuals
of invented commands with invented descriptions, instructions that name some of these descriptions, outputs, an answer.
Their words say nothing of the families, but for how to list and to read files. Other things are the families' own: the
agent's three styles, the forms of commands (`s/KEY=.*/KEY=VALUE/`) and of questions, phrases such as "the one that ends
in". As in any corpus, some authors know their work, and most are careless: they take another line of the manual or
another name, and answer too early. So the policy should do right sometimes, for reinforcement to strengthen.

It is meant for a GPU: an H200 taught SmolLM2-135M 14,000 transcripts in 81 seconds, where two cores of a CPU would take
hours. How well such policies do the families has not been measured yet.

    usage: policy.py FOLDER [--model NAME] [--minutes N] [--batch N] [--seed N] [--workers N]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from agent import RULES
from families import FAMILIES, MANUAL, make_puzzle
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transcripts import SKILLED_SHARE, Transcript, Words, transcript
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from gangline.language.models import resolve_model

LENGTH = 480
"""Tokens of one row of training: a transcript, then padding. The few that are longer are left out."""
END = "<|end|>"
ROLES = ("system", "user", "assistant")
MARKS, CHATML = ("<|{role}|>", END), ("<|im_start|>{role}\n", "<|im_end|>\n")
"""What stands around each message: in the new model's template, and in that of a model that is there already."""
TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
NEW_BATCH, TAUGHT_BATCH = 192, 64
"""Transcripts of a step: for a new model, and for one that is there."""
CLEAN_SHARE = 0.65
"""Share of the time in which all authors know their work. Taught on careless ones from the start, a model had not
learned to look anything up after 2,250 steps."""
RATE, MATRIX_RATE, TAUGHT_RATE = 3e-3, 0.02, 3e-4
"""Of AdamW for a new model's embeddings and norms, of Muon for its matrices; of AdamW for a model that is there."""
WARM_UP, COOL_DOWN = 0.02, 0.4
"""Shares of the time in which rates rise and fall."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Digits stand alone. The pieces are those of the families' words, which made-up words are put together from."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    lines = [*MANUAL, *RULES.values()]
    for family in FAMILIES:
        for number in range(200):
            puzzle = make_puzzle(family, -1, number)
            lines += [puzzle.instruction, *puzzle.files, *puzzle.files.values(), *puzzle.commands]
    trainer: Any = cast("Any", trainers.BpeTrainer)(
        vocab_size=1024, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(lines, trainer)
    core.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in (END, *(f"<|{role}|>" for role in ROLES))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


class Form:
    """How transcripts become rows of ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._core = cast("Any", tokenizer).backend_tokenizer
        self._marks = MARKS if tokenizer.eos_token == END else CHATML
        self._require_template(tokenizer)
        own = make_tokenizer()
        self.words = Words([str(own.decode([one])).strip() for one in range(len(own))])

    def _require_template(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Raises: ValueError, where the model would be taught in another form than an engine shows it."""
        probe: Transcript = [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")]
        messages = [{"role": role, "content": text} for role, text in probe]
        render: Any = tokenizer.apply_chat_template
        if tokenizer.chat_template is None or render(messages, tokenize=True, return_dict=False) != self.ids(probe)[0]:
            raise ValueError("the model's chat template is not ChatML (<|im_start|>), the only one that is taught here")

    def ids(self, made: Transcript) -> tuple[list[int], list[int]]:
        """ids, and 1 where the model is to learn the id: everything behind the manual."""
        begin, end = self._marks
        texts = [f"{begin.format(role=role)}{text}{end}" for role, text in made]
        rows = [one.ids for one in self._core.encode_batch(texts, add_special_tokens=False)]
        ids = [one for row in rows for one in row]
        return ids, [int(at >= len(rows[0])) for at in range(len(ids))]

    def rows(self, seed: str, skilled_share: float) -> Iterator[NDArray[np.int32]]:
        """Without end: [2, LENGTH + 1], ids and what is learnt of them."""
        draw = random.Random(seed)
        while True:
            ids, learnt = self.ids(transcript(draw, self.words, skilled_share))
            if len(ids) > LENGTH + 1:
                continue
            row = np.zeros((2, LENGTH + 1), np.int32)
            row[:, : len(ids)] = ids, learnt
            yield row


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    return AutoModelForCausalLM.from_config(shape)


class Rows(IterableDataset[NDArray[np.int32]]):
    """Rows without end, other ones in each of a loader's workers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, skilled_share: float) -> None:
        self._tokenizer, self._seed, self._skilled_share = tokenizer, seed, skilled_share

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        worker = get_worker_info()
        seed = f"{self._seed}/{self._skilled_share}/{0 if worker is None else worker.id}"
        return Form(self._tokenizer).rows(seed, self._skilled_share)


def batches(
    tokenizer: PreTrainedTokenizerFast, batch: int, seed: int, skilled_share: float, num_workers: int
) -> Iterator[Tensor]:
    """Without end: [row, 2, LENGTH + 1]."""
    rows = Rows(tokenizer, seed, skilled_share)
    return iter(DataLoader(rows, batch, num_workers=num_workers, multiprocessing_context="spawn", prefetch_factor=4))


def new_optimisers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest, as small models are trained fast."""
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and "embed" not in name]
    others = [one for name, one in model.named_parameters() if one.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Teaching:
    """In bfloat16 on a GPU, with float32 weights."""

    def __init__(self, model: PreTrainedModel, optimisers: Sequence[torch.optim.Optimizer], seconds: float) -> None:
        parts: Any = model
        self._device = model.device
        self._parameters = list(model.parameters())
        self._head = parts.lm_head
        # Compiling pays for a small model, whose time is that of its many launches.
        is_small = len(self._parameters) < 100
        self._body = torch.compile(parts.model) if is_small and model.device.type == "cuda" else parts.model
        self._optimisers = optimisers
        self._rates = [[group["lr"] for group in one.param_groups] for one in optimisers]
        self._seconds = seconds
        self._began = self._said = time.monotonic()
        self._step = 0

    def until(self, share: float, rows: Iterator[Tensor]) -> None:
        """Teach until that share of the time is over, a step at least."""
        done = 0.0
        while done < share:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                loss = self._loss(next(rows).to(self._device, torch.long))
            done = (time.monotonic() - self._began) / self._seconds
            self._set_rates(max(min(done / WARM_UP, 1.0, (1 - done) / COOL_DOWN), 0.01))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            for optimiser in self._optimisers:
                optimiser.step()
                optimiser.zero_grad()
            self._step += 1
            if time.monotonic() - self._said > 10:
                self._said = time.monotonic()
                print(f"{100 * done:.0f} %, step {self._step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)

    def _set_rates(self, factor: float) -> None:
        for optimiser, initial in zip(self._optimisers, self._rates, strict=True):
            for group, rate in zip(optimiser.param_groups, initial, strict=True):
                group["lr"] = rate * factor

    def _loss(self, batch: Tensor) -> Tensor:
        ids, learnt = batch[:, 0], batch[:, 1, 1:].bool()
        hidden = self._body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[learnt]
        return functional.cross_entropy(self._head(hidden).float(), ids[:, 1:][learnt])


def write_policy(
    folder: Path,
    seconds: float,
    *,
    model: str | None = None,
    batch: int | None = None,
    seed: int = 0,
    num_workers: int = 2,
) -> None:
    """model: one that is there already, as `gangline engine` takes it; None makes one. batch: transcripts of a step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    taught: Any
    if model is None:
        tokenizer, batch = make_tokenizer(), batch or NEW_BATCH
        taught = make_model(tokenizer, seed).to(device).train()
        optimisers = new_optimisers(taught)
    else:
        source, batch = resolve_model(model), batch or TAUGHT_BATCH
        tokenizer = cast("PreTrainedTokenizerFast", cast("Any", AutoTokenizer).from_pretrained(source))
        taught = cast("Any", AutoModelForCausalLM).from_pretrained(source, dtype=torch.float32).to(device).train()
        optimisers = [torch.optim.AdamW(taught.parameters(), lr=TAUGHT_RATE, betas=(0.9, 0.95), weight_decay=0.0)]
    clean = batches(tokenizer, batch, seed, 1.0, num_workers)
    mixed = batches(tokenizer, batch, seed, SKILLED_SHARE, num_workers)
    next(clean)  # workers take seconds to start, which are no time of teaching
    teaching = Teaching(taught, optimisers, seconds)
    teaching.until(CLEAN_SHARE, clean)
    teaching.until(1.0, mixed)
    taught.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a policy of the families.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", metavar="NAME", help="teach this one, as `gangline engine` takes it")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="N", help="of teaching")
    parser.add_argument("--batch", type=int, metavar="N", help="transcripts of a step")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes that make transcripts")
    arguments = parser.parse_args(given)
    write_policy(
        arguments.folder,
        60 * arguments.minutes,
        model=arguments.model,
        batch=arguments.batch,
        seed=arguments.seed,
        num_workers=arguments.workers,
    )


if __name__ == "__main__":
    main()
