r"""Whether two texts denote the same value in different notations: `1,234` and `1234.0`, `1/2` and `0.5`, `(B).` and
`B`.

Ignored are marks around an answer (`**42**`, `$42$`, `\boxed{42}`, `The answer is 42.`), currency signs, spaces,
capitals of ordinary words (but not of `CO` and `Co`), and the order within a set. A percent sign means 1/100; above 1
it may also be left out. In doubt, values are different.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

_LONGEST_CHARS = 1_000
"""Longer texts are compared literally: agents write them, and their numbers could be huge."""
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63", "-"),
        **dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " "),
        **dict.fromkeys("\u2018\u2019", "'"),
        **dict.fromkeys("\u201c\u201d", '"'),
        "\u2044": "/",
        **{chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)},
    }
)
_LATEX = (
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,!;: ]|[\u2009\u202f\u00a0])(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\!|\\left(?![a-z])|\\right(?![a-z])"), ""),
    (re.compile(r"\\[,;: ]|\\q?quad(?![a-zA-Z])|(?<=\d)(?=\\[dt]?frac)"), " "),
    (re.compile(r"\\[dt]?frac\s*(?:\{(-?[\d.]+)\}\s*\{([\d.]+)\}|(\d)\s*(\d))(?!\s*\d)"), r"\1\3/\2\4"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\^\s*\{?\\circ\}?"), "°"),
    (re.compile(r"\\([%$#&{}])"), r"\1"),
    (re.compile(r"\s*(?:\\times|\\cdot|[×·*])\s*10\s*(?:\^|\*\*)\s*\{?([-+\u2212]?\d{1,3})\}?"), r"e\1"),
)
_SAID = re.compile(
    r"(?:\*\*|__)?(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my)\s+)?(?:final\s+|correct\s+|right\s+)?"
    r"(?:answer|result|solution)(?:\s+is\s*:?|(?:\*\*|__)?\s*[:=])(?:\*\*(?=\s)|__(?=\s))?\s*(?=\S)|#{1,6}\s+",
    re.IGNORECASE,
)
_PAIRS = (
    *(("**", "**"), ("__", "__"), ("$$", "$$"), ("$", "$"), ("`", "`"), ("*", "*"), (r"\(", r"\)"), (r"\[", r"\]")),
    ("<answer>", "</answer>"),
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
_LETTER = re.compile(r"(?:(?:option|choice)\s+)?[(\[]?([A-Za-z])[)\]]?[.):]?", re.IGNORECASE)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<before>[$€£¥₹]?)\s*(?P<minus>-?)(?:(?P<whole>[0-9]+)\s+(?=[0-9]+/))?(?P<top>{_DIGITS})"
    rf"(?:\s*/\s*(?P<bottom>{_DIGITS}))?\s*(?P<unit>(?:[^\s0-9.,/].*)?)",
    re.DOTALL,
)
_AROUND = re.compile(r"\s*([,:;=+*/^()\[\]{}<>|])\s*|(?<=\w) (-) (?=\w)")
_STOP = re.compile(r"(?<=.)\.$|(?<=[^\W\d_]{2})!+$")
"""The end of a sentence, but not the factorial `5!`."""
_WORD = re.compile(r"[^\W\d_]+")
_SMALL = {"a", "an", "the", "of", "in", "to", "is", "on", "at", "by", "as", "it", "or", "no", "be", "we", "he"}
_TRUTH = {"true", "false", "yes", "no"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_SMALLEST_SURE_DIGITS = 15
"""A number with so many digits comes from a float, and its last digits may differ."""


class _Number(NamedTuple):
    value: Fraction
    mark: str
    """A currency or `%`."""
    unit: str
    num_digits: int


def is_same_value(right: str, given: str) -> bool:
    """right: the answer of the dataset. given: the agent's answer."""
    if right.strip() == given.strip():
        return True
    if max(len(right), len(given)) > _LONGEST_CHARS:
        return False
    right, given = without_marks(right), without_marks(given)
    return bool(given) and (
        _same_text(right, given) or _same_number(right, given) or _same_letter(right, given) or _same_list(right, given)
    )


def without_marks(text: str) -> str:
    """The answer itself, with keyboard characters and without purely typographic LaTeX."""
    text = unicodedata.normalize("NFC", text).strip()
    before = ""
    while text != before:
        before = text
        text = _without_pair(text)
        if (boxed := _BOX.fullmatch(text)) and _is_balanced(boxed[1]):
            text = boxed[1].strip()
        lead_in = _SAID.match(text)
        text = text[lead_in.end() :] if lead_in and lead_in.end() < len(text) else text
        text = _STOP.sub("", text).rstrip()
    for pattern, instead in _LATEX:
        text = pattern.sub(instead, text)
    return text.translate(_SIGNS).strip()


