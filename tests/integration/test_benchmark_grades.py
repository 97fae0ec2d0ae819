"""A right answer to a task of each benchmark earns 1 and wrong ones earn 0, from its published form on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.contracts import Reward
from gangline.domain.ids import new_id
from gangline.grading.untrusted.isolated import ForkServers
from gangline.machine.reading.imported import Imported
from gangline.settings import plugins
from gangline.tasks.benchmarks.catalogue import catalogue
from gangline.tasks.benchmarks.reading import read_benchmark
from gangline.tasks.commands.importing import check
from gangline.tasks.importers.source import Wanted
from support.node.folder_runtime import FolderRuntime
from support.requirements import need_command, need_module
from support.service.field_tasks import BROKEN, FIXED, NEW_TESTS, git, repository, write
from support.service.published import ANSWERED, METHOD, PATCHED
from support.training.evaluation_samples import a_context, a_trace, said

PATH = f"{Path(sys.executable).parent}:{os.defpath}"
RUN_R2E = "#!/bin/bash\npython -m pytest -rA -p no:cacheprovider r2e_tests\n"

servers = ForkServers()


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Generator[None]:
    yield
    asyncio.run(servers.close())


@pytest.fixture(autouse=True)
def _installed() -> None:
    need_module("pyarrow", "pip install 'gangline[importers]'")
    need_module("math_verify", "pip install 'gangline[math]'")
    need_command("git", "apt-get install git")


def tasks_of(name: str, copy: Path) -> list[dict[str, Any]]:
    found = read_benchmark(catalogue()[name], Wanted(), copy, check)
    return [one.body for one in found if isinstance(one, Imported)]


async def graded(folder: Path, body: dict[str, Any], answer: str) -> Reward:
    """answer: the last message, or for tasks of programs `solution.py`, where it is not empty."""
    spec = body["evaluator"]
    evaluator = plugins.make_evaluator(spec["strategy"], spec["config"])
    agents, clean = (FolderRuntime(folder / new_id("runtime"), path=PATH) for _ in range(2))
    if spec.get("refresh_runtime"):
        if answer:
            agents.file("solution.py").write_text(answer)
        context = a_context(agents, fresh=clean)
    else:
        context = a_context(agents, traces=(a_trace(said("assistant", answer)),) if answer else ())
    return await evaluator.evaluate(msgspec.structs.replace(context, child_work=servers))


@pytest.mark.parametrize("name", ANSWERED)
async def test_a_right_answer_earns_1_and_wrong_ones_0(name: str, tmp_path: Path) -> None:
    answers = ANSWERED[name](tmp_path / "copy")
    body = tasks_of(name, tmp_path / "copy")[0]
    found = await graded(tmp_path, body, answers.right)
    assert found.reward == 1.0, found.details
    for wrong in answers.wrong:
        found = await graded(tmp_path, body, wrong)
        assert found.reward == 0.0, (wrong, found.details)


@pytest.mark.parametrize("name", ANSWERED)
async def test_the_published_solution_earns_1(name: str, tmp_path: Path) -> None:
    ANSWERED[name](tmp_path / "copy")
    body = tasks_of(name, tmp_path / "copy")[0]
    if name == "livecodebench":
        assert "solution" not in body, "none is published"
        return
    solution = body["solution"]
    found = await graded(tmp_path, body, solution.get("answer") or solution["files"]["solution.py"])
    assert found.reward == 1.0, found.details


async def test_a_method_is_called_with_the_imports_of_the_home_runner(tmp_path: Path) -> None:
    ANSWERED["livecodebench"](tmp_path / "copy")
    body = tasks_of("livecodebench", tmp_path / "copy")[1]
    assert "def merge" in body["instruction"]
    assert (await graded(tmp_path, body, METHOD.right)).reward == 1.0
    for wrong in METHOD.wrong:
        assert (await graded(tmp_path, body, wrong)).reward == 0.0, wrong


@pytest.mark.parametrize("name", PATCHED)
async def test_a_fix_earns_1_and_nothing_0(name: str, tmp_path: Path) -> None:
    issue = repository(tmp_path / "origin")
    if name in ("swe-smith", "r2e-gym"):  # their repositories have the tests, or a script of them
        git(tmp_path / "origin", "checkout", "-q", "--detach", issue["base_commit"])
        write(tmp_path / "origin" / "test_kennel.py", NEW_TESTS)
        write(tmp_path / "origin" / "run_tests.sh", RUN_R2E)
        git(tmp_path / "origin", "add", ".")
        git(tmp_path / "origin", "commit", "-q", "-m", "Tests")
        issue["base_commit"] = git(tmp_path / "origin", "rev-parse", "HEAD").strip()
    PATCHED[name](tmp_path / "copy", issue)
    (body,) = tasks_of(name, tmp_path / "copy")
    evaluator = plugins.make_evaluator("swe_bench", body["evaluator"]["config"])
    for text, reward in ((FIXED, 1.0), (BROKEN, 0.0)):
        runtimes = [FolderRuntime(tmp_path / f"{who}-{reward}", path=PATH) for who in ("agents", "clean")]
        for runtime in runtimes:
            git(tmp_path, "clone", "-q", str(tmp_path / "origin"), runtime.workdir)
            git(Path(runtime.workdir), "checkout", "-q", "--detach", issue["base_commit"])
        agents, clean = runtimes
        agents.file("kennel.py").write_text(text)
        found = await evaluator.evaluate(a_context(agents, fresh=clean))
        assert found.reward == reward, found.details
