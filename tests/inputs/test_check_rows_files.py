"""Files that `gangline check-rows` is given: those of every exporter of ours, folders, tables of unknown columns, and
rows with faults that need neither a tokenizer nor a model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from gangline.cli.main import build_app
from gangline.cli.results.export_options import RowFormat
from gangline.domain.errors import InvalidRequest
from gangline.tasks.check_rows.check import check_records
from gangline.tasks.check_rows.rules import Vocabulary
from gangline.tasks.datasets.kinds import Kind
from support.dumps import CLEAN, EOS, conversation
from support.store.recorded import session, task, write_data

WITHOUT_TOKENS = {"messages", "preferences", "verdicts"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tasks = [task(f"t-{number}", repo="a") for number in range(3)]
    sessions = [session(str(one.task_id), number, float(number % 2)) for one in tasks for number in range(4)]
    write_data(folder, tasks, sessions)
    return folder


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GANGLINE_SERVER", "GANGLINE_DATA"):
        monkeypatch.delenv(name, raising=False)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), [*map(str, arguments)], env={"COLUMNS": "200"})


def checked(*arguments: object) -> dict[str, Any]:
    ran = call("check-rows", *arguments, "--json")
    assert ran.exit_code in (0, 1), ran.output
    return json.loads(ran.stdout)


def require_read(document: dict[str, Any], name: str) -> None:
    counts = {kind: num for one in document["files"] for kind, num in one["counts"].items()}
    if name in WITHOUT_TOKENS:
        assert set(counts) == {"no_tokens"}
    else:
        assert counts == {}
        assert all(one["num_trained"] > 0 for one in document["files"])


@pytest.mark.parametrize("row_format", [one for one in RowFormat if one != RowFormat.csv])
def test_every_form_of_an_export_is_read(row_format: RowFormat, data: Path, tmp_path: Path) -> None:
    ran = call("export", "*", "--format", row_format, "--out", tmp_path, "--data", data, "--json")
    assert ran.exit_code == 0, ran.output
    require_read(checked(tmp_path), row_format)
    require_read(checked(json.loads(ran.stdout)["path"]), row_format)


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_a_dataset_is_read(kind: Kind, data: Path, tmp_path: Path) -> None:
    ran = call("data", "--kind", kind, "--out", tmp_path / "set", "--data", data)
    assert ran.exit_code == 0, ran.output
    require_read(checked(tmp_path / "set"), kind)


def test_a_table_of_sessions_is_refused_with_a_reason(data: Path, tmp_path: Path) -> None:
    assert call("export", "*", "--format", "csv", "--out", tmp_path, "--data", data).exit_code == 0
    ran = call("check-rows", tmp_path / "rows.csv")
    assert "table without token ids" in ran.output + str(ran.exception)


def rows(num: int = 4, *, zeros: float = 0.0) -> list[dict[str, Any]]:
    """Rows of a trainer that nobody knows."""
    chance = random.Random(5)
    found: list[dict[str, Any]] = []
    for number in range(num):
        ids, mask, logprobs = (talk := conversation(chance, num_turns=3, zeros=zeros)).response()
        start = [0] * len(talk.prompt)
        named = {"toks": [*talk.prompt, *ids], "m": [*start, *mask], "lp": [*start, *logprobs], "run": f"r{number}"}
        found.append(named)
    return found


COLUMNS = {"ids": "toks", "mask": "m", "logprobs": "lp", "session": "run"}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_columns_of_unknown_names_can_be_named(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    write(path, rows())
    given = ",".join(f"{name}={column}" for name, column in COLUMNS.items())
    document = checked(path, "--map", given)
    assert (document["ok"], document["files"][0]["num_records"]) == (True, 4)
    broken = rows()
    broken[1]["lp"][-1] = 0.5
    write(path, broken)
    (finding,) = checked(path, "--map", given)["files"][0]["findings"]
    assert (finding["kind"], finding["row"]) == ("logprob_positive", 2)


def write(path: Path, records: list[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(records), path)  # pyright: ignore
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("\n".join(map(json.dumps, records)))


@pytest.mark.parametrize("given", ["ids", "ids=", "tokens=toks", "mask=m"])
def test_a_map_that_does_not_suffice_is_refused(given: str, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", rows())
    assert isinstance(call("check-rows", tmp_path / "rows.jsonl", "--map", given).exception, InvalidRequest)


def test_columns_over_the_response_fit_too() -> None:
    talk = conversation(random.Random(1), num_turns=2, zeros=0.0)
    ids, mask, logprobs = talk.response()
    named = {"p": talk.prompt, "r": ids, "m": mask, "l": logprobs}
    columns = {"prompt": "p", "response": "r", "mask": "m", "logprobs": "l"}
    assert check_records([named], columns=columns).ok


def test_rows_that_cannot_be_read_are_one_line_and_soon_given_up(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", rows(250))
    ran = call("check-rows", tmp_path / "rows.jsonl")
    assert ran.exit_code == 1
    lines = [line for line in ran.stdout.splitlines() if "of no known form" in line]
    assert len([line for line in lines if line.startswith("100 rows, the first is 1:")]) == 1
    assert "none of the first 100 records can be read" in ran.stdout
    assert "lp, m, run, toks" in ran.stdout


# NeMo Gym: the trainer joins the calls of a rollout.

Items = list[tuple[list[int], list[int]]]


def rollout(items: Items) -> dict[str, Any]:
    output = [
        {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": [-0.5] * len(sampled)}
        for prompt, sampled in items
    ]
    return {"responses_create_params": {"input": []}, "response": {"output": output}}


def is_joined(items: Items) -> bool:
    """As NeMo RL does it: each prompt begins with all ids that were seen so far."""
    seen: list[int] = []
    for prompt, sampled in items:
        if prompt[: len(seen)] != seen:
            return False
        seen = [*prompt, *sampled]
    return True


A, B, C = ([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]), ([1, 2, 3, 4, 5, 6, 7, 8], [9])


@pytest.mark.parametrize("items", [[A, C, B], [A, B, ([1, 2, 3, 4, 5, 60], [70])], [A, A], [B, A], [A, ([4], [5])]])
def test_a_call_that_does_not_continue_all_calls_before_it_is_a_splice(items: Items) -> None:
    assert not is_joined(items)
    assert "splice" in check_records([rollout(items)]).counts


@given(st.data())
def test_rollouts_are_judged_as_the_trainer_joins_them(data: st.DataObject) -> None:
    stream, items = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)), Items()
    for _ in range(data.draw(st.integers(1, 5))):
        sampled = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        items.append((list(stream), sampled))
        stream = stream + sampled + data.draw(st.lists(st.integers(0, 3), max_size=3))
    fault = data.draw(st.sampled_from(["none", "order", "token", "drop", "cut"]))
    at = data.draw(st.integers(0, len(items) - 1))
    if fault == "order":
        items = data.draw(st.permutations(items))
    elif fault == "token":
        items[at][0][data.draw(st.integers(0, len(items[at][0]) - 1))] = 9
    elif fault == "drop":
        del items[at]
    elif fault == "cut":
        items[at] = (items[at][0][:-1], items[at][1])
    if items:
        assert ("splice" in check_records([rollout(items)]).counts) is not is_joined(items)


# Faults that rows betray by themselves.


def of_form(form: str, talks: list[Any]) -> list[dict[str, Any]]:
    return [CLEAN[form](talk) for talk in talks]


def talks(num: int = 4, *, zeros: float = 0.0, seed: int = 3) -> list[Any]:
    chance = random.Random(seed)
    return [conversation(chance, num_turns=3, zeros=zeros) for _ in range(num)]


@pytest.mark.parametrize("form", CLEAN)
@pytest.mark.parametrize("num", [2, 3, 5])
@pytest.mark.parametrize("every", [False, True], ids=["one turn", "every turn"])
def test_a_header_that_is_trained_as_if_it_were_sampled_is_found(form: str, num: int, every: bool) -> None:
    found = talks()
    for talk in found if every else found[1:2]:
        for at in range(3) if every else [1]:
            context, sampled, values = talk.turns[at]
            talk.turns[at] = (context[:-1], [*range(20, 20 + num), *sampled], [0.0] * num + values)
    assert "header_trained" in check_records(of_form(form, found)).counts


@pytest.mark.parametrize("form", CLEAN)
@pytest.mark.parametrize("zeros", [0.0, 0.02, 0.1, 0.3])
def test_a_sure_model_raises_no_alarm(form: str, zeros: float) -> None:
    for seed in range(5):
        report = check_records(of_form(form, talks(20, zeros=zeros, seed=seed)))
        assert report.ok, report.findings[:3]


@pytest.mark.parametrize("form", CLEAN)
def test_one_number_for_all_tokens_and_log_probs_of_another_row_are_found(form: str) -> None:
    found = talks()
    for turn in (found[1].turns, found[2].turns):
        turn[:] = [(context, [*range(30, 50), EOS], [-1.0] * 21) for context, _, _ in turn]
    assert "logprobs_constant" in check_records(of_form(form, found[1:2])).counts
    copied = talks(2)
    copied[1].turns[:] = [
        (context, [one + 1 for one in sampled], values) for context, sampled, values in copied[0].turns
    ]
    if not {"nemo_gym", "openenv", "atif"} & {form}:  # whose samples are single calls
        assert "logprobs_copied" in check_records(of_form(form, copied)).counts


def test_context_between_two_turns_that_is_trained_is_found_by_the_stop_token() -> None:
    (record,) = of_form("trl", talks(1))
    mask = record["completion_mask"]
    first = mask.index(1)
    vocabulary = Vocabulary(stop_ids={EOS})
    assert check_records([record], vocabulary=vocabulary).ok
    record["completion_mask"] = [0] * first + [1] * (len(mask) - first)
    assert "past_stop" in check_records([record], vocabulary=vocabulary).counts
