"""A builder from somebody else's distribution, installed alongside Gangline and found by its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from pydantic import BaseModel

from gangline.domain.completion import CompletionTree
from gangline.domain.errors import UnknownPlugin
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.domain.trajectory import Trajectory
from gangline.rows.audit import audit, merge_reports
from gangline.rows.chains import built
from gangline.settings.installation import extra_command
from gangline.settings.plugins import make_builder
from support.strategies import session_sample

BUILDER = '''
"""A trace for each turn, the last one first."""

from typing import ClassVar

import msgspec
from pydantic import BaseModel, ConfigDict

from gangline.domain.completion import CompletionTree
from gangline.domain.trajectory import Trajectory
from gangline.settings.plugins import make_builder


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    label: str = ""


class LastFirstBuilder:
    name: ClassVar[str] = "last_first"
    Config: ClassVar[type[BaseModel]] = Config

    def __init__(self, config: Config) -> None:
        self.config = config

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        built = make_builder("per_request", {}).build(tree, session_id=session_id, task_id=task_id)
        traces = [msgspec.structs.replace(trace, metadata={"label": self.config.label}) for trace in built.traces]
        return msgspec.structs.replace(built, builder=self.name, traces=tuple(reversed(traces)))
'''

STRANGERS_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "last-first-builder"
version = "1.0"
dependencies = ["numpy", "Fast.Sorts[c]>=2,<3; python_version > '3'"]

[project.optional-dependencies]
pictures = ["dots"]
all-files = ["PyYAMLs>=6; platform_system != 'Plan9'"]

[project.entry-points."gangline.builders"]
last_first = "last_first_builder:LastFirstBuilder"

[tool.setuptools]
py-modules = ["last_first_builder"]
"""

# What a node does with a task, and what anybody may do with completions.
USER = """
import sys

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.task import TaskRequest
from gangline.domain.errors import UnknownPlugin
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.settings.plugins import check_task, make_builder

task = TaskRequest.model_validate_json(sys.argv[1])
check_task(task)
builder = make_builder(task.builder.strategy, task.builder.config)
tree = CompletionTree(decode_msgpack(sys.stdin.buffer.read(), list[Completion]))
sys.stdout.buffer.write(encode_msgpack(builder.build(tree, session_id="session-1", task_id="task-1")))
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder as an installer leaves it: the module, and the distribution's metadata."""
    info = tmp_path / "last_first_builder-1.0.dist-info"
    info.mkdir()
    (tmp_path / "last_first_builder.py").write_text(BUILDER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: last-first-builder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gangline.builders]\nlast_first = last_first_builder:LastFirstBuilder\n")
    return tmp_path


def use(folder: Path, builder: str) -> subprocess.CompletedProcess[bytes]:
    task = f"""{{"instruction": "go", "runtime": {{"backend": "process"}}, "builder": {builder},
        "agent": {{"harness": "shell", "settings": {{"command": "true"}}}}}}"""
    return subprocess.run(
        [sys.executable, "-c", USER, task],
        input=encode_msgpack(tuple(session_sample().tree)),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
        timeout=60,
        check=False,
    )


def test_it_is_chosen_by_name_configured_and_its_rows_pass_the_audit(installed: Path) -> None:
    done = use(installed, '{"strategy": "last_first", "label": "mine"}')
    assert done.returncode == 0, done.stderr.decode()
    trajectory = decode_msgpack(done.stdout, Trajectory)
    assert trajectory.builder == "last_first"
    assert trajectory.traces[0].spans[0].completion_id == "c0005"
    assert {trace.metadata["label"] for trace in trajectory.traces} == {"mine"}
    assert audit(trajectory, session_sample().tree).violations == ()


class _LastOnly:
    """Keeps one trace, as builders do that train on the last turn alone."""

    name: ClassVar[str] = "last_only"
    Config: ClassVar[type[BaseModel]] = BaseModel
    drops_turns: ClassVar[str] = "only the last turn is trained on"

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        whole = make_builder("per_request", {}).build(tree, session_id=session_id, task_id=task_id)
        last = msgspec.structs.replace(whole.traces[-1], parent_trace_id=None)
        return msgspec.structs.replace(whole, traces=(last,))


