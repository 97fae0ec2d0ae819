"""`gangline check-rows` finds each planted fault in each system's records, and where it is."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.domain.errors import InvalidRequest
from gangline.tasks.check_rows.check import check_records, form_of
from gangline.tasks.check_rows.dump import read_records
from gangline.tasks.check_rows.kinds import KINDS
from gangline.tasks.check_rows.rules import Vocabulary
from support.dumps import CLEAN, EOS, PLANTS, conversation, kept_ids

PAIRS = [(fault, form) for fault, (_, forms) in PLANTS.items() for form in forms]


def long_records(form: str, num: int = 3) -> list[dict[str, Any]]:
    """Records of three turns, the last of which is long enough for any fault."""
    chance = random.Random(form)
    talks = [conversation(chance, num_turns=3) for _ in range(num)]
    for talk in talks:
        context, sampled, values = talk.turns[-1]
        more = [chance.randint(10, 900) for _ in range(60)]
        talk.turns[-1] = (context, more + sampled, [-chance.random() - 0.01 for _ in more] + values)
    return [CLEAN[form](talk) for talk in talks]


@pytest.mark.parametrize(("fault", "form"), PAIRS)
def test_planted_fault_is_found_in_its_row(fault: str, form: str) -> None:
    plant, forms = PLANTS[fault]
    records = long_records(form)
    assert check_records(records).ok
    plant(form, records)
    report = check_records(records)
    found = [finding for finding in report.findings if finding.kind in forms[form]]
    assert found, report.findings
    assert {finding.row for finding in report.findings} <= {2, 4}


def test_at_least_twelve_kinds_are_planted_and_each_is_explained() -> None:
    planted = set[str]().union(*(kinds for _, forms in PLANTS.values() for kinds in forms.values()))
    assert len(planted) >= 12
    assert planted <= set(KINDS)


@pytest.mark.parametrize("form", CLEAN)
def test_form_is_known_by_its_fields(form: str) -> None:
    assert form_of(long_records(form, 1)[0]) == form


def test_tokenizer_shows_cut_turns_special_tokens_and_ids_beyond_it() -> None:
    (record,) = long_records("trl", 1)
    vocabulary = Vocabulary(size=1000, stop_ids={EOS}, pad_id=0, special_ids={0, 1, EOS})
    assert check_records([record], vocabulary=vocabulary).ok
    ids, mask = record["input_ids"], record["completion_mask"]
    logprobs = record["old_log_probs"]
    first_end = next(i for i in range(mask.index(1), len(mask)) if mask[i] == 0)
    mask[first_end - 1], logprobs[first_end - 1] = 0, 0.0
    ids[-3], ids[-4], ids[-5] = 1, 0, 1000
    kinds = set(check_records([record], vocabulary=vocabulary).counts)
    assert kinds == {"cut_turn", "special_trained", "padding_trained", "ids_invalid"}


def test_log_probs_among_kept_ids_are_not_held_against_the_model() -> None:
    record, whole = long_records("gangline", 2)

    def score(ids: Any, _temperature: float) -> Any:
        return np.full(len(ids), -9.0, np.float32)

    report = check_records([record], score=score)
    assert (report.ok, report.recomputed_tokens) == (True, 0)
    whole["sampling_mask"] = None
    assert set(check_records([whole], score=score).counts) == {"model_disagrees"}


def test_a_turn_that_was_drawn_from_the_whole_vocabulary_needs_no_kept_ids() -> None:
    (record,) = long_records("gangline", 1)
    first_end = record["loss_mask"].index(0)
    kept = kept_ids(record["response_ids"], [0] * first_end + record["loss_mask"][first_end:])
    numbers = [*map(len, kept), *(one for each in kept for one in each)]
    record["sampling_mask"]["data"] = base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()
    assert check_records([record]).ok


def test_model_names_a_shift_that_no_edge_shows() -> None:
    (record,) = long_records("atif", 1)
    metrics = record["steps"][-1]["metrics"]
    num = len(metrics["prompt_token_ids"])

    def score(ids: Any, _temperature: float) -> Any:
        return -(np.asarray(ids, dtype=np.float32) % 7) - 0.5

    for step in record["steps"]:
        step["metrics"]["logprobs"] = score(np.asarray(step["metrics"]["completion_token_ids"]), 1.0).tolist()
    report = check_records([record], score=score)
    assert report.ok
    assert report.mean_difference == 0.0
    metrics["logprobs"] = [metrics["logprobs"][0], *metrics["logprobs"][:-1]]
    (finding,) = check_records([record], score=score).findings
    assert (finding.kind, finding.position) == ("logprobs_shifted", num)
    metrics["logprobs"] = [value - 3.0 for value in metrics["logprobs"]]
    assert check_records([record], score=score).counts == {"model_disagrees": 1}


def test_record_without_its_fields_is_a_finding_and_not_an_end() -> None:
    records = [{"a": 1}, {"response_ids": [1], "response_mask": [1]}, *long_records("verl", 1)]
    report = check_records(records)
    assert report.counts == {"unreadable": 2}
    assert report.num_samples == 3


def test_unknown_form_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="there is no form 'x'"):
        check_records([], form="x")


def test_parquet_and_documents_read_as_lines_do(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = long_records("slime")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    (tmp_path / "a.json").write_text(json.dumps(records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    reports = [check_records(read_records(tmp_path / f"a.{suffix}")) for suffix in ("jsonl", "json", "parquet")]
    assert all(report.ok for report in reports)
    assert len({report.num_tokens for report in reports}) == 1


def test_command_lists_findings_and_fails(tmp_path: Path) -> None:
    records = long_records("trl")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    command = ["check-rows", str(path), "--json"]
    clean = CliRunner().invoke(build_app(), ["check-rows", str(path)])
    assert clean.exit_code == 0
    PLANTS["a log-prob is NaN"][0]("trl", records)
    path.write_text("\n".join(map(json.dumps, records)))  # with NaN, as Python writes it
    done = CliRunner().invoke(build_app(), command)
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["files"][0]["counts"] == {"logprob_nan": 1}
    assert document["files"][0]["findings"][0]["row"] == 2
