"""Programming problems with hidden tests: half use standard input and output, half call a function.

The expected outputs are computed by functions here; the right programs are written out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from gangline.tasks.presets.samples.sample import Sample, take_turns

_NUM_CASES = 4


def code_samples(number: int, seed: int) -> list[Sample]:
    found = take_turns(_KINDS, number, seed)
    return [Sample(sample.row | {"extra_info": {"split": "sample", "index": at}}, sample.right, sample.wrong)
            for at, sample in enumerate(found)]  # fmt: skip


def _sample(problem: str, tests: dict[str, Any], right: str, wrong: tuple[str, str]) -> Sample:
    """wrong: a part of the right program, and its replacement in the wrong one."""
    assert wrong[0] in right
    row = {
        "data_source": "gangline",
        "prompt": [{"role": "user", "content": problem}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
    }
    return Sample(row, right, right.replace(*wrong))


def _standard(
    problem: str, inputs: Sequence[str], solve: Callable[[str], object], right: str, wrong: tuple[str, str]
) -> Sample:
    outputs = [f"{solve(text)}\n" for text in inputs]
    return _sample(problem, {"inputs": list(inputs), "outputs": outputs}, right, wrong)


def _function(
    problem: str,
    name: str,
    inputs: Sequence[Sequence[Any]],
    solve: Callable[..., Any],
    right: str,
    wrong: tuple[str, str],
) -> Sample:
    """In Eurus-2's form: one argument as JSON per line."""
    tests = {
        "fn_name": name,
        "inputs": ["\n".join(map(json.dumps, arguments)) for arguments in inputs],
        "outputs": [json.dumps(solve(*arguments)) for arguments in inputs],
    }
    return _sample(problem, tests, right, wrong)


def _numbers(rng: random.Random, low: int = -50, high: int = 50) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(5, 12))]


def _lines(rng: random.Random) -> list[str]:
    """Numbers on one line, for each test."""
    return [" ".join(map(str, _numbers(rng))) + "\n" for _ in range(_NUM_CASES)]


def _multiples(rng: random.Random) -> Sample:
    divisor = rng.randint(2, 5)
    texts = [f"{text}{divisor} {divisor + 1}" for text in _lines(rng)]
    return _standard(
        f"Standard input has whole numbers between blanks and line ends. Print the sum of those that {divisor} "
        "divides.\n\nExample: input `1 2 3 4 5 6` has "
        f"the sum {sum(n for n in range(1, 7) if n % divisor == 0)}.",
        texts,
        lambda text: sum(n for n in map(int, text.split()) if n % divisor == 0),
        f"import sys\n\nprint(sum(n for n in map(int, sys.stdin.read().split()) if n % {divisor} == 0))\n",
        ("== 0", "!= 0"),
    )


def _widest_gap(rng: random.Random) -> Sample:
    texts = _lines(rng)

    def solve(text: str) -> int:
        ordered = sorted(map(int, text.split()))
        return max(b - a for a, b in pairwise(ordered))

    return _standard(
        "Standard input has whole numbers on one line. Sort them, and print the largest difference of neighbours.\n\n"
        "Example: `1 9 4` gives 5.",
        [f"{text.rstrip()} {100 + at}\n" for at, text in enumerate(texts)],
        solve,
        "numbers = sorted(map(int, input().split()))\nprint(max(b - a for a, b in zip(numbers, numbers[1:])))\n",
        ("max(b", "min(b"),
    )


def _runs(rng: random.Random) -> Sample:
    letters = rng.sample("abcdefgh", 3)
    texts = ["".join(rng.choice(letters) * rng.randint(1, 4) for _ in range(6)) for _ in range(_NUM_CASES)]

    def solve(text: str) -> str:
        found = ""
        for at, letter in enumerate(text):
            if at == 0 or text[at - 1] != letter:
                rest = text[at:]
                found += f"{letter}{len(rest) - len(rest.lstrip(letter))}"
        return found

    return _standard(
        "Standard input is one line of letters. Print each run of one letter as the letter and the run's length.\n\n"
        "Example: `aaab` gives `a3b1`.",
        texts,
        solve,
        "from itertools import groupby\n\n"
        "print(''.join(f'{letter}{len(list(run))}' for letter, run in groupby(input())))\n",
        ("len(list(run))", "len(list(run)) + 1"),
    )


def _columns(rng: random.Random) -> Sample:
    width = rng.randint(2, 4)
    texts = ["".join(" ".join(str(rng.randint(0, 99)) for _ in range(width)) + "\n" for _ in range(3))
             for _ in range(_NUM_CASES)]  # fmt: skip

    def solve(text: str) -> str:
        rows = [list(map(int, line.split())) for line in text.splitlines()]
        return " ".join(str(sum(column)) for column in zip(*rows, strict=True))

    return _standard(
        f"Standard input is a table of whole numbers: 3 lines of {width}. Print the sums of its columns on one line.",
        texts,
        solve,
        "import sys\n\nrows = [list(map(int, line.split())) for line in sys.stdin if line.strip()]\n"
        "print(*(sum(column) for column in zip(*rows)))\n",
        ("zip(*rows)", "zip(*rows[1:])"),
    )


