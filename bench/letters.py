"""A game for a very small model, in which what it said before matters: count on from letter to letter.

Four turns: the user says a letter, the model should say it six times; then, each time the user says nothing, the next
letter of the alphabet of four. A token is one letter or two, so every text can be written in many ways, and a history
that travels as text comes back in other ids than were sampled: the drift of real tokenizers, with all else left out.

    <u> b <e> <m>  b bb b b b <e>  <u> <e> <m>  cc cc cc <e> ...

`Play` says whether the engine reads the ids that were sampled, or the text written anew. The policy is a random Llama
of two layers, taught the game, and then to be careless: it starts with a third of the reward, and reads and
writes either spelling.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from gangline.domain.completion import Certificate, Completion, CompletionTree, VersionSpan
from gangline.domain.conversation import Message, Text
from gangline.domain.tokens import common_prefix_len, logprobs, token_ids

__all__ = ["END", "Game", "Play", "new_games", "play", "taught_model"]

LETTERS = "abcd"
USER, MODEL, END = 1, 2, 3
PIECES = (*LETTERS, *map("".join, product(LETTERS, repeat=2)))
FIRST_PIECE = 4
NUM_TURNS, NUM_LETTERS, MAX_TOKENS = 4, 6, 7
SHAPE = LlamaConfig(
    vocab_size=FIRST_PIECE + len(PIECES),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=END,
)
TEACHING_BATCH, SINGLE_SHARE = 64, 0.5
KNOWS_REWARD, KNOWING_SHARE = 0.6, 0.8
CARELESS_STEPS, CARELESS_SHARE = 40, 0.3
"""First the policy is taught games in which most letters are right, until it plays well; then worse ones."""

Play = Literal["stitched", "rendered"]
"""What the engine reads: the ids as they were sampled, or the text in the tokenizer's own spelling."""


def spelled(text: str) -> list[int]:
    """As the tokenizer spells it: two letters a token."""
    return [FIRST_PIECE + PIECES.index(text[at : at + 2]) for at in range(0, len(text), 2)]


def text_of(ids: Sequence[int]) -> str:
    return "".join(PIECES[one - FIRST_PIECE] for one in ids if one >= FIRST_PIECE)


def asked(said: str) -> list[int]:
    """A user's turn, and the beginning of the model's."""
    return [USER, *spelled(said), END, MODEL]


@dataclass
class Game:
    """One session: what was said, and it as a proxy would have captured it."""

    session_id: str
    start: int
    """Index of the letter that the user says."""
    replies: list[list[int]] = field(default_factory=list[list[int]])
    tree: CompletionTree = field(default_factory=CompletionTree)
    last: Completion | None = None

    @property
    def reward(self) -> float:
        """Share of the letters that are there and right, less those that are too many."""
        scores = [_score(text_of(reply), LETTERS[(self.start + turn) % 4]) for turn, reply in enumerate(self.replies)]
        return sum(scores) / NUM_TURNS

    def prompt(self, kind: Play) -> list[int]:
        """What the engine reads next."""
        ids = asked(LETTERS[self.start])
        for reply in self.replies:
            if kind == "stitched":
                ids += [*reply, *(() if reply[-1:] == [END] else (END,)), *asked("")]
            else:
                ids += [*spelled(text_of(reply)), END, *asked("")]
        return ids

    def record(self, kind: Play, prompt: list[int], sampled: list[int], values: list[float]) -> None:
        parent = self.last
        ids = token_ids(prompt)
        context = token_ids() if parent is None else self.tree.context_ids(parent)
        shared = common_prefix_len(context, ids)
        certificate = Certificate(
            prompt_source=kind,
            context="first" if parent is None else "exact" if shared == len(context) else "diverged",
            logprobs="processed",
            finish_reason="stop" if sampled[-1] == END else "length",
            version_spans=(VersionSpan(0, 0, len(sampled)),),
        )
        turn = len(self.replies)
        self.last = Completion(
            completion_id=f"c{turn:03d}",
            session_id=self.session_id,
            attempt=1,
            status="complete",
            parent_id=None if parent is None else parent.completion_id,
            branch_key="game",
            dialect="openai_chat",
            model="letters",
            prompt_shared=shared,
            prompt_suffix_ids=ids[shared:],
            sampled_ids=token_ids(sampled),
            logprobs=logprobs(values),
            messages_shared=2 * turn,
            new_messages=(Message("user", (Text(LETTERS[self.start] if turn == 0 else ""),)),),
            response=Message("assistant", (Text(text_of(sampled)),)),
            certificate=certificate,
            started_at=float(turn),
            finished_at=turn + 0.5,
        )
        self.replies.append(sampled)
        self.tree.add(self.last)


