"""The tasks of `public_bench.py`, made by the packages that publish them: run by the Python that has both installed.

Prints one JSON line for each task: split, the environment's configuration, and the content by which it is unique.

usage: public_tasks.py spell|secretary NUM_TRAINED NUM_PILOT NUM_HELD_OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

SPLITS = ("trained", "pilot", "held_out")
SPELL_SEEDS = {"trained": 101, "pilot": 202, "held_out": 303}
FIRST_GAME = {"trained": 10_000, "pilot": 20_000, "held_out": 30_000}
SPELL = {"min_word_len": 3, "max_word_len": 3}
SECRETARY = {"N": 3}
MOST = 4000


def spell(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A dataset of its own for each split, of which each word is asked once, in whatever case."""
    import reasoning_gym  # noqa: PLC0415  # pyright: ignore[reportMissingImports] - of the environments' Python

    dataset = reasoning_gym.create_dataset("spell_backward", seed=SPELL_SEEDS[split], size=MOST, **SPELL)
    for index in range(MOST):
        config = {"dataset": "spell_backward", "seed": SPELL_SEEDS[split], "index": index, "options": SPELL}
        yield dataset[index]["metadata"]["word"].lower(), config


def secretary(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Games of other seeds; the values that it will show make a game unique."""
    import textarena  # noqa: PLC0415  # pyright: ignore[reportMissingImports] - of the environments' Python

    for seed in range(FIRST_GAME[split], FIRST_GAME[split] + MOST):
        game = textarena.make("Secretary-v0", **SECRETARY)
        game.reset(num_players=1, seed=seed)
        values = [f"{value:.4f}" for value in game.state.game_state["draws"]]
        yield " ".join(values), {"id": "Secretary-v0", "seed": seed, "options": SECRETARY}


def main() -> None:
    make, numbers = {"spell": spell, "secretary": secretary}[sys.argv[1]], map(int, sys.argv[2:5])
    seen = set(sys.argv[5:])
    for split, number in zip(SPLITS, numbers, strict=True):
        left = number
        for content, config in make(split):
            if left and content not in seen:
                seen.add(content)
                left -= 1
                print(json.dumps({"split": split, "content": content, "config": config}))
        assert not left, f"{split} has {left} tasks too few"


if __name__ == "__main__":
    main()
