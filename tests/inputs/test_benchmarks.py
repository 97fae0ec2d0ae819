"""Benchmarks by name: what the catalogue says, their published forms, and what is said where files are missing."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.cli.tasks.files import validated
from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.imported import Choices, Imported, LeftOut
from gangline.settings import plugins
from gangline.settings.wings import wing_parts
from gangline.tasks.benchmarks import bringing
from gangline.tasks.benchmarks.catalogue import Benchmark, catalogue, named_benchmark
from gangline.tasks.benchmarks.reading import read_benchmark
from gangline.tasks.commands.importing import check
from gangline.tasks.importers.source import Wanted
from gangline.tasks.presets.preset import find_preset
from support.requirements import need_module
from support.service.field_tasks import git
from support.service.published import ANSWERED, PATCHED, TEXT, parquet, terminal_bench_2

NAMES = list(catalogue())
ISSUE = {
    "instance_id": "dogs__kennel-1",
    "repo": "dogs/kennel",
    "base_commit": "ab" * 20,
    "problem_statement": "add(2, 3) is -1",
    "patch": "diff --git a/kennel.py b/kennel.py\nindex 1..2 100644\n--- a/kennel.py\n+++ b/kennel.py\n"
    "@@ -1,1 +1,1 @@\n-a\n+b\n",
    "test_patch": "--- a/test_kennel.py\n+++ b/test_kennel.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": json.dumps(["test_kennel.py::test_add"]),
    "PASS_TO_PASS": "[]",
    "version": "1.0",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder without files, without a network, with caches of its own."""
    need_module("pyarrow", "pip install 'gangline[importers]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)


def unreachable(*_: Any, **__: Any) -> str:
    raise OSError("cannot find huggingface.co")


def published(name: str, root: Path) -> Path:
    if name in ANSWERED:
        ANSWERED[name](root)
    elif name in PATCHED:
        PATCHED[name](root, ISSUE)
    else:
        terminal_bench_2(root)
    return root


def found_in(one: Benchmark, copy: Path | None, **wanted: Any) -> list[Imported | LeftOut]:
    return list(read_benchmark(one, Wanted(**wanted), copy, check))


def test_the_catalogue_is_whole() -> None:
    assert len(NAMES) == 20
    graders = {*plugins.names("evaluator")}
    prefixes = tuple(one.prefix for one in wing_parts("gangline.importers").values() if hasattr(one, "prefix"))
    for name, one in catalogue().items():
        assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)
        assert one.is_pinned, f"{name}: if its revision cannot be pinned, say so here and in the reference"
        assert one.grader in graders
        assert one.preset is None or find_preset(one.preset)
        assert one.cite.startswith("https://")
        assert one.license
        assert (one.kind == "hub") == bool(one.files) == bool(one.splits)
        assert one.kind != "program" or (one.source.startswith(prefixes) and one.commands)


@pytest.mark.parametrize("name", [name for name, one in catalogue().items() if one.kind != "program"])
def test_a_copy_in_the_published_form_becomes_tasks(name: str, tmp_path: Path) -> None:
    one = catalogue()[name]
    choices = Choices(network="full" if "--network full" in one.needs else None)
    (first,) = found_in(one, published(name, tmp_path / "copy"), limit=1, choices=choices)
    assert isinstance(first, Imported), first
    task = validated({"agent": one.agent or {"harness": "native"}, **first.body}, name)
    assert first.body["metadata"]["benchmark"]["name"] == name
    assert first.body["evaluator"]["strategy"] == one.grader
    assert one.ask in task.instruction
    assert "solution" in first.body or name == "livecodebench"
    if one.image == "none":
        assert task.runtime.image is None
    else:
        stem = re.split(r"[*,]", one.image)[0]
        assert str(task.runtime.image).startswith(stem)


