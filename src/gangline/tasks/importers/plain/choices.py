"""Multiple-choice questions: the choices of a row, and which of them is its answer.

Sources: the columns of MMLU (`choices`, an index), ARC and CommonsenseQA (`{text, label}`, a label), OpenBookQA, AQuA
(`["A)21", ...]`, a letter), MedQA (`{"A": ...}`), MMLU-Pro (`options`) and GPQA (`Correct Answer`, ...).
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple, cast

from gangline.domain.text_lists import texts_of
from gangline.grading.untrusted.same_value import is_same_value
from gangline.tasks.presets.rows.unsuitable import RowUnsuitable

_COLUMNS = ("choices", "options")
_OF_GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_MARKED = re.compile(r"\s*\(?([A-Z])\s*[).:]\s*(.*)", re.DOTALL)
_LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")


class Chosen(NamedTuple):
    instruction: str
    """Includes the choices, which are added if missing."""
    answers: tuple[str, ...]
    """The letter first."""


def chosen_of(given: Mapping[str, Any], instruction: str, answer: Any, *, is_mapped: bool) -> Chosen | None:
    """None for a row whose answer is not a choice.

    is_mapped: the user named the column of the choices. Raises: RowUnsuitable if the answer is then not a choice, if it
    matches two choices, or if an empty choice makes it ambiguous.
    """
    if all(isinstance(given.get(name), str) and given[name].strip() for name in _OF_GPQA):
        order = sorted(_OF_GPQA, key=lambda name: sha256(f"{instruction}\0{given[name]}".encode()).digest())
        return _chosen(instruction, [("", given[name].strip()) for name in order], order.index(_OF_GPQA[0]))
    column = next((name for name in _COLUMNS if given.get(name) is not None), None)
    if column is None:
        if is_mapped:
            raise RowUnsuitable("choices: is null")
        return None
    pairs = _pairs(given[column])
    if pairs is None and isinstance(answer, str) and _LETTER.fullmatch(answer.strip()):
        raise RowUnsuitable(f"{column}: is not a list of texts, and the answer {answer!r} is a letter")
    shown = _without_end(pairs or [])
    if pairs and not all(text for _, text in pairs):
        named = _index(answer, pairs)
        if named is not None and (named >= len(shown) or len(shown) == 1 or not all(text for _, text in shown)):
            empty = next(at for at, (_, text) in enumerate(pairs, 1) if not text)
            raise RowUnsuitable(f"{column}: choice {empty} of {len(pairs)} is empty, so which one is right is open")
    choices = _choices(shown)
    at = None if choices is None else _index(answer, choices)
    if choices is None or at is None:
        if is_mapped:
            why = "is not a list of texts" if choices is None else f"has no choice that the answer {answer!r} names"
            raise RowUnsuitable(f"{column}: {why}")
        return None
    return _chosen(instruction, choices, at)


def _chosen(instruction: str, choices: list[tuple[str, str]], at: int) -> Chosen:
    letters = _letters(choices)
    if not all(_is_shown(letter, text, instruction) for letter, (_, text) in zip(letters, choices, strict=True)):
        lines = [f"{letter}) {text}" for letter, (_, text) in zip(letters, choices, strict=True)]
        instruction = "\n".join([instruction.rstrip(), "", *lines])
    return Chosen(instruction, _right(letters, [text for _, text in choices], at))


def _is_shown(letter: str, text: str, instruction: str) -> bool:
    """Whether the question has the choice beside its letter. A number may be a choice, and stand in the question."""
    word = re.escape(text)
    return re.search(rf"(?<!\w){letter}\W{{1,4}}{word}|{word}\W{{1,4}}{letter}(?!\w)", instruction) is not None


def _without_end(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without trailing empty choices, with which rows of fewer choices are padded."""
    return pairs[: max((at for at, (_, text) in enumerate(pairs, 1) if text), default=0)]


def _choices(pairs: list[tuple[str, str]]) -> list[tuple[str, str]] | None:
    """(label, text) of each choice; the label is empty if the row has none."""
    if not 2 <= len(pairs) <= len(string.ascii_uppercase) or not all(text for _, text in pairs):
        return None
    marked = [_MARKED.fullmatch(text) for _, text in pairs]
    if all(one and one[1] == letter for one, letter in zip(marked, string.ascii_uppercase, strict=False)):
        return [(one[1], one[2]) for one in marked if one]
    return pairs


def _pairs(value: Any) -> list[tuple[str, str]] | None:
    """The text of a missing choice is empty."""
    if isinstance(value, Mapping):
        columns = cast("Mapping[str, Any]", value)
        if {"text", "label"} <= columns.keys():
            try:
                return [(str(one), _text(text)) for one, text in zip(columns["label"], columns["text"], strict=True)]
            except (TypeError, ValueError):
                return None
        return [(name, _text(text)) for name, text in columns.items()]
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in cast("list[Any]", value)):
        return [(str(one.get("label", "")), _text(one.get("text"))) for one in cast("list[Any]", value)]
    if isinstance(value, list):
        return [("", _text(one)) for one in cast("list[Any]", value)]
    try:
        return [("", _text(text)) for text in texts_of(value)]
    except ValueError:
        return None


def _text(choice: Any) -> str:
    """Empty for null, NaN and blanks."""
    return "" if choice is None or choice != choice or not str(choice).strip() else str(choice)


def _index(answer: Any, choices: list[tuple[str, str]]) -> int | None:
    """Index of the answer among the choices; None if it is not one. Raises: RowUnsuitable if it matches two."""
    if isinstance(answer, list):
        (answer,) = cast("list[Any]", answer) if len(cast("list[Any]", answer)) == 1 else [None]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    labels = [label or letter for (label, _), letter in zip(choices, string.ascii_uppercase, strict=False)]
    texts = [text.strip() for _, text in choices]
    named = str(answer).strip()
    if isinstance(answer, int):
        if named in labels:
            return labels.index(named)
        return answer if not isinstance(answer, bool) and 0 <= answer < len(choices) else None
    if not isinstance(answer, str):
        return None
    letter = _LETTER.fullmatch(named)
    wanted = [label for label in labels if label == named or (letter and label == letter[1].upper())]
    found = {labels.index(label) for label in wanted} or {at for at, text in enumerate(texts) if text == named}
    if named.isdigit() and named not in labels and int(named) < len(choices):  # HellaSwag: an index as a text
        found.add(int(named))
    if not any(label for label, _ in choices):
        found |= {at for at, text in enumerate(texts) if text == named}
    if len({texts[at] for at in found}) > 1:
        raise RowUnsuitable(f"answer: {answer!r} may be two of the choices: by its text, and by its place")
    return found.pop() if len(found) == 1 else None


def _letters(choices: list[tuple[str, str]]) -> list[str]:
    labels = [label for label, _ in choices]
    is_lettered = len(set(labels)) == len(labels) and all(re.fullmatch("[A-Z]", label) for label in labels)
    return labels if is_lettered else list(string.ascii_uppercase[: len(choices)])


def _right(letters: list[str], texts: list[str], at: int) -> tuple[str, ...]:
    """The letter, in several notations, and the choice's own text if that is unambiguous."""
    letter, text = letters[at], texts[at].strip()
    forms = [letter, *(form.format(letter, text) for form in ("{}) {}", "({}) {}", "{}. {}", "{}: {}"))]
    if letter.lower() not in map(str.strip, texts):  # the article `a`, as a choice
        forms.insert(1, letter.lower())
    others = [*texts[:at], *texts[at + 1 :], *letters]
    return tuple(forms if any(is_same_value(text, other) for other in others) else [*forms, text])