def _without_pair(text: str) -> str:
    for opening, closing in _PAIRS:
        inner = text[len(opening) : len(text) - len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inner.strip() and closing not in inner:
            return inner.strip()
    return text


def _is_balanced(text: str) -> bool:
    depth = 0
    for char in text.replace(r"\{", "").replace(r"\}", ""):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth < 0:
            return False
    return depth == 0


def _same_text(right: str, given: str) -> bool:
    if _is_number(right):
        return False
    one, other = _tidy(right), _tidy(given)
    if one[:1] not in ("'", '"') and len(other) > 2 and other[0] == other[-1] and other[0] in "'\"":
        other = other[1:-1]
    return _same_words(one, other) or _same_words(_without_article(one), _without_article(other))


def _tidy(text: str) -> str:
    return _AROUND.sub(r"\1\2", " ".join(text.split()))


def _without_article(text: str) -> str:
    return re.sub(r"^(?:the|an?)\s+(?=\w{3})", "", text, flags=re.IGNORECASE)


def _same_words(right: str, given: str) -> bool:
    if right == given or right.casefold() != given.casefold():
        return right == given
    if right.casefold() in _TRUTH:
        return True
    return _is_ordinary(right) and (_is_ordinary(given) or (given.isupper() and not right.islower()))


def _is_ordinary(text: str) -> bool:
    """Whether its capitals are irrelevant: for `New York` and `red`, but not for `CO`, `NaCl` and `x`."""
    words = _WORD.findall(text)
    return any(len(word) > 2 for word in words) and all(
        word[1:].islower() if len(word) > 2 else word.casefold() in _SMALL for word in words
    )


def _same_letter(right: str, given: str) -> bool:
    one, other = _LETTER.fullmatch(right), _LETTER.fullmatch(given)
    if not (one and other):
        return False
    return one[1] == other[1] or (len(given) > 1 and one[1] == other[1].upper())


def _is_number(text: str) -> bool:
    number = _number(text)
    return number is not None and not number.unit


def _number(text: str) -> _Number | None:
    if len(text) == 1 and not text.isascii() and not text.isdigit():
        value = unicodedata.numeric(text, None)  # a half
        return None if value is None else _Number(Fraction(value).limit_denominator(100), "", "", 1)
    found = _NUMBER.fullmatch(text)
    if found is None or (found["sign"] and found["minus"]):
        return None
    top, bottom = (Fraction((found[part] or "1").replace(",", "")) for part in ("top", "bottom"))
    if bottom == 0 or (found["whole"] and not found["bottom"]):
        return None
    value = int(found["whole"] or 0) + top / bottom
    unit, mark = found["unit"].strip(), found["before"]
    if first := next((one for one in ("%", "percent", "$", "€", "£", "¥") if unit == one), None):
        unit, mark = "", mark or {"percent": "%"}.get(first, first)
    is_negative = "-" in (found["sign"], found["minus"])
    num_digits = 0 if found["bottom"] else len(re.sub(r"[eE].*|[^0-9]", "", found["top"]).lstrip("0"))
    return _Number(-value if is_negative else value, mark, unit, num_digits)


def _same_number(right: str, given: str) -> bool:
    if not re.match(r"[A-Za-z]\s*=", right):
        given = re.sub(r"^[A-Za-z]\s*=\s*", "", given)
    one, other = _number(right), _number(given)
    if one is None or other is None or not _same_unit(one.unit, other.unit):
        return False
    if one.mark == other.mark:
        return _equal(one, other.value)
    if one.mark and other.mark:
        return False
    if "%" not in (one.mark, other.mark):  # of a currency
        return _equal(one, other.value)
    by_hundred = other.value / 100 if other.mark else other.value * 100
    return _equal(one, by_hundred) or (abs(one.value) > 1 and _equal(one, other.value))


def _same_unit(right: str, given: str) -> bool:
    """`9 (apples)`, as ASDiv writes it, also equals 9 and 9 apples."""
    if right.startswith("(") and right.endswith(")") and re.fullmatch(r"[\w\s]+", right[1:-1]):
        return given in ("", right, right[1:-1])
    return _tidy(right) == _tidy(given)


def _equal(right: _Number, given: Fraction) -> bool:
    if right.num_digits < _SMALLEST_SURE_DIGITS or right.value.denominator == 1:
        return right.value == given
    return abs(right.value - given) <= abs(right.value) / 10**12


def _same_list(right: str, given: str) -> bool:
    one, other = _items(right), _items(given)
    if one is None or other is None or len(one) != len(other) or right[0] != given[0] or right[-1] != given[-1]:
        return False
    if right[0] != "{":
        return all(map(is_same_value, one, other))
    return all(any(is_same_value(a, b) for b in other) for a in one) and all(
        any(is_same_value(a, b) for a in one) for b in other
    )


def _items(text: str) -> list[str] | None:
    """Items of `(1, 2)`, `[0, 1)` or `{1, 2}`; None if it is not such a list."""
    if len(text) < 2 or text[0] not in _CLOSING or text[-1] not in ")]}":
        return None
    found, depth = [""], 0
    for char in text[1:-1]:
        depth += (char in _CLOSING) - (char in ")]}")
        if depth < 0:
            return None
        if char == "," and depth == 0:
            found.append("")
        else:
            found[-1] += char
    return found if depth == 0 and len(found) > 1 else None
