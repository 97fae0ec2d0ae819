"""An agent's own Python environment: seen by sandboxes read-only, and named when an import fails without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gangline.agents.harnesses.shell import ShellConfig, ShellHarness
from gangline.cli.machine.doctor import check_agent_python
from gangline.domain.errors import InvalidRequest, RuntimeUnavailable
from gangline.domain.ids import new_id
from gangline.domain.sandbox import ExecResult, Runtime, RuntimeStart, Sandbox
from gangline.domain.task import RuntimeSpec
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.sandbox.process import ProcessRuntime

WHERE = "import sled_package, sys; print(sled_package.__file__); print(sys.prefix)"


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with one package, `sled_package`."""
    folder = tmp_path_factory.mktemp("own") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "sled_package.py").touch()
    return folder


async def started(runtime: Runtime, folder: Path, python: Path | None) -> Sandbox:
    try:
        await runtime.check()
    except RuntimeUnavailable as error:
        pytest.skip(error.message)
    spec = RuntimeSpec(network="none", python=None if python is None else str(python))
    start = RuntimeStart(runtime_id=new_id("own"), owner=new_id("own"), spec=spec, folder=folder / "sandbox")
    return await runtime.start(start)


@pytest.mark.parametrize("kind", [BubblewrapRuntime, ProcessRuntime])
async def test_its_interpreter_is_python3_and_its_packages_can_be_imported(
    tmp_path: Path, venv: Path, kind: Callable[[], Runtime]
) -> None:
    handle = await started(kind(), tmp_path, venv)
    try:
        for program in ("python3", "python"):
            done = await handle.exec([program, "-c", WHERE])
            assert done.ok, done.stderr
            file, prefix = done.stdout.decode().split()
            assert Path(prefix) == venv
            assert Path(file).is_relative_to(venv)
    finally:
        await handle.stop()


async def test_a_sandbox_cannot_write_to_it_and_does_not_see_it_unasked(tmp_path: Path, venv: Path) -> None:
    handle = await started(BubblewrapRuntime(), tmp_path / "with", venv)
    try:
        assert not (await handle.exec(["touch", str(venv / "bin" / "mine")])).ok
    finally:
        await handle.stop()
    handle = await started(BubblewrapRuntime(), tmp_path / "without", None)
    try:
        assert not (await handle.exec(["test", "-e", str(venv)])).ok
        assert not (await handle.exec(["python3", "-c", WHERE])).ok
    finally:
        await handle.stop()


@pytest.mark.parametrize("kind", [BubblewrapRuntime, ProcessRuntime])
async def test_a_folder_without_an_interpreter_is_refused(tmp_path: Path, kind: Callable[[], Runtime]) -> None:
    with pytest.raises(InvalidRequest, match="no bin/python3"):
        await started(kind(), tmp_path, tmp_path)


def test_the_doctor_examines_the_interpreter_in_a_sandbox(tmp_path: Path, venv: Path) -> None:
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "langgraph").mkdir(exist_ok=True)
    found = check_agent_python(venv)
    assert found.state == "ok"
    assert str(venv) in found.found
    assert found.found.endswith("imports langgraph")
    refused = check_agent_python(tmp_path)
    assert refused.state == "optional"
    assert "no bin/python3" in refused.advice


def judged(stderr: bytes) -> str:
    result = ExecResult(exit_code=1, stderr=stderr)
    return ShellHarness(ShellConfig(command="python3 agent.py")).judge(result).reason


def test_a_failed_import_names_the_environment_that_has_the_module(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(venv))
    reason = judged(b"Traceback\n  ...\nModuleNotFoundError: No module named 'sled_package.runners'\n")
    assert f"pass --python {venv}" in reason


def test_a_failed_import_of_a_module_that_nobody_has_says_how_to_bring_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = judged(b"ModuleNotFoundError: No module named 'no_such_sled'\n")
    assert "has no_such_sled" in reason
    assert "--python VENV" in reason


def test_another_failure_brings_no_advice() -> None:
    assert judged(b"ValueError: sled\n") == "exited with 1: ValueError: sled"