@pytest.mark.parametrize("name", NAMES)
def test_without_files_it_is_said_what_is_missing_and_how_to_bring_it(name: str) -> None:
    one = catalogue()[name]
    if one.kind == "git":  # so that nothing is looked up
        broken = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "url.file:///nowhere/.insteadOf"}
        with pytest.MonkeyPatch.context() as patch:
            for key, value in {**broken, "GIT_CONFIG_VALUE_0": "https://"}.items():
                patch.setenv(key, value)
            with pytest.raises(InvalidRequest) as caught:
                found_in(one, None)
    else:
        with pytest.raises(InvalidRequest) as caught:
            found_in(one, None)
    said = caught.value.message
    assert said.startswith(f"{name}: ")
    assert one.url in said
    assert one.revision in said
    if one.kind == "program":
        assert "`python3.12 -m venv /opt/tau2 && git clone" in said
        assert said.endswith("--python /opt/tau2.")
        return
    command = re.search("`(.*)`", said)
    assert command is not None
    assert command[1].startswith(f"hf download {one.source} --repo-type dataset" if one.files else "git clone ")
    assert one.pattern(None) in command[1]
    assert said.endswith(f"--from {name}.")


def test_the_package_that_fetches_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(bringing, "import_module", absent)
    with pytest.raises(InvalidRequest, match=r"huggingface_hub, which is not installed \(`.*importers.*hf download"):
        found_in(catalogue()["gsm8k"], None)


