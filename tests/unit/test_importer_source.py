"""The one entry for tasks from elsewhere: formats, splits, filters, mappings, and the errors that name a row."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.cli.tasks.files import validated
from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.imported import Choices, Imported
from gangline.tasks.importers.plain.mapping import mapped
from gangline.tasks.importers.source import Wanted, read_source
from gangline.tasks.presets.preset import Preset, find_preset
from support.requirements import need_module
from support.service.field_tasks import HARBOR_TOML, harbor_task, write


def rows_file(path: Path, *rows: Mapping[str, Any]) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def preset(name: str) -> Preset:
    found = find_preset(name)
    assert found is not None
    return found


def bodies(path: Path, **how: Any) -> list[dict[str, Any]]:
    found = [one.body for one in read_source(path, Wanted(**how)) if isinstance(one, Imported)]
    for body in found:
        validated({**body, "agent": {"harness": "pi"}}, "x")
    return found


def names(path: Path, **how: Any) -> list[str]:
    return [one.name for one in read_source(path, Wanted(**how)) if isinstance(one, Imported)]


PLAIN = {"question": "What is 6 * 7?", "labels": {"final": "42"}, "level": 3}


def test_a_plain_dataset_becomes_tasks_by_its_mapping(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", PLAIN)
    (body,) = bodies(path, mapping={"instruction": "question", "answer": "labels.final"})
    assert body["instruction"] == "What is 6 * 7?"
    assert body["evaluator"]["config"]["checks"] == [{"kind": "answer", "value": "42"}]
    assert body["solution"] == {"answer": "42"}
    assert body["metadata"] == {"source": "rows", "task": "rows-00001", "instance": PLAIN}


@pytest.mark.skipif(importlib.util.find_spec("inspect_ai") is not None, reason="does not apply: Inspect is here")
def test_inspects_tasks_need_an_environment_with_inspect() -> None:
    with pytest.raises(InvalidRequest, match="--python"):
        bodies(Path("inspect:tasks.py@addition"))


def test_options_for_rows_are_refused_for_inspects_tasks() -> None:
    with pytest.raises(InvalidRequest, match="--split"):
        bodies(Path("inspect:tasks.py@addition"), split="train")


def test_files_and_image_of_a_row_are_its_place(tmp_path: Path) -> None:
    row = {"instruction": "go", "data": {"a.txt": "1", "of/another/row": None}, "container": "me/image:1"}
    path = rows_file(tmp_path / "rows.jsonl", row, {**row, "data": [{"path": "b", "content": "2"}]})
    first, second = bodies(path, mapping={"files": "data", "image": "container"})
    written = {"type": "write", "path": "a.txt", "content": "1"}
    assert first["runtime"] == {"prepare": [written], "image": "me/image:1", "backend": "docker"}
    assert second["runtime"]["prepare"] == [{"type": "write", "path": "b", "content": "2"}]
    chosen = bodies(path, mapping={"files": "data"}, choices=Choices(runtime="podman", image="my/own:2"))[0]
    assert (chosen["runtime"]["backend"], chosen["runtime"]["image"]) == ("podman", "my/own:2")


@pytest.mark.parametrize(
    ("name", "row", "mapping"),
    [
        ("math", {"q": "What is $6 \\cdot 7$?", "solution": "42"}, {"instruction": "q", "answer": "solution"}),
        ("math", {"prompt": "1+1?", "solution": 2}, {"instruction": "prompt", "answer": "solution"}),
        ("stem", {"q": "Boiling point?", "a": "100"}, {"instruction": "q", "answer": "a"}),
        (
            "code",
            {"q": "Double it.", "tests": {"inputs": ["1\n"], "outputs": ["2\n"]}},
            {"instruction": "q", "answer": "tests"},
        ),
    ],
)
def test_a_preset_takes_the_rows_of_another_dataset(
    tmp_path: Path, name: str, row: dict[str, Any], mapping: dict[str, str]
) -> None:
    (body,) = bodies(rows_file(tmp_path / "rows.jsonl", row), preset=preset(name), mapping=mapping)
    assert str(row[mapping["instruction"]]) in body["instruction"]
    assert body["metadata"]["instance"] == row, "the row as it was, not as it was mapped"
    if name != "code":
        assert body["solution"] == {"answer": f"\\boxed{{{row[mapping['answer']]}}}"}


@given(st.dictionaries(st.text(min_size=1), st.none() | st.integers() | st.text(), min_size=1), st.data())
def test_a_mapping_adds_columns_and_changes_none(row: dict[str, Any], data: st.DataObject) -> None:
    column = data.draw(st.sampled_from(sorted(row)))
    found = mapped(row, {"answer": column})
    assert found == {**row, "answer": row[column]}


def test_splits_of_a_hugging_face_folder(tmp_path: Path) -> None:
    need_module("pyarrow", "pip install 'gangline[parquet]'")
    import pyarrow
    from pyarrow import ipc, parquet

    hub, saved, plain = tmp_path / "hub", tmp_path / "saved", tmp_path / "plain"
    write(hub / "dataset_infos.json", "{}")
    for number, split in enumerate(("train", "train", "test")):
        table = cast("Any", pyarrow.Table.from_pylist)([{"id": f"{split}-{number}", "instruction": "go"}])
        (hub / "data").mkdir(exist_ok=True)
        parquet.write_table(table, hub / "data" / f"{split}-0000{number}-of-00002.parquet")
        (saved / split).mkdir(parents=True, exist_ok=True)
        with (
            (saved / split / f"data-0000{number}-of-00002.arrow").open("wb") as file,
            cast("Any", ipc.new_stream(file, table.schema)) as stream,
        ):
            stream.write_table(table)
    write(saved / "train" / "state.json", "{}")
    write(saved / "dataset_dict.json", "{}")
    rows_file(plain / "train.jsonl", {"id": "train-0", "instruction": "go"})
    for folder in (hub, saved):
        assert names(folder, split="train") == ["train-0", "train-1"]
        assert names(folder, split="test") == ["test-2"]
        with pytest.raises(InvalidRequest, match="has the splits test, train: choose one with --split"):
            names(folder)
        with pytest.raises(InvalidRequest, match=r"--split dev: .* has test, train"):
            names(folder, split="dev")
    assert names(plain) == names(plain, split="train") == ["train-0"]
    with pytest.raises(InvalidRequest, match="is one file"):
        names(plain / "train.jsonl", split="train")


def test_filters_and_limits(tmp_path: Path) -> None:
    rows = [{"id": f"{repo}-{n}", "repo": repo, "instruction": "go"} for n in range(3) for repo in ("a/x", "b/y")]
    path = rows_file(tmp_path / "rows.jsonl", *rows)
    assert names(path, filters=("repo=a/*",)) == ["a/x-0", "a/x-1", "a/x-2"]
    assert names(path, filters=("repo=a/*", "*-[12]")) == ["a/x-1", "a/x-2"]
    assert names(path, limit=2) == ["a/x-0", "b/y-0"]
    with pytest.raises(InvalidRequest, match="holds no task that matches 'repo=c' and 'z'"):
        names(path, filters=("repo=c", "z"))


def test_a_limit_counts_tasks_and_not_rows_that_are_left_out(tmp_path: Path) -> None:
    row = {"problem": "1+1?", "matched_solution": "unknown"}
    path = rows_file(tmp_path / "rows.jsonl", row, {**row, "answer": "2"}, {**row, "answer": "2"})
    first, second = read_source(path, Wanted(preset=preset("stem"), limit=1))
    assert isinstance(second, Imported)
    assert "row 1: matched_solution" in str(first)


def test_a_folder_of_tasks_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name, level in (("b", "easy"), ("a", "hard"), ("c", "hard")):
        toml = HARBOR_TOML.replace("kennel/count-bytes", f"kennel/{name}").replace("easy", level)
        harbor_task(tmp_path / name, toml)
    (tmp_path / "no-task").mkdir()
    assert names(tmp_path) == ["kennel/a", "kennel/b", "kennel/c"]
    assert names(tmp_path, filters=("[bc]",)) == ["kennel/b", "kennel/c"]
    assert names(tmp_path, filters=("metadata.difficulty=hard",), limit=1) == ["kennel/a"]
    assert names(tmp_path / "b") == ["kennel/b"]


@pytest.mark.parametrize(
    ("path", "how", "told"),
    [
        ("nowhere", {}, "no such file or folder"),
        (".", {}, "holds neither tasks nor a file of rows"),
        ("tasks", {"filters": ("x*",)}, r"holds no task that matches 'x\*'"),
        ("tasks", {"format": "terminal-bench"}, "holds no task"),
        ("tasks", {"split": "train"}, "--split, --preset and --map are for rows"),
        ("tasks/one/task.toml", {"format": "harbor"}, "is not a folder"),
        ("tasks/one/task.toml", {}, "task.toml, line 2 is not JSON.*Rows are read from JSON lines, JSON, CSV"),
        ("list.jsonl", {}, "row 1: is not an object"),
        ("list.jsonl", {"format": "rows"}, "row 1: is not an object"),
        ("rows.jsonl", {}, "row 1: is of no known format.*the columns are labels, level, question"),
        ("rows.jsonl", {"format": "rows"}, "row 1: instruction: is not text, or empty"),
        ("rows.jsonl", {"mapping": {"instruction": "labels.last"}}, "row 1: has no column 'labels.last'"),
        ("rows.jsonl", {"mapping": {"instruction": "question", "files": "level"}}, "row 1: files: is neither"),
    ],
)
def test_an_error_names_file_row_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, how: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    harbor_task(tmp_path / "tasks" / "one")
    harbor_task(tmp_path / "none" / "one")
    (tmp_path / "empty").mkdir()
    rows_file(tmp_path / "rows.jsonl", PLAIN)
    write(tmp_path / "list.jsonl", "[1]\n")
    with pytest.raises(InvalidRequest, match=told):
        names(tmp_path / "empty" if path == "." else Path(path), **how)
