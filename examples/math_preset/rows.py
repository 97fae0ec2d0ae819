"""Rows for the preset `math`, in the columns of its dataset: sums, differences and products of two numbers below 100.

    usage: rows.py [--rows N] [--seed N]

Prints one JSON row a line. `gangline tasks from FILE --preset math` makes tasks of them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def random_expression(chosen: random.Random) -> tuple[str, int]:
    """The expression, as mathematics and Python write it, and its value."""
    first, second = chosen.randint(10, 99), chosen.randint(10, 99)
    sign = chosen.choice(sorted(_OPERATIONS))
    return f"{first} {sign} {second}", _OPERATIONS[sign](first, second)


def problem_of(expression: str) -> str:
    return f"What is ${expression}$?"


def rows(number: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Different problems; the same for the same arguments."""
    chosen = random.Random(f"rows {seed}")
    seen: set[str] = set()
    while len(seen) < number:
        expression, value = random_expression(chosen)
        if expression not in seen:
            seen.add(expression)
            yield {"problem": problem_of(expression), "answer": str(value)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Print rows for the preset `math`, one a line.")
    parser.add_argument("--rows", type=int, default=320, metavar="N", help="number of rows")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    for row in rows(arguments.rows, arguments.seed):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
