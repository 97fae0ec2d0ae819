"""Which run began from which: by the digest of a model or a checkpoint, wherever it lies now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.train.run.lineage import weights_digest
from gangline.train.runs.ancestry import ancestry_of, readable_runs
from gangline.train.runs.log import RunLog
from gangline.train.runs.records import CheckpointRecord
from gangline.train.runs.store import read_run
from support.training.recorded_runs import TASKS, write_model, write_run

DONE = [1.0] * TASKS


def relatives(data: Path, name: str) -> tuple[list[str], list[str]]:
    """`name, generation, kind and step` of ancestors and of descendants."""
    found = ancestry_of(read_run(data, name), readable_runs(data))
    return tuple(  # pyright: ignore[reportReturnType]
        [f"{one.run} {one.generation} {one.by} {one.step}{'' if one.is_here else ' gone'}" for one in those]
        for those in (found.ancestors, found.descendants)
    )


def saved(folder: Path, digest: str, model: Path | None = None) -> None:
    """A checkpoint of step 1 is on record."""
    known = "" if model is None else weights_digest(model)
    record = CheckpointRecord(step=1, version=2, digest=digest, weights_digest=known)
    RunLog(folder, last_step=9).write_checkpoint(record)


def test_a_run_that_began_from_a_copy_of_anothers_model_is_its_child(tmp_path: Path) -> None:
    first = write_run(tmp_path, "first", DONE)
    copied = shutil.copytree(first / "model", tmp_path / "elsewhere" / "renamed")
    (copied / "tokenizer.json").write_text("{}")
    second = write_run(tmp_path, "second", DONE, model=copied)
    shutil.copytree(first, tmp_path / "runs" / "copy-of-first")
    third = write_run(tmp_path, "third", model=second / "model")
    assert [one["run"] for one in json.loads((third / "lineage.json").read_text())[0]["parents"]] == ["second"]
    write_run(tmp_path, "other", DONE)
    assert relatives(tmp_path, "first") == ([], ["second 1 model 2", "third 2 model 2"])
    assert relatives(tmp_path, "second") == (["first 1 model 2"], ["third 1 model 2"])
    assert relatives(tmp_path, "third") == (["second 1 model 2", "first 2 model 2"], [])
    assert relatives(tmp_path, "other") == ([], []), "the same base model makes no relatives"
    shutil.rmtree(first)
    shutil.rmtree(tmp_path / "runs" / "copy-of-first")
    assert relatives(tmp_path, "third") == (["second 1 model 2", "first 2 model 2 gone"], [])


def test_a_run_that_goes_on_from_anothers_checkpoint_or_from_weights_between_is_its_child(tmp_path: Path) -> None:
    between = write_model(tmp_path / "v2", b"between")
    saved(write_run(tmp_path, "stopped"), "c1", between)
    resumed = write_run(tmp_path, "resumed", checkpoint="c1")
    write_run(tmp_path, "resumed", checkpoint="c1")
    saved(resumed, "c2")
    write_run(tmp_path, "resumed", checkpoint="c2")
    write_run(tmp_path, "begun", model=between)
    assert relatives(tmp_path, "stopped") == ([], ["begun 1 model 1", "resumed 1 checkpoint 1"])
    assert relatives(tmp_path, "resumed") == (["stopped 1 checkpoint 1"], []), "its own checkpoint is not a relative"
    assert relatives(tmp_path, "begun") == (["stopped 1 model 1"], [])


def test_a_run_that_learned_nothing_is_no_parent_and_equal_runs_are_both(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", b"base")
    idle = write_run(tmp_path, "idle", model=base)
    saved(idle, "c1", base)
    write_run(tmp_path, "next", model=base)
    assert relatives(tmp_path, "next") == ([], [])
    made = write_model(tmp_path / "made", b"made")
    for name in ("one", "two"):
        saved(write_run(tmp_path, name, model=base), f"of-{name}", made)
    write_run(tmp_path, "child", model=made)
    assert relatives(tmp_path, "child") == (["one 1 model 1", "two 1 model 1"], [])


def test_a_folder_that_cannot_be_read_keeps_no_run_from_beginning(tmp_path: Path) -> None:
    first = write_run(tmp_path, "first", DONE)
    for name, lineage in (("cut", "[{"), ("empty", "[]"), ("old", '[{"key": "0a"}]')):
        shutil.copytree(first, tmp_path / "runs" / name)
        (tmp_path / "runs" / name / "lineage.json").write_text(lineage)
    shutil.copytree(first, tmp_path / "runs" / "bare")
    (tmp_path / "runs" / "bare" / "experiment.json").write_text("{}")
    write_run(tmp_path, "second", model=first / "model")
    assert relatives(tmp_path, "second") == (["first 1 model 2"], [])


def test_a_record_of_an_earlier_version_has_no_relatives(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "early", DONE)
    for name, new in (("lineage.json", ("checkpoint_digest", "parents")), ("results.json", ("weights_digest",))):
        document: Any = json.loads((folder / name).read_text())
        records: list[Any] = [document] if name == "results.json" else document
        for record in records:
            for field in new:
                del record[field]
        (folder / name).write_text(json.dumps(document))
    write_run(tmp_path, "late", model=folder / "model")
    assert relatives(tmp_path, "late") == ([], [])


def test_show_names_relatives_and_digests_in_words_and_in_json(tmp_path: Path) -> None:
    first = write_run(tmp_path, "first", DONE)
    write_run(tmp_path, "second", model=first / "model")
    shown = CliRunner().invoke(build_app(), ["runs", "show", "second", "--data", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "ancestors   first: model after step 2, generation 1" in shown.stdout
    assert f"model {weights_digest(first / 'model')[:12]}" in shown.stdout
    assert "weights     1 pushed, 0.5 s each: transfer 0.2" in shown.stdout
    assert f"page        gangline open runs/second --data {tmp_path}, while a service runs\n" in shown.stdout
    elsewhere = CliRunner().invoke(build_app(), ["runs", "show", str(first), "--data", str(tmp_path / "other")])
    assert "gangline open" not in elsewhere.stdout, "the page of that folder does not list it"
    shown = CliRunner().invoke(build_app(), ["runs", "show", "first", "--data", str(tmp_path), "--json"])
    document = json.loads(shown.stdout)
    (child,) = document["ancestry"]["descendants"]
    assert child == {"run": "second", "generation": 1, "by": "model", "step": 2, "is_here": True}
    assert document["summary"]["name"] == "first"
