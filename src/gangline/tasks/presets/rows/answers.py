r"""Extracts the right answers from an answer column of any type; each of them is accepted.

A text may be a whole solution with the answer after `####` (GSM8K) or in `\boxed{...}` (MATH). A list contains several
right answers (SQuAD, NQ, TextVQA), and so do the texts of `{text, answer_start}` and `{value, aliases}`. An ambiguous
value, such as a list of numbers, or a value that cannot be compared, is unsuitable.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, cast

from gangline.grading.untrusted.same_value import is_same_value, without_marks
from gangline.tasks.presets.rows.unsuitable import RowUnsuitable

_PLACEHOLDERS = {
    *("nan", "NaN", "NAN", "null", "NULL", "None", "NONE", "N/A", "n/a", "#N/A", "NA", "<NA>", "NaT", "<unk>"),
    *("unknown", "notfound", "not found", "proof"),  # NuminaMath's
}
_ONE_OR_SEVERAL = "holds several values, which may be one answer or several right ones: map a column with one answer"
_FLOAT32 = struct.Struct("f")


def answers_of(value: Any, column: str = "answer") -> tuple[str, ...]:
    """At least one. Raises: RowUnsuitable, naming the column."""
    try:
        found = _answers(value)
    except (RowUnsuitable, RecursionError) as error:
        problem = error.message if isinstance(error, RowUnsuitable) else "is nested too deeply"
        raise RowUnsuitable(f"{column}: {problem}") from None
    return tuple(dict.fromkeys(found))


def boxes(text: str) -> list[str]:
    r"""Contents of all `\boxed{...}` with closed braces, from left to right."""
    found: list[str] = []
    end = 0
    for box in re.finditer(r"\\boxed\s*\{", text):
        if box.start() >= end and (inner := _braced(text, box.end())) is not None:
            end = box.end() + len(inner)
            found.append(inner.strip())
    return [one for one in found if one]


def _answers(value: Any) -> list[str]:
    if hasattr(value, "tolist"):  # NumPy's
        value = value.tolist()
    match value:
        case None:
            raise RowUnsuitable("is null")
        case bool():
            return ["True", "Yes"] if value else ["False", "No"]
        case int() | float() | Decimal():
            return _of_number(value)
        case str():
            return _of_text(value)
        case date() | time():
            return _of_date(value)
        case list() | tuple() | set() | frozenset():
            return _of_list(list(cast("list[Any]", value)))
        case Mapping():
            return _of_object(cast("Mapping[str, Any]", value))
        case _:
            kind = "binary data" if isinstance(value, bytes) else f"a {type(value).__name__}"
            raise RowUnsuitable(f"is {kind}, which no text equals")


def _of_number(value: float | Decimal) -> list[str]:
    if not (value.is_finite() if isinstance(value, Decimal) else isinstance(value, int) or math.isfinite(value)):
        raise RowUnsuitable(f"is {value}, no number")
    exact = Decimal(repr(value) if isinstance(value, float) else value)
    texts = [_digits(exact)]
    if isinstance(value, float) and abs(value) < 3e38 and len(exact.as_tuple().digits) > 9:
        texts.append(_digits(_of_float32(value, exact)))
    return texts


def _digits(number: Decimal) -> str:
    """Without an exponent and trailing zeros: 2.0 is 2."""
    text = f"{number:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


def _of_float32(value: float, exact: Decimal) -> Decimal:
    """0.1 for 0.10000000149011612: a 32-bit column was written with 64-bit digits."""
    packed = _FLOAT32.pack(value)
    if _FLOAT32.unpack(packed)[0] != value:
        return exact
    return next(Decimal(short) for n in range(1, 10) if _FLOAT32.pack(float(short := f"{value:.{n}g}")) == packed)


def _of_text(text: str) -> list[str]:
    text = text.strip()
    if marks := list(re.finditer(r"^\s*####", text, re.MULTILINE)):
        text = text[marks[-1].end() :]
    elif boxed := list(dict.fromkeys(boxes(text))):
        if len(boxed) > 1:
            raise RowUnsuitable(r"has several \boxed{...}: map a column with the answer alone")
        (text,) = boxed
    elif r"\boxed" in text:
        raise RowUnsuitable(r"has a \boxed whose braces are not closed")
    text = text.strip()
    if not text:
        raise RowUnsuitable("is empty")
    if text in _PLACEHOLDERS:
        raise RowUnsuitable(f"is {text!r}, which stands for no answer")
    if r"\begin{" in text:  # a matrix
        text = " ".join(text.split())
    if "\n" in text or "\r" in text:
        raise RowUnsuitable("has several lines, and an answer is one: map a column with the answer alone")
    return _of_written(text) if text[0] in "[{" else [text]


def _of_written(text: str) -> list[str]:
    """A text that may be a list or an object; its literal text is also right."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _of_literal(text)
    if isinstance(value, dict):
        return _of_object(cast("dict[str, Any]", value))
    items = cast("list[Any]", value) if isinstance(value, list) else []
    if not any(isinstance(item, str) for item in items):
        return [text]
    if _are_different(items):
        raise RowUnsuitable(_ONE_OR_SEVERAL)
    return [*_of_list(items), text]