class _Loses:
    """Does the same and declares nothing."""

    name: ClassVar[str] = "loses"
    Config: ClassVar[type[BaseModel]] = BaseModel

    def build(self, tree: CompletionTree, *, session_id: str, task_id: str) -> Trajectory:
        return _LastOnly().build(tree, session_id=session_id, task_id=task_id)


def test_turns_that_a_builder_drops_by_declaration_are_counted_and_others_are_lost() -> None:
    completions = tuple(session_sample().tree)
    trajectory = built(_LastOnly(), completions, session_id="s1", task_id="t1")
    report = audit(trajectory, completions)
    assert not [one for one in report.violations if one.rule == "once"]
    assert report.dropped.turns == len(completions) - 1
    assert report.dropped.tokens > 0
    assert merge_reports([report, report]).dropped.turns == 2 * report.dropped.turns
    assert report.drop_reasons == ("only the last turn is trained on",)
    lost = audit(built(_Loses(), completions, session_id="s1", task_id="t1"), completions)
    assert len([one for one in lost.violations if one.rule == "once"]) == len(completions) - 1
    assert lost.dropped.turns == 0


def test_its_settings_are_checked_by_its_own_config(installed: Path) -> None:
    done = use(installed, '{"strategy": "last_first", "labels": 1}')
    assert b"labels: Extra inputs are not permitted" in done.stderr


def test_it_is_among_the_names_that_an_unknown_one_is_told(installed: Path) -> None:
    done = use(installed, '{"strategy": "last_frist"}')
    assert done.returncode != 0
    for name in (b"last_first", b"message_prefix", b"per_request", b"prefix_merging", b"tree"):
        assert name in done.stderr


def test_without_its_distribution_it_is_unknown(tmp_path: Path) -> None:
    assert b"UnknownPlugin" in use(tmp_path, '{"strategy": "last_first"}').stderr


def test_one_installed_under_a_running_process_is_named_with_the_remedy(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownPlugin, match="Known: "):
        make_builder("last_first", {})
    monkeypatch.syspath_prepend(str(installed))
    with pytest.raises(UnknownPlugin, match="installed after this process started"):
        make_builder("last_first", {})


@pytest.mark.parametrize(
    ("kind", "name", "missing", "extra"),
    [
        ("engine_server", "scripted", ("tokenizers", "transformers"), "tokenizer"),
        ("engine_server", "embedded", ("torch",), "engine"),
        ("engine", "generate_renderers", ("renderers",), "renderers"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    kind: str, name: str, missing: tuple[str, ...], extra: str
) -> None:
    block = "".join(f"sys.modules[{module!r}] = None;" for module in missing)
    code = f"import sys; {block} from gangline.settings import plugins; plugins.load({kind!r}, {name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert f"Run: {extra_command(extra)}" in done.stderr


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("fast_sorts", " -m pip install 'Fast.Sorts[c]<3,>=2'"),
        ("dots", " -m pip install 'last-first-builder[pictures] @ file://"),
        ("yamls", " -m pip install 'last-first-builder[all-files] @ file://"),
        ("absent", "One of its extras may bring it: last-first-builder[pictures], last-first-builder[all-files]."),
    ],
)
def test_a_missing_package_of_a_strangers_plugin_is_named_by_its_own_metadata(
    tmp_path: Path, module: str, remedy: str
) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "last_first_builder.py").write_text(f"import {module}")
    (source / "pyproject.toml").write_text(STRANGERS_PROJECT)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", site, source], check=True, timeout=120)
    done = use(site, '{"strategy": "last_first"}')
    message = f"builder 'last_first' needs the Python package {module!r}, which is not installed."
    assert message in done.stderr.decode()
    assert remedy in done.stderr.decode()
    assert b"gangline[" not in done.stderr
