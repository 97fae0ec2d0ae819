"""Files of rows as other programs write them: what cannot be read is named by file, row, column; the rest is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading import csv_rows, lines
from gangline.machine.reading.imported import Imported, LeftOut
from gangline.tasks.importers.source import Wanted, read_rows, read_source
from support.requirements import need_module

MAPPING = {"instruction": "question", "answer": "answer"}
HUGE = "x" * 300_000


def answers(path: Path) -> list[str]:
    """The right answer of each task; `left out: WHY` for a row without one."""
    found: list[str] = []
    for one in read_source(path, Wanted(mapping=MAPPING)):
        if isinstance(one, LeftOut):
            found.append(f"left out: {one.why.removeprefix(str(path))}")
        else:
            found.append(one.body["evaluator"]["config"]["checks"][0]["value"])
    return found


CSV: dict[str, tuple[str, bytes, list[str]]] = {
    "plain": ("a.csv", b"question,answer\n1+1?,2\nWho?,Ada\n", ["2", "Ada"]),
    "a byte order mark": ("a.csv", b"\xef\xbb\xbfquestion,answer\r\n1+1?,2\r\n", ["2"]),
    "of Excel in Europe": ("a.csv", b"question;answer\n1+1?;2\nHow much?;2,5\n", ["2", "2,5"]),
    "of Excel in Unicode": ("a.csv", "question\tanswer\n1+1?\té\n".encode("utf-16"), ["é"]),
    "bars": ("a.csv", b"question|answer\n1, 2, 3?|4\n", ["4"]),
    "tabs": ("a.tsv", b"question\tanswer\nOne, two?\t3\n", ["3"]),
    "capitals in the name": ("A.CSV", b"question,answer\n1+1?,2\n", ["2"]),
    "quoted newlines": ("a.csv", b'question,answer\n"One\ntwo, ""three""?",4\n"5?",6\n', ["4", "6"]),
    "blank lines": ("a.csv", b"\n\nquestion,answer\n\n1+1?,2\n\n", ["2"]),
    "blanks around names": ("a.csv", b" question , answer \n1+1?,2\n", ["2"]),
    "an index of pandas": ("a.csv", b",question,answer\n0,1+1?,2\n", ["2"]),
    "commas at the end": ("a.csv", b"question,answer,,\n1+1?,2,,\n", ["2"]),
    "commas at the ends of rows": ("a.csv", b"question,answer\n1+1?,2,,\n", ["2"]),
    "a huge field": ("a.csv", f"question,answer\n{HUGE},2\n".encode(), ["2"]),
    "carriage returns": ("a.csv", b"question,answer\r1+1?,2\r", ["2"]),
    "an empty answer": (
        "a.csv",
        b"question,answer\n1+1?,2\nWho?,\nWho?,nan\n",
        ["2", "left out: , row 2 (line 3): answer: is null", "left out: , row 3 (line 4): answer: is 'nan'"],
    ),
    "a separator that is stated": (
        "a.csv",
        b"sep=;\nquestion;answer\n1, 2?;3\nWho?\n",
        ["3", "left out: , row 2 (line 4)"],
    ),
    "a line behind blank ones": ("a.csv", b"\n\nquestion,answer\nWho?\n1+1?,2\n", ["left out: , row 1 (line 4)", "2"]),
    "a row too short": (
        "a.csv",
        b"question,answer\nWho?\n1+1?,2\n",
        ["left out: , row 1 (line 2): has 1 fields, and the header names 2", "2"],
    ),
    "a row too long": (
        "a.csv",
        b"question,answer\n1, 2 or 3?,2\n1+1?,2\n",
        ["left out: , row 1 (line 2): has 3 fields, and the header names 2", "2"],
    ),
    "a line behind a quoted newline": (
        "a.csv",
        b'question,answer\n"a\nb",1\nWho?\n',
        ["1", "left out: , row 2 (line 4): has 1 fields"],
    ),
    "latin-1": (
        "a.csv",
        "question,answer\nWer?,Müller\n1+1?,2\n".encode("latin-1"),
        ["left out: , row 1 (line 2): answer: is not UTF-8 (byte 0xfc): save the file as UTF-8", "2"],
    ),
    "text behind a quote": (
        "a.csv",
        b'question,answer\n"Who" is it?,Ada\n1+1?,2\n',
        ["left out: , row 1 (line 2): is not a CSV", "2"],
    ),
    "an open quote": (
        "a.csv",
        b'question,answer\n1+1?,2\n"Who?,Ada\n2+2?,4\n',
        ["2", "left out: , row 2 (line 3): has a quote that is never closed: nothing behind it could be read"],
    ),
}


@pytest.mark.parametrize("shape", CSV)
def test_csv_is_read_and_a_wrong_row_is_named(tmp_path: Path, shape: str) -> None:
    name, content, wanted = CSV[shape]
    path = tmp_path / name
    path.write_bytes(content)
    found = answers(path)
    assert len(found) == len(wanted)
    assert all(one.startswith(other) for one, other in zip(found, wanted, strict=True)), found


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"question,answer,answer\n1,2,3\n", "two columns are called 'answer'"),
        ("a.csv", b"question,answer\n", "holds no task"),
        ("a.csv", b"PK\x03\x04\0\0", "is not text. Rows are read from JSON lines, JSON, CSV"),
        ("a.xlsx", b"PK\x03\x04\0\0", "is not text. Rows are read from JSON lines, JSON, CSV"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\0\0\0", "is not text"),
        ("a.txt", b"question,answer\n1,2\n", "a.txt, line 1 is not JSON: .*CSV"),
        ("a.json", b'{"question": "?"', "a.json is not JSON"),
        ("a.json", b"[" * 100_000, "a.json is not JSON: it is nested more than 100 deep"),
        ("a.jsonl", b'{"question": "?"}\n', "row 1: has no column 'answer'; it has question"),
        ("a.csv", b"frage,antwort\n1,2\n", "row 1.*: has no column 'question'; it has frage, antwort"),
    ],
)
def test_a_file_that_holds_no_row_is_refused(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=told):
        answers(path)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "a.csv",
            'question,answer\n1+1?,2\n"Who?\n' + "is it?\n" * 20,
            "a.csv, line 14: is a row of more than 80 char",
        ),
        ("a.csv", "question,answer\n1+1?," + "2" * 80, "a.csv, line 2: is longer than 80 characters"),
        ("a.tsv", "question\tanswer" * 10, "a.tsv, line 1: is longer than 80 characters"),
        ("a.jsonl", '{"question": "?", "answer": "2"}\n' + " " * 81, "a.jsonl, line 2: is longer than 80 characters"),
    ],
)
def test_a_row_longer_than_a_task_may_be_ends_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, told: str
) -> None:
    for module in (lines, csv_rows):
        monkeypatch.setattr(module, "MAX_LINE_CHARS", 80)
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidRequest, match=told):
        answers(tmp_path / name)


def test_many_columns_take_no_time(tmp_path: Path) -> None:
    header = ",".join(f"c{number}" for number in range(200_000))
    (tmp_path / "a.csv").write_text(f"question,answer,{header}\n1+1?,2{',' * 200_000}\n")
    assert len(list(read_rows(tmp_path / "a.csv"))) == 1
    (tmp_path / "a.csv").write_text(f"question,answer,{header},answer\n")
    with pytest.raises(InvalidRequest, match="two columns are called 'answer'"):
        answers(tmp_path / "a.csv")


GOOD = '{"question": "1+1?", "answer": "2"}'
LINES: dict[str, tuple[str, list[str]]] = {
    "a byte order mark": (f"\ufeff{GOOD}\n", ["2"]),
    "blank lines": (f"\n{GOOD}\n\n \n{GOOD}", ["2", "2"]),
    "a list in a file of lines": (f"[{GOOD},\n{GOOD}]", ["2", "2"]),
    "a list on lines": (f"[\n  {GOOD},\n  {GOOD}\n]\n", ["2", "2"]),
    "a broken line": (f'{GOOD}\n{{"question": \n{GOOD}', ["2", "left out: , row 2: is not JSON", "2"]),
    "a broken line behind a blank": (f"{GOOD}\n\n{{\n", ["2", "left out: , row 2 (line 3): is not JSON"]),
    "NaN": (f'{GOOD}\n{{"question": "?", "answer": NaN}}', ["2", "left out: , row 2: answer: is nan"]),
    "NaN elsewhere": ('{"question": "?", "answer": 2, "level": NaN}', ["2"]),
    "no objects": (f'3\n{GOOD}\n"x"\n[1]', [*["left out: , row 1: is not an object", "2"], *["left out: , row "] * 2]),
    "half of a character": (
        f'{{"question": "\\ud83d?", "answer": "2"}}\n{GOOD}\n{{"question": "?", "answer": "\\udc00"}}',
        [
            "left out: , row 1: question: has half of a character (the lone surrogate U+D83D)",
            "2",
            "left out: , row 3: answer: has half of a character (the lone surrogate U+DC00)",
        ],
    ),
    "half of a character in a list": (
        f'{{"question": "?", "answer": "2", "tags": [{{"x": "\\ud83d"}}]}}\n{GOOD}',
        ["left out: , row 1: tags: has half", "2"],
    ),
    "half of a character in a name": (f'{{"\\ud83d": 1, "question": "?"}}\n{GOOD}', ["left out: , row 1", "2"]),
    "a whole character": ('{"question": "\\ud83d\\ude00?", "answer": "\\ud83d\\ude00"}', ["😀"]),
    "a column twice": (
        f'{{"answer": 1, "answer": 2}}\n{GOOD}',
        ["left out: , row 1: is not JSON: an object has the key 'answer' twice", "2"],
    ),
    "100,000 lists": (
        "[" * 100_000 + f"\n{GOOD}",
        ["left out: , row 1: is not JSON: it is nested more than 100 deep", "2"],
    ),
    "101 lists": (
        f'{{"answer": {"[" * 101}{"]" * 101}}}\n{GOOD}',
        ["left out: , row 1: is nested more than 100 deep", "2"],
    ),
    "lists in a file of lines": (f"[{GOOD}]\n{GOOD}", ["left out: , row 1: is not an object", "2"]),
    "a number without end": (f'{{"question": "?", "answer": {"9" * 5000}}}\n{GOOD}', ["left out: , row 1: ", "2"]),
    "a big number": (f'{{"question": "?", "answer": {10**40}}}', [str(10**40)]),
    "broken JSON within": (
        f'{{"question": "?", "answer": "2", "files": "{{"}}\n{GOOD}',
        ["left out: , row 1: files: is not valid JSON", "2"],
    ),
}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson"])
@pytest.mark.parametrize("shape", LINES)
def test_lines_of_json_are_read_and_a_wrong_one_is_named(tmp_path: Path, shape: str, name: str) -> None:
    text, wanted = LINES[shape]
    path = tmp_path / name
    path.write_bytes(text.encode())
    found = answers(path)
    assert len(found) == len(wanted), found
    assert all(one.startswith(other) for one, other in zip(found, wanted, strict=True)), found


def test_json_may_be_a_list_an_object_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for text in (f"[{GOOD}]", GOOD, f"{GOOD}\n{GOOD}\n", f"\ufeff[{GOOD}]"):
        path.write_text(text)
        assert set(answers(path)) == {"2"}


def test_a_byte_that_is_no_utf_8_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "?", "answer": "M\xfcller"}\n' + GOOD.encode())
    assert answers(path) == ["left out: , row 1: answer: is not UTF-8 (byte 0xfc): save the file as UTF-8", "2"]


def test_a_path_into_broken_json_names_the_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "?", "labels": "{\\"final\\": "}\n{"question": "?", "labels": "{\\"final\\": 2}"}')
    mapping = {"instruction": "question", "answer": "labels.final"}
    left, one = read_source(path, Wanted(mapping=mapping))
    assert isinstance(left, LeftOut)
    assert "row 1: labels.final: is not valid JSON" in left.why
    assert isinstance(one, Imported)


def arrow() -> Any:
    need_module("pyarrow", "pip install 'gangline[parquet]'")
    import pyarrow

    return pyarrow


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    from pyarrow import parquet

    cast("Any", parquet).write_table(arrow().table(columns), path)
    return path


def test_parquet_columns_of_every_type_are_answers_or_named(tmp_path: Path) -> None:
    pa = arrow()
    columns: dict[str, tuple[Any, Any, str]] = {
        "int8": (pa.int8(), 7, "7"),
        "uint64": (pa.uint64(), 2**64 - 1, str(2**64 - 1)),
        "float32": (pa.float32(), 0.1, "0.10000000149011612"),
        "float64": (pa.float64(), 2.0, "2"),
        "decimal": (pa.decimal128(10, 2), Decimal("12.50"), "12.5"),
        "bool": (pa.bool_(), True, "True"),
        "date": (pa.date32(), date(2020, 1, 2), "2020-01-02"),
        "timestamp": (pa.timestamp("ns"), 0, "1970-01-01T00:00:00"),
        "far": (pa.timestamp("ms"), 2**55, "left out: , row 1: answer: cannot be read"),
        "duration": (pa.duration("ns"), 1, "left out: , row 1: answer: is a Timedelta"),
        "list": (pa.list_(pa.string()), ["Ada", "Ada Lovelace"], "Ada"),
        "struct": (pa.struct({"text": pa.list_(pa.string())}), {"text": ["Ada"]}, "Ada"),
        "dictionary": (pa.dictionary(pa.int8(), pa.string()), "Ada", "Ada"),
        "large": (pa.large_string(), "Ada", "Ada"),
        "binary": (pa.binary(), b"Ada", "left out: , row 1: answer: is binary data"),
        "null": (pa.null(), None, "left out: , row 1: answer: is null"),
    }
    for name, (kind, value, wanted) in columns.items():
        given = pa.array([value]).dictionary_encode() if name == "dictionary" else pa.array([value, None], kind)[:1]
        values = pa.concat_arrays([given, given])
        path = write_parquet(tmp_path / f"{name}.parquet", {"question": ["?", "?"], "answer": values})
        try:
            found = answers(path)
        except InvalidRequest as error:
            found = [f"left out: {error.message.removeprefix(str(path))}"]
        assert found[0].startswith(wanted), (name, found)


def test_text_in_parquet_that_is_no_utf_8_costs_its_row_alone(tmp_path: Path) -> None:
    pa = arrow()
    texts = pa.array([b"Ada", b"M\xfcller", b"Bob"]).view(pa.string())
    path = write_parquet(tmp_path / "rows.parquet", {"question": ["?", "?", "?"], "answer": texts})
    first, second, third = answers(path)
    assert (first, third) == ("Ada", "Bob")
    assert second.startswith("left out: , row 2: answer: cannot be read: 'utf-8' codec")


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pa = arrow()
    from pyarrow import parquet

    table = pa.Table.from_arrays([pa.array(["?"]), pa.array(["2"]), pa.array(["3"])], ["question", "answer", "answer"])
    cast("Any", parquet).write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(InvalidRequest, match="'answer'"):
        answers(tmp_path / "rows.parquet")


def test_pandas_own_files_are_read(tmp_path: Path) -> None:
    need_module("pandas", "pip install pandas")
    arrow()
    import pandas as pd

    frame: Any = pd.DataFrame({"question": ["1+1?", "Who?", "When?"], "answer": [2, None, 1066]})
    frame.to_parquet(tmp_path / "rows.parquet")
    frame.to_csv(tmp_path / "rows.csv")
    frame.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    frame.to_json(tmp_path / "rows.json", orient="records")
    for name in ("rows.parquet", "rows.csv", "rows.jsonl", "rows.json"):
        first, second, third = answers(tmp_path / name)
        assert (float(first), float(third)) == (2, 1066)
        assert second.startswith("left out: , row 2"), name
        assert "answer: is " in second


def test_class_labels_of_datasets_are_their_names(tmp_path: Path) -> None:
    need_module("datasets", "pip install datasets")
    arrow()
    from datasets import ClassLabel, Dataset, Features, Value

    features: Any = Features({"question": Value("string"), "answer": ClassLabel(names=["negative", "positive"])})
    made = cast("Any", Dataset).from_dict({"question": ["a", "b", "c"], "answer": [1, 0, -1]}, features=features)
    made.to_parquet(str(tmp_path / "rows.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "rows.parquet", tmp_path / "saved"):
        first, second, third = answers(path)
        assert (first, second) == ("positive", "negative")
        assert "row 3: answer: is null" in third


def test_a_folder_of_csv_has_splits_and_other_data_comes_first(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text(f"id,instruction,answer\n{name}-1,?,2\n")
    (one,) = read_source(tmp_path, Wanted(split="test"))
    assert isinstance(one, Imported)
    assert one.name == "test-1"
    (tmp_path / "train.jsonl").write_text('{"id": "line", "instruction": "?", "answer": "2"}\n')
    (one,) = read_source(tmp_path, Wanted())
    assert isinstance(one, Imported)
    assert one.name == "line", "tables alongside data are mostly about it"


@given(
    rows=st.lists(st.tuples(*[st.text(st.characters(exclude_categories=("Cs", "Cc"))) for _ in range(2)]), min_size=1)
)
def test_what_a_csv_writer_wrote_comes_back(
    rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    import csv

    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([("question", "answer"), *rows])
    found = [row for _, row in read_rows(path)]
    assert found == [{"question": one or None, "answer": other or None} for one, other in rows]


@given(st.binary(max_size=300), st.sampled_from([".csv", ".tsv", ".jsonl", ".json", ".parquet", ".arrow"]))
def test_any_bytes_are_rows_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes, end: str) -> None:
    path = tmp_path_factory.mktemp("any") / f"rows{end}"
    path.write_bytes(content)
    read: Callable[[], list[Any]] = lambda: list(read_source(path, Wanted(mapping=MAPPING)))  # noqa: E731
    with pytest.raises(InvalidRequest, match=r"."):
        read()


def test_the_texts_of_an_error_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"\ud83d": "\ud83d", "question": "\ud83d"}) + "\n" + GOOD)
    left, _ = read_source(path, Wanted(mapping=MAPPING))
    assert isinstance(left, LeftOut)
    assert left.why.encode()
