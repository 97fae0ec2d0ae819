"""Answer columns as published data sets have them: a right answer earns 1 in any writing, a wrong one 0, and a row that
nothing can grade is left out by its column. No row pays for any end."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.domain.errors import InvalidRequest
from gangline.grading.untrusted.same_value import is_same_value
from gangline.machine.reading.imported import Choices, Imported, LeftOut
from gangline.settings import plugins
from gangline.tasks.importers.plain.dataset import read_plain_row
from gangline.tasks.importers.source import Wanted, read_source
from gangline.tasks.presets.preset import find_preset
from gangline.tasks.presets.rows.answers import answers_of
from gangline.tasks.presets.rows.unsuitable import RowUnsuitable
from support.node.folder_runtime import FolderRuntime
from support.requirements import need_module
from support.training.evaluation_samples import a_context, a_trace, said

QUESTION = {"instruction": "How much?"}


def task_of(row: Mapping[str, Any], **mapping: str) -> dict[str, Any]:
    return read_plain_row(row, "row", mapping, Choices(), is_answered=True).body


@pytest.fixture(autouse=True)
def logging_goes_on() -> Iterator[None]:
    """The grader of formulas, which has its own process elsewhere, turns it off."""
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def runtime(tmp_path: Path) -> FolderRuntime:
    return FolderRuntime(tmp_path / "runtime")


async def reward(runtime: FolderRuntime, body: dict[str, Any], answer: str) -> float | None:
    evaluator = plugins.make_evaluator(body["evaluator"]["strategy"], body["evaluator"]["config"])
    traces = (a_trace(said("assistant", f"I think.\n\n{answer}\n")),)
    return (await evaluator.evaluate(a_context(runtime, traces=traces))).reward


GRADED: dict[str, tuple[Any, list[str], list[str]]] = {
    "gsm8k": (
        "She has 48/2 = <<48/2=24>>24.\n#### 1,024",
        ["1024", "1,024", "#### 1024", "$1024"],
        ["1,02", "24", "1.024"],
    ),
    "math": (r"So $x = \boxed{\frac{1}{2}}$.", [r"\boxed{\frac12}", "0.5", "1/2", r"$\dfrac{1}{2}$"], ["5", "2", "1"]),
    "math with nested braces": (r"We get $\boxed{\text{(B)}}$", ["B", "(B)", r"\boxed{B}"], ["A", "(C)", "Because"]),
    "math with one box twice": (r"$\boxed{7}$, that is \boxed{7}.", ["7"], ["77"]),
    "aime, an int": (33, ["33", "033", "33.0"], ["3", "330", "-33"]),
    "aime, a text": ("033", ["33", "033"], ["3", "0.33"]),
    "svamp": ("2.0", ["2", "2.0", "2."], ["20", "0.2"]),
    "asdiv": ("9 (apples)", ["9", "9 apples"], ["9 pears", "6", "apples"]),
    "a float of pandas": (12.0, ["12"], ["1.2", "120"]),
    "a float": (0.1 + 0.2, ["0.3", "3/10"], ["0.31", "3"]),
    "a float of 32 bits": (float(np.float32(0.1)), ["0.1"], ["0.11", "1"]),
    "a small float": (1e-7, ["1e-7", "0.0000001"], ["1", "-7"]),
    "a big int": (2**100, [str(2**100), f"{2**100:,}"], [str(2**100 + 1)]),
    "a decimal": (Decimal("1234.50"), ["1234.5", "1,234.50"], ["1234.05", "12345"]),
    "numpy": (np.float32(2.5), ["2.5"], ["25"]),
    "an int8 of numpy": (np.int8(-5), ["-5", "\u22125"], ["5"]),
    "thousands": ("12", ["12", "12.0", "+12"], ["1,2", "12,000", "1 2"]),
    "a fraction": ("1/2", ["0.5", ".5", "50%", r"\frac12", "2/4"], ["1", "5", "2/1"]),
    "scientific": ("3e8", ["300000000", "300,000,000", r"3\times 10^{8}", "3 × 10^8"], ["3e9", "38", "3"]),
    "a percentage": ("50%", ["50%", "50 %", r"50\%", "0.5", "50"], ["5%", "500", "0.05"]),
    "a small percentage": ("0.5%", ["0.5%", "0.005"], ["0.5", "5%"]),
    "money": ("$5.00", ["5", "$5", r"\$5"], ["€5", "$50", "500"]),
    "a unit": ("5 km", ["5 km", "5.0 km", "5km"], ["5 m", "5000", "50 km"]),
    "under a heading": (
        "42",
        ["**Answer:** 42", "**Final Answer**: 42", "**Answer: 42**", "<answer>42</answer>"],
        ["24"],
    ),
    "marks in a text": ("C####", ["C####"], ["C"]),
    "negative": ("-3", ["-3", "\u22123", "**-3**"], ["3", "- 30"]),
    "yes": ("yes", ["yes", "Yes.", "YES"], ["no", "yes and no", "yesterday"]),
    "boolq": (True, ["True", "true", "yes", "Yes."], ["False", "no", "1", "not true"]),
    "boolq, false": (False, ["False", "No"], ["True", "yes", "None"]),
    "a letter": ("A", ["A", "(A)", "A.", "Option A", "The answer is A.", "**A**"], ["Answer", "B", "a lot", "AA"]),
    "bbh": ("(B)", ["B", "(B)", "B)"], ["(A)", "b a"]),
    "squad": (
        {"text": ["Denver Broncos", "the Broncos", "Denver Broncos"], "answer_start": [1, 2, 3]},
        ["Denver Broncos", "denver broncos.", "Broncos"],
        ["Denver", "Panthers", "text"],
    ),
    "triviaqa": (
        {"value": "Sunset Boulevard", "aliases": ["Sunset Blvd"], "normalized_aliases": ["sunset blvd"], "type": "x"},
        ["Sunset Boulevard", "Sunset Blvd."],
        ["Sunset", "value"],
    ),
    "an alias alone": ({"value": "Rome", "aliases": "Roma", "normalized_aliases": None}, ["Rome", "Roma"], ["R", "m"]),
    "numbers as aliases": ({"value": "MM", "aliases": ["2000", "2,000", "1999"]}, ["2000", "1999"], ["M", "20"]),
    "a year as alias": ({"value": "MCM", "aliases": 1900}, ["MCM", "1900"], ["M", "9"]),
    "votes": (["yes", "Yes"], ["yes"], ["no"]),
    "nq": (["14 December 1972", "December 1972"], ["December 1972", "14 December 1972."], ["1972", "November 1972"]),
    "textvqa": (["nous les gosses", "nous les gosses", None, ""], ["Nous les gosses"], ["gosses", ""]),
    "drop": ({"spans": ["Chaz Schilens", "Chaz Schilens"], "types": ["span", "span"]}, ["Chaz Schilens"], ["Chaz"]),
    "dapo": ("34", ["34"], ["3", "4"]),
    "skywork": ('["2"]', ["2", "2.0"], ["22", "[]"]),
    "verl, whole": ({"style": "rule", "ground_truth": "42"}, ["42"], ["rule", "4"]),
    "a numpy list": (np.array(["Paris"], dtype=object), ["paris"], ["Pari"]),
    "a chemical formula": ("CO", ["CO"], ["Co", "co", "CO2"]),
    "a unit's prefix": ("mW", ["mW"], ["MW", "mw"]),
    "a tuple": ("(1, 2)", ["(1,2)", "(1.0, 2)"], ["(2, 1)", "[1, 2]", "1", "(1, 2, 3)"]),
    "a set": (r"\{1, 2\}", ["{2, 1}", r"\{1,2\}"], ["{1}", "(1, 2)", "{1, 1}"]),
    "an interval": ("[0, 1)", ["[0,1)"], ["[0,1]", "(0,1)", "0"]),
    "cruxeval": ("[1, 2, 3]", ["[1,2,3]"], ["1", "[3, 2, 1]", "1, 2, 3"]),
    "a date": (date(2020, 1, 2), ["2020-01-02", "January 2, 2020", "2 Jan 2020"], ["2020-02-01", "2020"]),
    "midnight": (datetime(2020, 1, 2, tzinfo=UTC), ["2020-01-02", "2 January 2020"], ["2020-01-03"]),
    "a time": (time(9, 30), ["09:30", "09:30:00"], ["9", "09:31"]),
    "a moment": (datetime(2020, 1, 2, 9, 30), ["2020-01-02T09:30:00", "2020-01-02 09:30:00"], ["2020-01-02"]),
    "spaces around": ("  Paris \t", ["Paris", "PARIS", "paris"], ["Par is", "Paris, Texas"]),
    "accents": ("café", ["cafe\u0301", "Café"], ["cafe"]),
    "a sentence": ("It is raining", ["it is raining."], ["It is not raining"]),
    "a mixed number": ("1.5", [r"1\frac{1}{2}", r"$1\dfrac12$", "1 1/2", "3/2"], ["11/2", "1.1", r"\frac{1}{2}1"]),
    "a mixed number of the data set": (r"2\frac{3}{4}", ["2.75", "11/4", r"2 \frac34"], ["23/4", "2"]),
    "a quotient": ("11/2", [r"5\frac{1}{2}", "5.5"], [r"1\frac{1}{2}", r"1\frac12"]),
    "a quotient and a factor": ("1/23", [r"\frac{1}{23}"], [r"\frac{1}{2}3", r"\frac123"]),
    "numbers apart": ("12", [r"12\,"], [r"1\ 2", r"1\quad2", r"1\,2", "1{,}2"]),
    "thousands of LaTeX": ("1234567", [r"1{,}234{,}567", r"1\,234\,567", r"1,\!234,\!567"], [r"1{,}234{,}56"]),
    "a factorial": ("5!", ["5!", "5!."], ["5", "120!"]),
    "no factorial": ("120", ["120."], ["120!"]),
    "an exclamation": ("Paris", ["Paris!", "Paris!!"], ["Pari!"]),
    "a negative exponent": ("0.007", ["7e-3", "7×10^\u22123", r"7\cdot10^{-3}"], ["7e3", "7×10^3"]),
    "a range": ("10 - 20", ["10-20", "10\u201320", "10 \u2013 20"], ["1020", "10 -20", "-10", "20-10"]),
    "exponents stay": ("52", ["52"], ["5²", "5^2"]),
}


@pytest.mark.parametrize("shape", GRADED)
async def test_right_in_any_writing_earns_1_and_a_near_miss_0(runtime: FolderRuntime, shape: str) -> None:
    value, right, wrong = GRADED[shape]
    body = task_of({**QUESTION, "answer": value})
    assert {answer: await reward(runtime, body, answer) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: await reward(runtime, body, answer) for answer in wrong} == dict.fromkeys(wrong, 0.0)
    assert await reward(runtime, body, body["solution"]["answer"]) == 1.0
    assert await reward(runtime, body, "I do not know.") == 0.0


LEFT_OUT: dict[str, tuple[Any, str]] = {
    "null": (None, "is null"),
    "nan": (float("nan"), "is nan, no number"),
    "infinity": (float("-inf"), "is -inf, no number"),
    "a decimal nan": (Decimal("NaN"), "is NaN"),
    "empty": ("", "is empty"),
    "blank": (" \n\t", "is empty"),
    **{
        f"written {text}": (text, "stands for no answer")
        for text in ("nan", "NaN", "None", "N/A", "<NA>", "null", "<unk>")
    },
    "numinamath": ("proof", "stands for no answer"),
    "squad 2, unanswerable": ({"text": [], "answer_start": []}, "is an empty list"),
    "no list": ([], "is an empty list"),
    "a list of nulls": ([None, "", float("nan")], "is an empty list"),
    "several numbers": ([1, 2, 3], "one answer or several"),
    "several numbers as texts": (["2", "5"], "one answer or several"),
    "several letters": (["A", "C"], "one answer or several"),
    "votes that differ": (["yes", "no", "yes"], "one answer or several"),
    "an object as alias": ({"value": "a", "aliases": {"b": "c"}}, "is an object of 'b'"),
    "nothing behind the mark of gsm8k": ("48 / 2 = 24\n####", "is empty"),
    "several spans": ({"spans": ["a", "b"], "types": ["span", "span"]}, "one answer or several"),
    "several texts as JSON": ('["a", "b"]', "one answer or several"),
    "a list as Python writes it": ("['a']", "one answer or several"),
    "lists in a list": ([["a"], ["b"]], "a list of lists"),
    "an unknown object": ({"a": 1, "b": 2}, "is an object of 'a', 'b'"),
    "an object as text": ("{'text': ['a'], 'answer_start': [1]}", "is an object as Python writes it"),
    "an object as JSON": ('{"a": 1}', "is an object of 'a'"),
    "boxes": (r"\boxed{1} or \boxed{2}", "has several"),
    "an open box": (r"So \boxed{1", "not closed"),
    "a solution": ("First, we see.\nThen we are done.", "has several lines"),
    "nothing behind the mark": ("Because.\n#### N/A", "stands for no answer"),
    "a formula": (r"\frac{\sqrt{3}}{2}", "--preset math"),
    "bytes": (b"\xff\xd8", "is binary data"),
    "a duration": (timedelta(hours=1), "is a timedelta"),
}


@pytest.mark.parametrize("shape", LEFT_OUT)
def test_a_row_that_nothing_can_grade_is_left_out_by_its_column(shape: str) -> None:
    value, why = LEFT_OUT[shape]
    with pytest.raises(InvalidRequest) as caught:
        task_of({**QUESTION, "answer": value})
    assert caught.value.message.startswith("answer: ")
    assert why in caught.value.message


CHOICES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "mmlu": (
        {"choices": ["red", "green", "blue", "black"], "answer": 1},
        ["B", "b", "(B)", "B) green", "green"],
        ["A", "red", "1"],
    ),
    "arc": (
        {"choices": {"text": ["red", "green"], "label": ["A", "B"]}, "answer": "B"},
        ["B", "B.", "Green"],
        ["A", "red"],
    ),
    "arc with numbers": (
        {"choices": {"text": ["2", "1"], "label": ["1", "2"]}, "answer": "1"},
        ["A", "A) 2"],
        ["B", "1"],
    ),
    "commonsenseqa": (
        {"choices": [{"label": "A", "text": "ignore"}, {"label": "B", "text": "enforce"}], "answer": "A"},
        ["A", "ignore"],
        ["B"],
    ),
    "aqua": ({"options": ["A)21", "B)21.5", "C)22"], "answer": "B"}, ["B", "21.5"], ["A", "21", "22"]),
    "medqa": ({"options": {"A": "iron", "B": "zinc"}, "answer": "zinc"}, ["B", "zinc"], ["A", "iron"]),
    "mmlu-pro": ({"options": [f"c{n}" for n in range(10)], "answer": "I", "answer_index": 8}, ["I", "c8"], ["H", "8"]),
    "an index as text": ({"choices": ["up", "down", "left"], "answer": "2"}, ["C", "left"], ["2", "B"]),
    "articles": ({"choices": ["an", "a", "the"], "answer": 0}, ["A", "an", "(A)"], ["a", "B", "the"]),
    "an article": ({"choices": ["an", "a", "the"], "answer": "B"}, ["B", "b", "a"], ["A", "an"]),
    "numbers with an index": ({"choices": ["1", "2", "3"], "answer": 1}, ["B", "2"], ["1", "A"]),
    "filled up": ({"choices": ["up", "down", None, ""], "answer": "B"}, ["B", "down"], ["A", "up"]),
    "a struct filled up": ({"options": {"A": "up", "B": "down", "C": None}, "answer": 1}, ["B", "down"], ["A"]),
    "labels filled up": (
        {"choices": {"text": ["up", "down", float("nan")], "label": ["A", "B", "C"]}, "answer": "A"},
        ["A", "up"],
        ["B"],
    ),
    "a csv of numpy": ({"choices": "['up' 'down'\n 'left']", "answer": "up"}, ["A", "up"], ["down"]),
}


@pytest.mark.parametrize("shape", CHOICES)
async def test_a_choice_is_right_by_its_letter_and_by_its_text(runtime: FolderRuntime, shape: str) -> None:
    row, right, wrong = CHOICES[shape]
    body = task_of({"instruction": "Which?", **row})
    assert "\nA) " in body["instruction"], "an agent must see its choices"
    assert {answer: await reward(runtime, body, answer) for answer in right} == dict.fromkeys(right, 1.0)
    assert {answer: await reward(runtime, body, answer) for answer in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    ("choices", "answer"),
    [("['1' '2' '3' '4']", "1"), (["1", "2", "3"], "2"), (["0", "1", "2"][::-1], "0"), (["A", "T", "G", "C"], "C")],
)
def test_an_answer_that_may_be_two_choices_is_left_out(choices: Any, answer: str) -> None:
    """By its text, and by its place: one of the two would be paid wrongly."""
    with pytest.raises(RowUnsuitable, match=r"answer: '.' may be two of the choices"):
        task_of({"instruction": "Which?", "choices": choices, "answer": answer})


EMPTY = [None, "", " ", float("nan")]


@pytest.mark.parametrize("empty", EMPTY, ids=repr)
@pytest.mark.parametrize("answer", [0, 1, 2, 3, "0", "3", "A", "B", "c", "(D)", "up", "left", 2.0, ["C"]], ids=repr)
@pytest.mark.parametrize(
    "form",
    [
        lambda texts: texts,
        lambda texts: dict(zip("ABCD", texts, strict=True)),
        lambda texts: {"text": texts, "label": list("ABCD")},
        lambda texts: [{"label": label, "text": text} for label, text in zip("ABCD", texts, strict=True)],
    ],
    ids=["list", "struct", "columns", "structs"],
)
def test_a_row_with_an_empty_choice_before_others_is_left_out(form: Any, answer: Any, empty: Any) -> None:
    """Nobody knows whether its places were counted with the empty one."""
    with pytest.raises(InvalidRequest, match=r"choice 2 of 4 is empty"):
        task_of({"instruction": "Which?", "choices": form(["up", empty, "left", "right"]), "answer": answer})


@pytest.mark.parametrize(
    ("choices", "answer"),
    [(["up", "down", None], 2), (["up", None], "A"), (["up", "down", ""], "C"), ([None, "up", "down"], 0)],
)
def test_an_answer_that_names_an_empty_choice_is_left_out(choices: Any, answer: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"choice \d of \d is empty"):
        task_of({"instruction": "Which?", "choices": choices, "answer": answer})


@pytest.mark.parametrize("choices", ["['up', None, 'left']", "['up' nan 'left']", '["up", null, "left"]', 3])
def test_a_letter_beside_choices_that_cannot_be_read_is_left_out(choices: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"choices: is not a list of texts, and the answer 'C' is a letter"):
        task_of({"instruction": "Which?", "choices": choices, "answer": "C"})


def test_choices_that_the_question_shows_are_not_shown_twice() -> None:
    body = task_of({"instruction": "Red (A) or blue (B)?", "options": ["Red", "blue"], "answer": "B"})
    assert body["instruction"] == "Red (A) or blue (B)?"


def test_choices_that_stand_in_the_question_without_letters_are_shown_with_them() -> None:
    """Who is to answer by a letter must know it: numbers in a question are not its choices."""
    for question in ("Of 2, 3 and 5, how many are odd?", "Is it red or blue, A or B?", "2 (B) or 3 (A) or 5 (C)?"):
        body = task_of({"instruction": question, "options": ["2", "3", "5"], "answer": "A"})
        assert body["instruction"] == f"{question}\n\nA) 2\nB) 3\nC) 5"


GPQA = {
    "Question": "Which is odd? ",
    "Correct Answer": "3\n",
    "Incorrect Answer 1": "2",
    "Incorrect Answer 2": "A",
    "Incorrect Answer 3": "4",
}


async def test_rows_of_gpqa_show_their_answers_in_an_order_that_the_question_decides(runtime: FolderRuntime) -> None:
    mapping = {"instruction": "Question", "answer": "Correct Answer"}
    places = set[str]()
    for number in range(20):
        row = GPQA | {"Question": f"Which of {number} is odd?"}
        body, again = (task_of(row, **mapping) for _ in range(2))
        assert body == again
        letter = next(line[0] for line in body["instruction"].splitlines() if line.endswith(") 3"))
        places.add(letter)
        answers = [*"ABCD", "2", "3", "4"]
        rewards = {answer: await reward(runtime, body, answer) for answer in answers}
        assert rewards == dict.fromkeys(answers, 0.0) | {letter: 1.0, "3": 1.0}
    assert places == set("ABCD")


@pytest.mark.parametrize("answer", [7, "Z", None, ["A", "B"]])
def test_an_answer_that_is_none_of_the_named_choices_is_left_out(answer: Any) -> None:
    with pytest.raises(RowUnsuitable, match="choices: has no choice"):
        task_of({"instruction": "Which?", "options": ["x", "y"], "answer": answer}, choices="options")
    with pytest.raises(RowUnsuitable, match="choices: is null"):
        task_of({"instruction": "Which?", "options": None, "answer": "A"}, choices="options")


def test_a_number_beside_unrelated_options_is_an_open_question() -> None:
    body = task_of({**QUESTION, "options": ["fast", "slow"], "answer": 1234})
    assert body["evaluator"]["config"]["checks"][0]["value"] == "1234"


def rows_file(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("missing", [{"answer": None}, {}])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("mapping", [{}, {"answer": "answer"}])
def test_no_row_of_a_source_with_answers_pays_for_its_end(
    tmp_path: Path, missing: dict[str, Any], is_first: bool, mapping: dict[str, str]
) -> None:
    rows = [{**QUESTION, "answer": "2"}, {**QUESTION, **missing}]
    path = rows_file(tmp_path / "rows.jsonl", *(reversed(rows) if is_first else rows))
    found = list(read_source(path, Wanted(mapping=mapping)))
    (task,) = [one for one in found if isinstance(one, Imported)]
    (left,) = [one for one in found if isinstance(one, LeftOut)]
    assert "evaluator" in task.body
    assert left.why.startswith(f"{path}, row {1 if is_first else 2}: ")
    assert "answer" in left.why


def test_a_text_that_only_begins_like_an_object_ends_no_import(tmp_path: Path) -> None:
    row = {**QUESTION, "answer": "2"}
    path = rows_file(tmp_path / "rows.jsonl", {**row, "meta": "{x"}, {**row, "meta": '{"x": "a"}'}, {**row, "meta": 3})
    assert [type(one) for one in read_source(path, Wanted(filters=("meta.x=a",)))] == [Imported]
    swe = {"problem_statement": "p", "docker_image": "i"}
    path = rows_file(tmp_path / "swe.jsonl", {**swe, "instance": "{x"}, {**swe, "instance": "{y"})
    with pytest.raises(InvalidRequest, match=r"row 1: .*row 2: "):
        list(read_source(path, Wanted()))


@pytest.mark.parametrize("about", ["[]", '{"info": null}', '{"info": {"features": []}}'])
def test_what_is_not_said_of_the_columns_is_not_needed(tmp_path: Path, about: str) -> None:
    need_module("pyarrow", "pip install 'gangline[parquet]'")
    import pyarrow as arrow
    from pyarrow import parquet

    table = arrow.table({**{name: [value] for name, value in QUESTION.items()}, "answer": [2]})
    parquet.write_table(table.replace_schema_metadata({b"huggingface": about.encode()}), tmp_path / "rows.parquet")
    assert [type(one) for one in read_source(tmp_path / "rows.parquet", Wanted())] == [Imported]


def test_a_source_without_any_answer_is_imported_with_a_note(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", QUESTION, QUESTION)
    found = [one for one in read_source(path, Wanted()) if isinstance(one, Imported)]
    assert [one.notes[0].split(":")[0] for one in found] == ["without an answer a session earns 1 for its end"] * 2


def test_a_verl_row_needs_only_its_mapping(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": 2},
    }
    path = rows_file(tmp_path / "rows.jsonl", row)
    mapping = {"instruction": "prompt", "answer": "reward_model.ground_truth"}
    (one,) = read_source(path, Wanted(mapping=mapping))
    assert isinstance(one, Imported)
    assert one.body["instruction"] == "Be brief.\n\n1+1?"
    assert one.body["evaluator"]["config"]["checks"] == [{"kind": "answer", "value": "2"}]


MATH: dict[str, tuple[Any, list[str], list[str]]] = {
    "deepscaler": (r"-\frac{2}{3}", [r"-\frac{2}{3}", "-2/3"], [r"\frac{2}{3}", "-2"]),
    "gsm8k": ("2 * 3 = 6.\n#### 1,234", ["1234", "1,234"], ["6", "12"]),
    "math": (r"So $\boxed{\frac{1}{2}}$", ["0.5", r"\frac12"], ["5", "2"]),
    "an int": (42, ["42", "42.0"], ["4", "24"]),
    "a float": (2.0, ["2", "2.0"], ["20"]),
    "several": (["1/2", "one half"], ["0.5"], ["0.2"]),
    "skywork": ('["34"]', ["34"], ["3"]),
    "math-500": (r"\left( 3, \frac{\pi}{2} \right)", [r"(3, \pi/2)"], [r"(3, \pi)"]),
    "a matrix on lines": ("\\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}", [r"\begin{pmatrix}1\\2\end{pmatrix}"], ["1"]),
}


@pytest.mark.parametrize("is_verl", [False, True])
@pytest.mark.parametrize("shape", MATH)
def test_the_math_preset_reads_the_same_shapes(shape: str, is_verl: bool) -> None:
    need_module("math_verify", "pip install 'gangline[math]'")
    from gangline.grading.math.comparing import prepare, work

    value, right, wrong = MATH[shape]
    preset = find_preset("math")
    assert preset is not None
    verl = {"prompt": [{"role": "user", "content": "?"}], "reward_model": {"style": "rule", "ground_truth": value}}
    config = preset.task(verl if is_verl else {"problem": "?", "answer": value})["evaluator"]["config"]
    golds = config["answer"] if isinstance(config["answer"], list) else [config["answer"]]
    verdicts: dict[str, bool] = {}
    for text in (*right, *wrong):
        job: dict[str, Any] = {
            "golds": golds,
            "text": f"$\\boxed{{{text}}}$",
            "only_boxed": True,
            "choices": [],
            "rules": {},
        }
        verdicts[text] = work(prepare(job))["correct"]
    assert verdicts == {**dict.fromkeys(right, True), **dict.fromkeys(wrong, False)}


@pytest.mark.parametrize("name", ["math", "stem"])
@pytest.mark.parametrize("value", [None, "", "N/A", [], {"a": 1}, [1, 2], "unknown"])
def test_presets_leave_out_what_they_cannot_grade(tmp_path: Path, name: str, value: Any) -> None:
    good = {"problem": "1+1?", "answer": "2"}
    path = rows_file(tmp_path / "rows.jsonl", good, {**good, "answer": value}, good)
    kinds = [type(one) for one in read_source(path, Wanted(preset=find_preset(name)))]
    assert kinds == [Imported, LeftOut, Imported]


CODE: dict[str, Any] = {
    "apps": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}),
    "taco, an object": {"inputs": ["1\n"], "outputs": ["2\n"]},
    "codecontests": {"input": ["1\n"], "output": ["2\n"]},
    "livecodebench": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
}


@pytest.mark.parametrize("shape", CODE)
def test_the_code_preset_reads_tests_as_they_are_published(tmp_path: Path, shape: str) -> None:
    path = rows_file(tmp_path / "rows.jsonl", {"q": "Double it.", "tests": CODE[shape]})
    wanted = Wanted(preset=find_preset("code"), mapping={"instruction": "q", "answer": "tests"})
    (one,) = read_source(path, wanted)
    assert isinstance(one, Imported), one
    assert one.body["evaluator"]["config"]["cases"] == [{"input": "1\n", "output": "2\n"}]


@pytest.mark.parametrize(
    "tests",
    [["assert f(1) == 2"], "assert f(1) == 2", [{"input": "1", "output": "2", "testtype": "functional"}], None, 3],
)
def test_tests_that_no_case_can_be_made_of_are_left_out(tmp_path: Path, tests: Any) -> None:
    good = {"q": "Double it.", "tests": CODE["apps"]}
    path = rows_file(tmp_path / "rows.jsonl", good, {**good, "tests": tests})
    wanted = Wanted(preset=find_preset("code"), mapping={"instruction": "q", "answer": "tests"})
    _, left = read_source(path, wanted)
    assert isinstance(left, LeftOut)
    assert "row 2" in left.why
    assert "reward_model" in left.why


NUMBERS = st.integers(-(10**12), 10**12) | st.decimals(-10000, 10000, places=3, allow_nan=False)


@given(
    NUMBERS,
    st.sampled_from(["{}", "{:,}", " {} ", "**{}**", "${}$", "The answer is {}.", r"\boxed{{{}}}", "`{}`", "+{}"]),
)
def test_a_number_is_itself_in_any_writing(number: int | Decimal, writing: str) -> None:
    if number < 0:
        writing = writing.replace("+", "")
    assert is_same_value(str(number), writing.format(number))


@given(NUMBERS, NUMBERS)
def test_different_numbers_are_different(one: int | Decimal, other: int | Decimal) -> None:
    assert is_same_value(str(one), str(other)) == (one == other)


@settings(max_examples=300)
@given(st.text(max_size=60), st.text(max_size=60))
def test_any_two_texts_can_be_compared(one: str, other: str) -> None:
    assert is_same_value(one, one)
    assert is_same_value(one, other) in (True, False)


@pytest.mark.parametrize("text", ["9e999999999", "1/" * 400, "(" * 900, "1e400/1e400", "{" * 5000, "9" * 10**6])
def test_a_huge_answer_costs_nothing(text: str) -> None:
    assert not is_same_value("42", text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates() | st.decimals(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    )
)
def test_any_value_gives_right_answers_or_is_unsuitable_by_its_column(value: Any) -> None:
    try:
        found = answers_of(value, "labels.final")
    except RowUnsuitable as error:
        is_named = error.message.startswith("labels.final: ")
    else:
        is_named = bool(found) and all(one.strip() and "\n" not in one for one in found)
    assert is_named
