"""Docker's own client without a daemon: what a node says then."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.domain.errors import RuntimeUnavailable
from gangline.sandbox.containers.runtime import DockerRuntime
from support.requirements import need_command


async def test_the_question_of_docker_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_command("docker", "apt-get install docker.io")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(RuntimeUnavailable, match="docker does not answer") as told:
        await DockerRuntime().check()
    assert told.value.message.lower().count("daemon running?") == 1, told.value.message
    assert "?." not in told.value.message
