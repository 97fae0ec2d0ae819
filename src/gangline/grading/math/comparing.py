"""Compares a right answer with an agent's, using the package math-verify. Runs in a child process (`isolated.py`).

Source: https://github.com/huggingface/Math-Verify; the right answer comes first, as the comparison is not symmetric.
"""

from __future__ import annotations

import logging
import re
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

math_verify: Any = import_module("math_verify")  # an optional dependency without type hints
sympy: Any = import_module("sympy")

_MARKED = re.compile(r"\$|\\boxed|\\\[|\\\(")
_MAX_SHOWN_CHARS = 500


class Prepared(NamedTuple):
    golds: list[list[Any]]
    job: dict[str, Any]


def warm() -> None:
    """Build the grammar's tables and import everything needed, as the first formula and comparison would."""
    golds, text = [r"\frac{1}{2}", "7"], r"$\boxed{0.5}$"
    work(prepare({"golds": golds, "text": text, "only_boxed": False, "choices": [], "rules": {}}))


def prepare(job: dict[str, Any]) -> Prepared:
    """Raises: ValueError if a right answer cannot be read."""
    logging.disable(logging.WARNING)
    golds = [read_gold(gold, job["choices"]) for gold in job["golds"]]
    unread = [gold for gold, read in zip(job["golds"], golds, strict=True) if not read]
    if unread:
        raise ValueError(f"math-verify cannot read the right answer {unread[0]!r}")
    return Prepared(golds, job)


def work(prepared: Prepared) -> dict[str, Any]:
    """Whether the answer in `job["text"]` is one of the right ones, and the text recognized as the answer."""
    golds, job = prepared
    text = job["text"]
    if job["only_boxed"]:
        boxed = last_boxed(text)
        if boxed is None:
            return {"correct": False, "answer": None}
        text = f"$\\boxed{{{boxed}}}$"
    found = math_verify.parse(text, _targets(job["choices"]), parsing_timeout=0)
    answer = next((one for one in reversed(found) if isinstance(one, str)), None)
    is_right = any(compare(gold, found, **job["rules"]) for gold in golds)
    return {"correct": is_right, "answer": answer and answer[:_MAX_SHOWN_CHARS]}


def read_gold(gold: str, choices: list[str]) -> list[Any]:
    """A right answer: a text with its formula marked (`$...$`, `\\boxed{...}`), or the formula alone."""
    as_given = math_verify.parse(gold, _targets(choices), parsing_timeout=0)
    if choices or (_MARKED.search(gold) and as_given):
        return as_given
    return math_verify.parse(f"$\\boxed{{{gold}}}$", _targets([]), parsing_timeout=0) or as_given


def compare(
    gold: list[Any],
    found: list[Any],
    *,
    decimals: int = 6,
    strict: bool = True,
    sets_as_relations: bool = False,
    relative_tolerance: float = 0.0,
    absolute_tolerance: float = 0.0,
) -> bool:
    """Whether any reading of the answer equals any reading of the right one."""
    rules: dict[str, Any] = {"float_rounding": decimals, "strict": strict, "timeout_seconds": 0}
    if math_verify.verify(gold, found, allow_set_relation_comp=sets_as_relations, **rules):
        return True
    if not (relative_tolerance or absolute_tolerance):
        return False
    return any(_are_near(right, one, relative_tolerance, absolute_tolerance) for right, one in product(gold, found))


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` whose braces are closed; None if there is none."""
    at = len(text)
    while (at := text.rfind("\\boxed{", 0, at)) >= 0:
        begin = at + len("\\boxed{")
        depth = 1
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            if depth == 0:
                return text[begin:end]
    return None


def _targets(choices: list[str]) -> list[Any]:
    if choices:
        return [
            math_verify.StringExtractionConfig(strings=tuple(choices)),
            math_verify.LatexExtractionConfig(boxed_match_priority=0),
        ]
    return [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]


def _are_near(gold: Any, found: Any, relative: float, absolute: float) -> bool:
    rights, ones = _numbers(gold), _numbers(found)
    if rights is None or ones is None or rights[0] != ones[0] or len(rights[1]) != len(ones[1]):
        return False
    return all(
        abs(right - one) <= max(absolute, relative * abs(right)) for right, one in zip(rights[1], ones[1], strict=True)
    )


def _numbers(value: Any) -> tuple[str, list[float]] | None:
    """The kind of a value and its numbers in order; None if it does not consist of real numbers."""
    match value:
        case sympy.Interval():
            kind, parts = f"interval {value.left_open} {value.right_open}", [value.start, value.end]
        case sympy.FiniteSet():
            kind, parts = "set", list(value.args)
        case sympy.Tuple():
            kind, parts = "tuple", list(value.args)
        case sympy.MatrixBase():
            kind, parts = f"matrix {value.shape}", list(value)
        case sympy.Expr():
            kind, parts = "number", [value]
        case _:
            return None
    try:
        numbers = [float(part) for part in parts]
    except (TypeError, ValueError, OverflowError):
        return None
    return kind, sorted(numbers) if kind == "set" else numbers
