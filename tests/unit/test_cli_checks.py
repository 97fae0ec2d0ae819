"""What `gangline doctor` says of a machine that lacks something."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.cli.machine import checks
from gangline.domain.errors import RuntimeUnavailable
from gangline.settings.installation import extra_command
from gangline.settings.machine import Settings


class NoSandbox:
    """A runtime on a machine that cannot run it."""

    async def check(self) -> None:
        raise RuntimeUnavailable("bubblewrap is not installed. Run: apt-get install -y bubblewrap")


def settings(tmp_path: Path) -> Settings:
    return Settings.from_environ(
        {"GANGLINE_DATA": str(tmp_path / "data"), "GANGLINE_TOOLS": str(tmp_path), "GANGLINE_CACHE": str(tmp_path)}
    )


def test_without_a_sandbox_it_says_the_line_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "make_runtime", lambda _name: NoSandbox())
    check = checks.check_sandbox(settings(tmp_path))
    assert check.state == "missing"
    assert "apt-get install -y bubblewrap" in check.advice


def test_without_apptainer_it_says_what_it_is_for(tmp_path: Path) -> None:
    lacking = settings(tmp_path).model_copy(update={"apptainer": ("no-such-apptainer",)})
    check = checks.check_apptainer(lacking)
    assert (check.state, check.found) == ("optional", "no no-such-apptainer")
    assert "runtime apptainer" in check.advice


def test_an_apptainer_that_starts_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "make_runtime", lambda _name: NoSandbox())
    check = checks.check_apptainer(settings(tmp_path).model_copy(update={"apptainer": ("echo", "apptainer 1.4.5")}))
    assert check.state == "optional"
    assert check.found.startswith("apptainer 1.4.5")
    assert "apt-get install" in check.advice


@pytest.mark.parametrize("check", [checks.check_docker, checks.check_podman])
def test_containers_are_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: checks.Examination) -> None:
    monkeypatch.setenv("GANGLINE_DOCKER", "no-such-docker")
    monkeypatch.setenv("GANGLINE_PODMAN", "no-such-podman")
    found = check(settings(tmp_path))
    assert (found.state, found.found) == ("optional", "cannot be used")
    assert "apt-get install" in found.advice or "root" in found.advice


def test_without_torch_it_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    check = checks.check_engine_extra(settings(tmp_path))
    assert (check.state, check.found) == ("missing", "not installed: torch")
    assert extra_command("engine") in check.advice


def test_without_agent_programs_it_goes_on(tmp_path: Path) -> None:
    check = checks.check_agent_programs(settings(tmp_path))
    assert check.state == "optional"
    assert "gangline harness install" in check.advice
    assert "pi" in check.advice.split()


@pytest.mark.parametrize(("free_bytes", "state"), [(100 << 30, "ok"), (1 << 30, "optional"), (1 << 20, "missing")])
def test_little_disk_is_told_before_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, state: str
) -> None:
    usage = checks.shutil.disk_usage(tmp_path)._replace(free=free_bytes)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _path: usage)
    assert checks.check_disk(settings(tmp_path)).state == state


def test_the_clock_check_leaves_no_file(tmp_path: Path) -> None:
    assert checks.check_clock(settings(tmp_path)).state == "ok"
    assert list(tmp_path.iterdir()) == []