def _of_literal(text: str) -> list[str]:
    """A text that is not JSON. Raises: RowUnsuitable for Python's notation of objects and lists of texts."""
    if text.startswith(("{'", '{"')) and ":" in text:
        raise RowUnsuitable("is an object as Python writes it: map a column with the answer alone")
    if text.startswith(("['", '["')):
        raise RowUnsuitable(_ONE_OR_SEVERAL)
    return [text]


def _of_date(value: date | time) -> list[str]:
    iso = value.isoformat()
    if isinstance(value, time):
        return [iso, value.strftime("%H:%M")] if not (value.second or value.microsecond) else [iso]
    if isinstance(value, datetime):
        if (value.hour, value.minute, value.second, value.microsecond) != (0, 0, 0, 0):
            return [iso, iso.replace("T", " "), iso.removesuffix("+00:00") + "Z"]
        return [iso, *_of_date(value.date())]
    month, short = value.strftime("%B"), value.strftime("%b")
    day, year = value.day, value.year
    forms = [f"{name} {day}, {year}" for name in (month, short)] + [f"{day} {name} {year}" for name in (month, short)]
    return [iso, *forms]


def _of_list(values: list[Any]) -> list[str]:
    given = [value for value in values if value is not None and str(value).strip() and str(value) not in _PLACEHOLDERS]
    if not given:
        raise RowUnsuitable("is an empty list")
    if any(isinstance(one, list | tuple | Mapping) or (hasattr(one, "tolist") and one.ndim) for one in given):
        raise RowUnsuitable("is a list of lists or objects: map a column with the answer alone")
    found = [text for one in given for text in _answers(one)]
    if _are_different(given) and all(map(_may_be_a_part, given)):
        raise RowUnsuitable(_ONE_OR_SEVERAL)
    return found


def _are_different(values: list[Any]) -> bool:
    return any(not is_same_value(str(values[0]), str(value)) for value in values[1:])


def _may_be_a_part(value: Any) -> bool:
    """Whether it is a number, a letter or a verdict. A list of these may be a single answer, all right choices, or
    votes.
    """
    if not isinstance(value, str) or re.fullmatch(r"\(?[A-Z]\)?|(?i:yes|no|true|false)", value.strip()):
        return True
    return without_marks(value).strip("+-$%()").replace(",", "").replace(".", "").replace("/", "").isdigit()


def _of_object(value: Mapping[str, Any]) -> list[str]:
    if "text" in value:  # SQuAD
        texts = value["text"]
        return _of_list(cast("list[Any]", texts) if isinstance(texts, list) else [texts])
    if "value" in value:  # TriviaQA
        columns = [value.get(name) for name in ("aliases", "normalized_aliases")]
        aliases = [
            one for given in columns for one in (cast("list[Any]", given) if isinstance(given, list) else [given])
        ]
        return [text for one in (value["value"], *filter(None, aliases)) for text in _answers(one)]
    if isinstance(spans := value.get("spans"), list) and spans:  # DROP
        if _are_different(cast("list[Any]", spans)):
            raise RowUnsuitable(_ONE_OR_SEVERAL)
        return _of_list(cast("list[Any]", spans))
    if "ground_truth" in value:  # verl
        return _answers(value["ground_truth"])
    raise RowUnsuitable(f"is an object of {', '.join(map(repr, value)) or 'nothing'}: map one of its columns")


def _braced(text: str, start: int) -> str | None:
    """The text up to the closing brace."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
        at += 1
    return None
