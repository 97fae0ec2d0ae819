"""Regular expressions of a task: those that surely never end are refused, and all others are left alone."""

from __future__ import annotations

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.domain.patterns import checked_pattern
from gangline.settings import plugins

DOUBLING = [
    r"(a+)+$",
    r"(a*)*b",
    r"(?:a+)+?b",
    r"(?:(?:a+))*$",
    r"(a+){2,}$",
    r"(\d+)*$|x",
    r"x|((\w+)*)y",
    r"(?=(a+)+b)",
    r"(?i:(a+)+)z",
    r"(?!(\s+)+$)",
    r"(x)(?(1)(a+)+b|c)",
    r"((a+)+b)?c",
]
FINE = [
    r"(a+)+",
    r"(a+)+b?",
    r"(a+,)+b",
    r"(a+)?b",
    r"(a{2,5})+$",
    r"(?>a+)+$",
    r"(a++)+$",
    r"\A(?:\w+\s*)+\Z",
    r"^[a-z]+(-[a-z]+)*$",
    r"",
]
NO_PATTERNS = ["(", "*", "a{99999999999999}", "(" * 3000 + ")" * 3000, "[z-a]", "\\"]


@pytest.mark.parametrize("pattern", DOUBLING)
def test_a_repetition_of_nothing_but_a_repetition_is_refused_where_it_is_tried_again(pattern: str) -> None:
    with pytest.raises(ValueError, match="doubles with each character"):
        checked_pattern(pattern)


@pytest.mark.parametrize("pattern", FINE)
def test_other_patterns_are_left_alone(pattern: str) -> None:
    assert checked_pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", NO_PATTERNS)
def test_what_is_not_a_regular_expression_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        checked_pattern(pattern)


def test_a_check_of_output_names_its_pattern() -> None:
    with pytest.raises(InvalidRequest, match=r"checks\.0.*doubles with each character"):
        plugins.make_evaluator("test_on_output", {"checks": [{"kind": "regex", "value": "(a+)+$"}]})