def test_a_pinned_copy_in_the_cache_is_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives its folder for a commit that it has; shards that are not there yet are fetched."""
    asked: list[dict[str, Any]] = []
    folder = published("gsm8k", tmp_path / "cached")

    def download(source: str, **how: Any) -> str:
        asked.append({"source": source, **how})
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    one = catalogue()["gsm8k"]
    (first,) = found_in(one, None, limit=1)
    assert isinstance(first, Imported)
    assert first.body["metadata"]["benchmark"] == {"name": "gsm8k", "revision": one.revision, "split": "test"}
    wanted = {"source": "openai/gsm8k", "repo_type": "dataset", "revision": one.revision}
    assert asked == [{**wanted, "allow_patterns": ["main/test-*.parquet"], "local_files_only": True}]
    (folder / "main" / "test-00000-of-00001.parquet").rename(folder / "main" / "test-00000-of-00002.parquet")
    with pytest.raises(InvalidRequest, match="has 1 of 2 files"):
        found_in(one, None, limit=1)
    assert [how["local_files_only"] for how in asked] == [True, True, False]


def test_another_revision_may_be_named_and_a_branch_is_not_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = named_benchmark("gsm8k@main")
    assert one is not None
    folder = published("gsm8k", tmp_path / "main")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    first, *_ = found_in(one, None)
    assert isinstance(first, Imported)
    assert first.notes == ("gsm8k: main is not pinned: its tasks may change",)
    assert first.body["metadata"]["benchmark"]["revision"] == "main"


def test_a_repository_is_cloned_at_its_commit_once(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    terminal_bench_2(origin)
    git(origin, "init", "-q", "-b", "main")
    git(origin, "add", ".")
    git(origin, "commit", "-q", "-m", "Begin")
    commit = git(origin, "rev-parse", "HEAD").strip()
    git(origin, "config", "uploadpack.allowAnySHA1InWant", "true")
    one = msgspec.structs.replace(catalogue()["terminal-bench-2"], source=f"file://{origin}", revision=commit, tasks=1)
    choices = Choices(network="full")
    (first,) = found_in(one, None, choices=choices)
    assert isinstance(first, Imported)
    assert first.body["runtime"]["image"] == "alexgshaw/count-bytes:20251031"
    subprocess.run(["rm", "-r", origin], check=True)
    assert len(found_in(one, None, choices=choices)) == 1, "from the clone"
    with pytest.raises(InvalidRequest, match="asks for the network"):
        found_in(one, None)
    clone = tmp_path / "cache" / "gangline" / "benchmarks" / "terminal-bench-2" / commit
    with pytest.raises(InvalidRequest, match="is pinned to 69671fb"):
        found_in(catalogue()["terminal-bench-2"], clone)


def test_a_snapshot_of_another_commit_is_refused(tmp_path: Path) -> None:
    other = published("aime-2025", tmp_path / "snapshots" / ("0" * 40))
    with pytest.raises(InvalidRequest, match=f"name the benchmark aime-2025@{'0' * 40}"):
        found_in(catalogue()["aime-2025"], other)


def test_a_copy_that_is_not_whole_is_said(tmp_path: Path) -> None:
    _, left = found_in(catalogue()["aime-2025"], published("aime-2025", tmp_path / "copy"))
    assert isinstance(left, LeftOut)
    assert left.why.endswith("holds 1 tasks, and aime-2025 has 30: it is not that revision, or cut")
    assert len(found_in(catalogue()["aime-2025"], tmp_path / "copy" / "test.jsonl", limit=1)) == 1, "the file alone"


def test_a_folder_without_the_splits_files_is_missing_them(tmp_path: Path) -> None:
    copy = published("gsm8k", tmp_path / "copy")
    with pytest.raises(InvalidRequest, match=r"has no file main/train-\*.parquet.*--include 'main/train"):
        found_in(catalogue()["gsm8k"], copy, split="train")
    with pytest.raises(InvalidRequest, match="--split validation: gsm8k has test, train"):
        found_in(catalogue()["gsm8k"], copy, split="validation")
    with pytest.raises(InvalidRequest, match="there is no such file or folder"):
        found_in(catalogue()["gsm8k"], tmp_path / "nowhere")


def test_only_the_files_of_its_configuration_are_read(tmp_path: Path) -> None:
    copy, row = published("gsm8k", tmp_path / "copy"), {"question": "1+1?", "answer": "#### 2"}
    for at in (0, 1):
        parquet(copy / "main" / f"train-0000{at}-of-00002.parquet", {"question": TEXT, "answer": TEXT}, row)
    assert len(found_in(catalogue()["gsm8k"], copy, split="train")) == 2
    assert len([one for one in found_in(catalogue()["gsm8k"], copy) if isinstance(one, Imported)]) == 1


def test_tasks_of_two_splits_have_two_ids(tmp_path: Path) -> None:
    """Their rows may be alike but for the split, as their numbers are."""
    copy, row = published("gsm8k", tmp_path / "copy"), {"question": "1+1?", "answer": "#### 2"}
    for split in ("train", "test"):
        parquet(copy / "main" / f"{split}-00000-of-00001.parquet", {"question": TEXT, "answer": TEXT}, row)
    ids = [
        [one.name for one in found_in(catalogue()["gsm8k"], copy, split=split) if isinstance(one, Imported)]
        for split in (None, "test", "train")
    ]
    assert ids[0] == ids[1] != ids[2]
    assert [len(found) for found in ids] == [1, 1, 1]


def test_what_the_catalogue_decides_is_no_option(tmp_path: Path) -> None:
    copy = published("aime-2025", tmp_path / "copy")
    for wanted in ({"mapping": {"answer": "x"}}, {"preset": find_preset("math")}, {"format": "rows"}):
        with pytest.raises(InvalidRequest, match="are decided by the catalogue"):
            found_in(catalogue()["aime-2025"], copy, **wanted)
    with pytest.raises(InvalidRequest, match="is listed by a program, not read from files"):
        found_in(catalogue()["tau2-retail"], copy, choices=Choices(python="/opt/tau2"))


def test_a_name_is_a_benchmark_a_file_or_a_mistake(tmp_path: Path) -> None:
    for source in ("tasks/", "rows.jsonl", "./gsm8k", "tau2:retail", "inspect:a.py@b", "-", "a/gsm8k", "gsm8k/"):
        assert named_benchmark(source) is None, source
    found = named_benchmark("gsm8k")
    assert found is not None
    assert found.name == "gsm8k"
    with pytest.raises(InvalidRequest, match=r"neither a file nor a benchmark\. Did you mean gsm8k"):
        named_benchmark("gsm8")
    with pytest.raises(InvalidRequest, match=r"Did you mean swe-bench-lite.*gangline tasks names"):
        named_benchmark("SWE-bench_Lite")
    with pytest.raises(InvalidRequest, match="is not the name of a benchmark"):
        named_benchmark("./rows", is_certain=True)
    (tmp_path / "gsm8k").mkdir()
    with pytest.raises(InvalidRequest, match=r"Write \./gsm8k to read that.*gsm8k --from gsm8k.*gsm8k@cc7b047b"):
        named_benchmark("gsm8k")
    assert named_benchmark("gsm8k", is_certain=True) == found
    assert named_benchmark("gsm8k@main") is not None
    (tmp_path / "mine").touch()
    assert named_benchmark("mine") is None
