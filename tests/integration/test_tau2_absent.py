"""Tasks of tau2-bench where the named Python has no tau2-bench: the error says what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.imported import Choices
from gangline.tasks.importers.source import Wanted, read_source
from support.node.environments import played, using
from support.requirements import need_command, need_module


async def test_a_session_names_the_checkout_and_how_to_install_it(tmp_path: Path) -> None:
    need_module("mcp", "pip install 'gangline[mcp]'")
    need_command("bwrap", "apt-get install bubblewrap")
    environment = {"kind": "tau2", "config": {"domain": "mock", "task": "create_task_1"}}
    result = await played(tmp_path, environment, using([]), python=sys.prefix)
    assert result.outcome == "infra_error"
    assert result.failure is not None
    for said in ("has no tau2-bench", "Clone https://github.com/sierra-research/tau2-bench", "of PyPI is another"):
        assert said in result.failure.message


@pytest.mark.parametrize(
    ("python", "said"),
    [(None, "name it: --python /opt/tau2"), (sys.prefix, "has no tau2-bench")],
    ids=["none", "other"],
)
def test_an_import_names_the_python_that_lacks_it(python: str | None, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        list(read_source(Path("tau2:mock"), Wanted(choices=Choices(python=python))))