def _score(text: str, letter: str) -> float:
    right = min(text.count(letter), NUM_LETTERS)
    return max(0.0, (right - max(0, len(text) - NUM_LETTERS)) / NUM_LETTERS)


@torch.inference_mode()
def play(model: PreTrainedModel, games: list[Game], kind: Play, chance: torch.Generator) -> None:
    """Play all games to their end, at temperature 1, together."""
    while playing := [game for game in games if len(game.replies) < NUM_TURNS]:
        prompts = [game.prompt(kind) for game in playing]
        sampled, values = _sample(model, prompts, chance)
        for game, prompt, ids, found in zip(playing, prompts, sampled, values, strict=True):
            game.record(kind, prompt, ids, found)


def _sample(
    model: PreTrainedModel, prompts: list[list[int]], chance: torch.Generator
) -> tuple[list[list[int]], list[list[float]]]:
    sampled, values = [[] for _ in prompts], [[] for _ in prompts]
    ids, mask = _left_padded(prompts)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = None
    for _ in range(MAX_TOKENS):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        found, cache = output.logits[:, -1].log_softmax(-1), output.past_key_values
        ids = torch.multinomial(found.exp(), 1, generator=chance)
        for row, (one, value) in enumerate(zip(ids[:, 0].tolist(), found.gather(-1, ids)[:, 0].tolist(), strict=True)):
            if sampled[row][-1:] != [END]:
                sampled[row].append(one)
                values[row].append(value)
        mask, positions = torch.cat([mask, torch.ones_like(ids)], -1), positions[:, -1:] + 1
    return sampled, values


def _left_padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def taught_model(seed: int) -> PreTrainedModel:
    """It knows the game, and plays it carelessly, in either spelling."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(SHAPE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    chosen, chance = random.Random(seed), torch.Generator().manual_seed(seed)
    while _mean_reward(model, chance) < KNOWS_REWARD:
        for _ in range(10):
            _teach(model, optimizer, [_shown(chosen, KNOWING_SHARE) for _ in range(TEACHING_BATCH)])
    for _ in range(CARELESS_STEPS):
        _teach(model, optimizer, [_shown(chosen, CARELESS_SHARE) for _ in range(TEACHING_BATCH)])
    return model


def _mean_reward(model: PreTrainedModel, chance: torch.Generator) -> float:
    games = [Game(f"g{number}", number % 4) for number in range(64)]
    play(model, games, "stitched", chance)
    return sum(game.reward for game in games) / len(games)


def _teach(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: list[tuple[list[int], list[int]]]) -> None:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    optimizer.zero_grad()
    model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss.backward()
    optimizer.step()


def _shown(chosen: random.Random, right_share: float) -> tuple[list[int], list[int]]:
    """A game's ids and labels."""
    start = chosen.randrange(4)
    ids, labels = asked(LETTERS[start]), [-100] * len(asked(LETTERS[start]))
    for turn in range(NUM_TURNS):
        right = LETTERS[(start + turn) % 4]
        text = "".join(right if chosen.random() < right_share else chosen.choice(LETTERS) for _ in range(NUM_LETTERS))
        reply = [*_either_spelling(text, chosen), END]
        ids += [*reply, *asked("")]
        labels += [*reply, *[-100] * len(asked(""))]
    return ids, labels


def _either_spelling(text: str, chosen: random.Random) -> list[int]:
    ids: list[int] = []
    while text:
        num = 1 if len(text) == 1 or chosen.random() < SINGLE_SHARE else 2
        ids, text = [*ids, FIRST_PIECE + PIECES.index(text[:num])], text[num:]
    return ids


def new_games(num_groups: int, num_samples: int, chance: np.random.Generator) -> list[list[Game]]:
    """By group."""
    starts = chance.integers(4, size=num_groups)
    return [
        [Game(f"g{number}.{sample}", int(start)) for sample in range(num_samples)]
        for number, start in enumerate(starts)
    ]