def _mean(rng: random.Random) -> Sample:
    drop = rng.randint(1, 2)

    def solve(text: str) -> str:
        kept = sorted(map(int, text.split()))[drop:-drop]
        return f"{sum(kept) / len(kept):.6f}"

    return _standard(
        f"Standard input has whole numbers on one line. Leave out the {drop} smallest and the {drop} largest, and "
        "print the mean of the others to 6 decimal places.",
        _lines(rng),
        solve,
        f"kept = sorted(map(int, input().split()))[{drop}:-{drop}]\nprint(f'{{sum(kept) / len(kept):.6f}}')\n",
        (f"[{drop}:-{drop}]", f"[{drop}:]"),
    )


def _pair(rng: random.Random) -> Sample:
    def solve(numbers: list[int], target: int) -> int:
        return sum(a + b == target for at, a in enumerate(numbers) for b in numbers[at + 1 :])

    drawn = (_numbers(rng, 0, 9) for _ in range(_NUM_CASES - 1))
    inputs = [[[2, 3, 2], 4], *([numbers, sum(rng.sample(numbers, 2))] for numbers in drawn)]
    return _function(
        "Write a function `count_pairs(numbers, target)`: the number of pairs of positions $i < j$ whose numbers sum "
        "to the target.",
        "count_pairs",
        inputs,
        solve,
        "def count_pairs(numbers, target):\n"
        "    return sum(a + b == target for i, a in enumerate(numbers) for b in numbers[i + 1:])\n",
        ("numbers[i + 1:]", "numbers[i:]"),
    )


def _brackets(rng: random.Random) -> Sample:
    texts = ["()[]", "([)]", "(" * rng.randint(1, 3), "[()]" * rng.randint(1, 3) + "]"]

    def solve(text: str) -> bool:
        while (shorter := text.replace("()", "").replace("[]", "")) != text:
            text = shorter
        return not text

    return _function(
        "Write a function `is_balanced(text)`: whether the brackets `()` and `[]` of the text are closed in order.",
        "is_balanced",
        [[text] for text in texts],
        solve,
        "def is_balanced(text):\n    last = None\n    while last != text:\n"
        "        last, text = text, text.replace('()', '').replace('[]', '')\n    return not text\n",
        ("return not text", "return len(text) % 2 == 0"),
    )


def _merge(rng: random.Random) -> Sample:
    def solve(spans: list[list[int]]) -> list[list[int]]:
        merged: list[list[int]] = []
        for low, high in sorted(spans):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        return merged

    starts = [[rng.randint(0, 40) for _ in range(5)] for _ in range(_NUM_CASES)]
    spans = [[[0, 9], [2, 3], *([low, low + rng.randint(1, 9)] for low in row)] for row in starts]
    return _function(
        "Write a function `merged(spans)`: the spans `[low, high]` in order, those that overlap or touch joined.",
        "merged",
        [[case] for case in spans],
        solve,
        "def merged(spans):\n    found = []\n    for low, high in sorted(spans):\n"
        "        if found and low <= found[-1][1]:\n            found[-1][1] = max(found[-1][1], high)\n"
        "        else:\n            found.append([low, high])\n    return found\n",
        ("max(found[-1][1], high)", "high"),
    )


def _rotate(rng: random.Random) -> Sample:
    def solve(numbers: list[int], steps: int) -> list[int]:
        steps %= len(numbers)
        return numbers[-steps:] + numbers[:-steps] if steps else numbers

    inputs = [[[*range(rng.randint(4, 7))], steps] for steps in (0, rng.randint(1, 3), rng.randint(10, 20), 1)]
    return _function(
        "Write a function `rotated(numbers, steps)`: the list turned to the right by so many steps, which may be more "
        "than its length.",
        "rotated",
        inputs,
        solve,
        "def rotated(numbers, steps):\n    steps %= len(numbers)\n"
        "    return numbers[-steps:] + numbers[:-steps] if steps else numbers\n",
        ("numbers[-steps:] + numbers[:-steps]", "numbers[steps:] + numbers[:steps]"),
    )


def _roman(rng: random.Random) -> Sample:
    values = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40, "X": 10, "IX": 9,
              "V": 5, "IV": 4, "I": 1}  # fmt: skip

    def solve(number: int) -> str:
        found = ""
        for sign, value in values.items():
            found += sign * (number // value)
            number %= value
        return found

    return _function(
        "Write a function `roman(number)`: the number, from 1 to 3999, in Roman numerals.",
        "roman",
        [[4], [rng.randint(40, 99)], [rng.randint(400, 999)], [rng.randint(1000, 3999)], [3888]],
        solve,
        f"VALUES = {values!r}\n\n\ndef roman(number):\n    found = ''\n    for sign, value in VALUES.items():\n"
        "        found += sign * (number // value)\n        number %= value\n    return found\n",
        ("number %= value", "number -= value"),
    )


_KINDS = (_multiples, _pair, _widest_gap, _brackets, _runs, _merge, _columns, _rotate, _mean, _roman)
